"""The operator process's settings, from its environment; every value has one clear error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from medha.errors import SpecError


class Flows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rules of a NetworkPolicy's spec, as the API takes them."""

    ingress: tuple[dict[str, Any], ...] = ()
    egress: tuple[dict[str, Any], ...] = ()


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the operator; times in seconds.

    `namespaces` empty means all. `router` is the fleet address that controllers dial (empty: the
    chart's Service in the operator's namespace), `worker_image` the pods' image unless
    `spec.template.image` is set, `prometheus` the address that KEDA queries. `worker_flows` are the
    flows to and from a replica's pods besides those among them; None: no NetworkPolicy. `scrape`
    adds the annotations by which a Prometheus without its operator discovers pods.
    """

    namespace: str
    worker_image: str
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    router: str = ""
    identity: str = "medha-operator"
    namespaces: tuple[str, ...] = ()
    ops_host: str = "0.0.0.0"
    ops_port: int = 8081
    workers: int = 16
    resync_s: float = 30.0
    report_s: float = 2.0
    router_ops_port: int = 8001
    prometheus: str = ""
    lease_s: float = 15.0
    log_level: str = "info"
    worker_flows: Flows | None = None
    scrape: bool = False

    def __post_init__(self) -> None:
        if not self.router:
            router = f"tcp://medha-router-fleet.{self.namespace}:7800"
            msgspec.structs.force_setattr(self, "router", router)

    @property
    def router_host(self) -> str:
        """Name or address of all routers; the operator polls their ops ports for demand."""
        return self.router.partition("://")[2].rpartition(":")[0].strip("[]")


_LISTS = frozenset({"namespaces"})
_JSON = frozenset({"worker_flows"})


def from_environment(environ: Mapping[str, str]) -> Settings:
    """Read `MEDHA_<FIELD>` for each field; lists are comma-separated, flows are JSON. Raises
    SpecError."""
    values: dict[str, object] = {}
    for field in msgspec.structs.fields(Settings):
        name = f"MEDHA_{field.name.upper()}"
        text = environ.get(name, "")
        if text:
            values[field.name] = _read(field.name, name, text)
        elif field.required:
            raise SpecError(name, "", "must be set", "set it in the operator's Deployment")
    try:
        return msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        field_name = str(error).rpartition("$.")[2].strip("`")
        name = f"MEDHA_{field_name.upper()}"
        raise SpecError(
            name, environ.get(name, ""), f"must fit its type ({error})", "correct its value"
        ) from None


def _read(field: str, name: str, text: str) -> object:
    if field in _JSON:
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise SpecError(
                name, text[:80], f"must be JSON ({error})", "correct its value"
            ) from None
    return text.split(",") if field in _LISTS else text
