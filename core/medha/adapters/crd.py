"""Writer of the CRD: puts the generated schema of the spec into the files that are shipped.

    python -m medha.adapters.crd        in the root of the repository

Names, columns and the status stand in the file itself, outside of the generated part.
"""

from __future__ import annotations

import pathlib
import textwrap
from typing import Any

import yaml

from medha.spec.schema import spec_schema

FILES = (
    "crds/medha.dev_medhareplicas.yaml",
    "charts/medha-crds/templates/medha.dev_medhareplicas.yaml",
)
BEGINS, ENDS = "          # Generated: make crd\n", "          # End of the generated part\n"


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
    """Replace the generated part of a CRD file."""
    before, begins, rest = text.partition(BEGINS)
    _, ends, after = rest.partition(ENDS)
    if not (begins and ends):
        raise ValueError(f"the file lacks {BEGINS.strip()!r} or {ENDS.strip()!r}: restore them")
    return before + begins + generated() + ends + after


if __name__ == "__main__":
    for name in FILES:
        path = pathlib.Path(name)
        path.write_text(updated(path.read_text()))
