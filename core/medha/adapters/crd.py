"""Writer of the CRD: puts the generated schema of the spec into the files that are shipped.

    python -m medha.adapters.crd        in the root of the repository

Names, columns and the status stand in the file itself, outside of the generated parts: the spec of
the newest version, and older versions, which repeat the newest word for word.
"""

from __future__ import annotations

import pathlib
import textwrap
from typing import Any

import yaml

from medha.spec import API_VERSIONS
from medha.spec.schema import spec_schema

FILES = (
    "crds/medha.dev_medhareplicas.yaml",
    "charts/medha-crds/templates/medha.dev_medhareplicas.yaml",
)
BEGINS, ENDS = "          # Generated: make crd\n", "          # End of the generated part\n"
NEWEST, *OLDER = (version.partition("/")[2] for version in API_VERSIONS)
STORED = "v1alpha1"
"""The version of stored objects: the oldest served, so that the kind can be downgraded."""


class _Dumper(yaml.SafeDumper):
    """Writes lists indented like the rest of the file, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def generated() -> str:
    """Return the generated part: the key `spec` with its schema."""
    text = yaml.dump(
        {"spec": spec_schema()}, Dumper=_Dumper, sort_keys=False, width=90, allow_unicode=True
    )
    return textwrap.indent(text, " " * 10)


def updated(text: str) -> str:
    """Replace the generated parts of a CRD file."""
    first = _version(NEWEST)
    head, start, newest = text.partition(first)
    newest = newest.partition(_version(OLDER[0]))[0]
    before, begins, rest = newest.partition(BEGINS)
    _, ends, after = rest.partition(ENDS)
    if not (start and begins and ends):
        lines = ", ".join(repr(line.strip()) for line in (first, BEGINS, ENDS))
        raise ValueError(f"the file lacks one of {lines}: restore them")
    body = before + begins + generated() + ends + after
    return head + first + body + "".join(_version(name) + body for name in OLDER)


def _version(name: str) -> str:
    """Return the first lines of a version."""
    stored = str(name == STORED).lower()
    return f"  - name: {name}\n    served: true\n    storage: {stored}\n"


if __name__ == "__main__":
    for name in FILES:
        path = pathlib.Path(name)
        path.write_text(updated(path.read_text()))
