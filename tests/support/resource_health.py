"""Conclusions of clients that wait for resources: kstatus (kubectl, Flux) and Argo CD."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ARGO = Path(__file__).resolve().parents[2] / "examples/argocd/argocd-cm.yaml"
HEALTH = "resource.customizations.health.medha.dev_MedhaReplica"


def kstatus(body: Mapping[str, Any]) -> tuple[str, str]:
    """Return the status that kstatus computes, and its message.

    The rules of its `checkGenericProperties` and `checkReadyCondition`, in their order.
    """
    metadata, status = body["metadata"], body.get("status", {})
    if metadata.get("deletionTimestamp"):
        return "Terminating", "resource scheduled for deletion"
    if status.get("observedGeneration", metadata["generation"]) != metadata["generation"]:
        return "InProgress", "latest generation not observed"
    for condition in status.get("conditions", ()):
        if condition["type"] == "Reconciling" and condition["status"] == "True":
            return "InProgress", condition["message"]
        if condition["type"] == "Stalled" and condition["status"] == "True":
            return "Failed", condition["message"]
    for condition in status.get("conditions", ()):
        if condition["type"] == "Ready" and condition["status"] != "True":
            return "InProgress", condition["message"]
    return "Current", "resource is current"


def argo_health(body: Mapping[str, Any]) -> tuple[str, str]:
    """Run the health check of the example in Lua 5.1, as Argo CD does; its status and message."""
    lua: Any = pytest.importorskip("lupa.lua51", reason="needs lupa: make setup")
    runtime = lua.LuaRuntime(unpack_returned_tuples=True, register_eval=False)
    script = yaml.safe_load(ARGO.read_text())["data"][HEALTH]
    check = runtime.eval(f"function(obj) {script} end")
    health = check(runtime.table_from(body, recursive=True))
    return health.status, health.message or ""
