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
    """`namespaces` empty: all of them. `router` is the fleet address that controllers dial (empty:
    the chart's Service in our own namespace), `worker_image` what pods run unless
    `spec.template.image` says otherwise; times in seconds. `prometheus`: where KEDA asks for
    metrics. `worker_flows`: what goes in and out of a replica's pods besides what they say to each
    other; None: no NetworkPolicy is made. `scrape`: pods carry the annotations by which a
    Prometheus without its operator finds them."""

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

    @property
    def router_host(self) -> str:
        """Name or address of all routers, whose ops ports are asked for demand."""
        return self.fleet_address.partition("://")[2].rpartition(":")[0].strip("[]")

    @property
    def fleet_address(self) -> str:
        """Where controllers dial the routers."""
        return self.router or f"tcp://medha-router-fleet.{self.namespace}:7800"


_LISTS = frozenset({"namespaces"})
_JSON = frozenset({"worker_flows"})


def from_environment(environ: Mapping[str, str]) -> Settings:
    """`MEDHA_<FIELD>` for each field; lists are separated by commas, flows are JSON. Raises
    SpecError."""
    found: dict[str, object] = {}
    for field in msgspec.structs.fields(Settings):
        name = f"MEDHA_{field.name.upper()}"
        text = environ.get(name, "")
        if text:
            found[field.name] = _read(field.name, name, text)
        elif field.required:
            raise SpecError(name, "", "must be set", "set it in the operator's Deployment")
    try:
        return msgspec.convert(found, Settings, strict=False)
    except msgspec.ValidationError as error:
        field_name = str(error).rpartition("$.")[2].strip("`")
        name = f"MEDHA_{field_name.upper()}"
        raise SpecError(
            name, environ.get(name, ""), f"must fit its type ({error})", "mend its value"
        ) from None


def _read(field: str, name: str, text: str) -> object:
    if field in _JSON:
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise SpecError(name, text[:80], f"must be JSON ({error})", "mend its value") from None
    return text.split(",") if field in _LISTS else text
