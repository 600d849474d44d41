"""What a cluster asks of a MedhaReplica beyond its own rules: each broken one in a clear sentence.

Pure. Whether a volume claim, an image or a node label exists is seen later, and told in conditions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from medha.errors import SpecError
from medha.spec import MedhaReplica
from medha_operator.names import PREFIX
from medha_operator.quantities import integer

VOLUMES = ("config", "keys", "model", "run", "shared-memory")
"""Names of a pod's volumes that are the operator's."""

SETTINGS = ("MEDHA_DECISION_LOG", "MEDHA_INTERFACE")
"""Variables of a pod that are left to people."""


def check(resource: MedhaReplica) -> None:
    """Raises SpecError for the first thing that could not work in a cluster."""
    _check_source(resource)
    _check_template(resource)


def _check_source(resource: MedhaReplica) -> None:
    source = resource.spec.model.source
    if source.host_path is not None and not source.host_path.path.startswith("/"):
        raise SpecError(
            "spec.model.source.hostPath.path",
            source.host_path.path,
            "must be absolute in a cluster, where it is a folder of every node",
            "start it with /, or use pvc",
        )
    for kind, part in (("pvc", source.pvc), ("image", source.image)):
        if part is not None and ".." in part.path.split("/"):
            raise SpecError(
                f"spec.model.source.{kind}.path",
                part.path,
                "must stay inside the volume",
                "remove the ..",
            )
    if source.uri is not None and not source.uri.startswith(("https://", "http://")):
        raise SpecError(
            "spec.model.source.uri",
            source.uri,
            "must be the http or https address of a checkpoint's folder",
            "use https://…, or another source",
        )


def _check_template(resource: MedhaReplica) -> None:
    template = resource.spec.template
    for field, keys in (("labels", template.labels), ("annotations", template.annotations)):
        for key in keys:
            if key.startswith(PREFIX):
                raise SpecError(
                    f"spec.template.{field}",
                    key,
                    f"must not begin with {PREFIX}, which is the operator's",
                    "choose another prefix",
                )
    _check_names("env", template.env, prefix="MEDHA_", free=SETTINGS)
    _check_names("volumes", template.volumes, taken=VOLUMES)
    for field in template.resources:
        if field not in ("requests", "limits"):
            raise SpecError(
                "spec.template.resources", field, "must be requests or limits", "remove it"
            )
        amounts = template.resources[field]
        if not isinstance(amounts, Mapping):
            raise SpecError(
                f"spec.template.resources.{field}",
                amounts,
                "must be a mapping of resources to quantities",
                "write it as `cpu: 500m` lines",
            )
        for name, amount in amounts.items():
            try:
                integer(name, amount)
            except SpecError:
                raise SpecError(
                    f"spec.template.resources.{field}.{name}",
                    amount,
                    "must be a quantity",
                    "use one such as 500m, 8 or 16Gi",
                ) from None


def _check_names(
    field: str,
    items: Iterable[Mapping[str, Any]],
    prefix: str = "",
    free: tuple[str, ...] = (),
    taken: tuple[str, ...] = (),
) -> None:
    """Items of a list have names, and none that is ours."""
    for index, item in enumerate(items):
        name, path = item.get("name"), f"spec.template.{field}[{index}].name"
        if not isinstance(name, str) or not name:
            raise SpecError(path, name or "missing", "must be text", "name it")
        if name in taken or (prefix and name.startswith(prefix) and name not in free):
            raise SpecError(path, name, "must differ from the operator's own", "rename it")
