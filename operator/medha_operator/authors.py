"""Who wrote `spec.replicas`, as the API server keeps it in an object's managed fields. Pure.

Of whoever wrote a value last the API server knows the name; a writer that changes it takes it from
the former one. So an autoscaler that is not alone finds out, and by whom.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from medha_operator.names import FIELD_MANAGER


class Author(msgspec.Struct, frozen=True):
    """A writer, by the name that it gave itself."""

    name: str

    @property
    def ours(self) -> bool:
        return self.name == FIELD_MANAGER


def authors_of(metadata: Mapping[str, Any]) -> tuple[Author, ...]:
    """Those who wrote `spec.replicas`, the latest last."""
    found = []
    for entry in metadata.get("managedFields") or ():
        fields = entry.get("fieldsV1") or {}
        if "f:replicas" in (fields.get("f:spec") or {}):
            found.append((entry.get("time") or "", Author(entry.get("manager") or "somebody")))
    return tuple(author for _, author in sorted(found, key=lambda each: each[0]))
