"""Logins of the operator: kubeconfigs that it refuses, and credentials that it reads again."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.api.fleet import HOUSE, Fleet
from tests.api.server import ApiServer

from medha.cli.local_fleet.child_process import killed_with_parent
from medha_operator.kube.client import REPLICAS
from medha_operator.kube.kopf_source import KopfSource

pytestmark = pytest.mark.timeout(900)


def test_an_operator_whose_kubeconfig_names_another_user_ends_and_names_the_field(
    api_server: ApiServer, tmp_path: Path
) -> None:
    document = json.loads(api_server.kubeconfig.read_text())
    document["users"][0]["user"]["as"] = "somebody"
    path = tmp_path / "config"
    path.write_text(json.dumps(document))
    environment = {"MEDHA_NAMESPACE": "n", "MEDHA_WORKER_IMAGE": "i", "KUBECONFIG": str(path)}
    ended = subprocess.run(
        killed_with_parent(sys.executable, "-m", "medha_operator"),
        cwd=HOUSE,
        env={**os.environ, **environment, "MEDHA_OPS_PORT": "0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert f"as of user 'test' in {path} is not supported: " in ended.stderr


def test_events_go_on_after_credentials_were_read_again(
    fleet: Fleet, api_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(api_server.kubeconfig))
    events: queue.Queue[tuple[str | None, str]] = queue.Queue()

    def sink(kind: str | None, body: Mapping[str, Any]) -> None:
        events.put((kind, body["metadata"]["name"]))

    source = KopfSource([fleet.namespace], sink, datetime.timedelta(seconds=0.5))
    source.start(REPLICAS)
    with contextlib.ExitStack() as stack:
        stack.callback(source.stop)
        for name in ("one", "two"):
            time.sleep(1.0)  # longer than credentials last
            fleet.create(name)
            while events.get(timeout=60)[1] != name:
                pass
        fleet.change("one", {"replicas": 2})
        while events.get(timeout=60) != ("MODIFIED", "one"):
            pass
