"""A real Prometheus on loopback, with given targets and the project's alerts."""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec

from medha.cli.local_fleet.preflight import free_ports

HOUSE = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
SCRAPE_S = 1
# What Grafana would put in place of its variables, at one scrape per second.
RATE_INTERVAL, STEP_S, MOST_POINTS = "15s", 5, 60
VARIABLES = {
    "$__rate_interval": RATE_INTERVAL,
    "$namespace": ".*",
    "$model": ".*",
    "$class": ".*",
    "$objective": "0.99",
}


class Target(msgspec.Struct, frozen=True):
    """A process: its kind, `address:port`, the namespace that its pod would be in, and whether the
    labels that it shows itself stand (of the operator they do: the chart has it so)."""

    job: str
    address: str
    namespace: str
    honours: bool = False


class Series(msgspec.Struct, frozen=True):
    """Labels of a series, and (time, value) of its finite points."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]


class Prometheus:
    """Runs from `start` to `close`; errors of queries are AssertionErrors with what it said."""

    def __init__(self, program: Path, folder: Path, targets: Iterable[Target]) -> None:
        (self._port,) = free_ports(HOST, 1)
        self._log = folder / "prometheus.log"
        config = folder / "prometheus.json"  # JSON is YAML
        config.write_text(
            json.dumps(
                {
                    "global": {
                        "scrape_interval": f"{SCRAPE_S}s",
                        "scrape_timeout": f"{SCRAPE_S}s",
                        "evaluation_interval": "1s",
                    },
                    "rule_files": [str(HOUSE / "dashboards" / "alerts.yaml")],
                    "scrape_configs": [
                        {
                            "job_name": target.job,
                            "honor_labels": target.honours,
                            "static_configs": [
                                {
                                    "targets": [target.address],
                                    "labels": {"namespace": target.namespace},
                                }
                            ],
                        }
                        for target in _apart(targets)
                    ],
                }
            )
        )
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={HOST}:{self._port}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=log,
            )
        self._client = httpx.Client(base_url=self.url, timeout=60.0, trust_env=False)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._port}"

    def ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def up(self) -> dict[str, float]:
        """Each address, and whether its last scrape succeeded."""
        response = self._client.get("/api/v1/query", params={"query": "up"}).json()
        return {
            result["metric"]["instance"]: float(result["value"][1])
            for result in response["data"]["result"]
        }

    def range(self, expr: str, start: float, end: float, **chosen: str) -> list[Series]:
        """A panel's expression over a time, as Grafana asks for it; `chosen`: its variables."""
        expr = _chosen(expr, {"$__range": f"{max(1, int(end - start))}s"}, chosen)
        step_s = max(STEP_S, math.ceil((end - start) / MOST_POINTS))
        answer = self._client.post(
            "/api/v1/query_range",
            data={"query": expr, "start": start, "end": end, "step": step_s},
        ).json()
        assert answer["status"] == "success", f"{expr}: {answer.get('error')}"
        return [_series(result) for result in answer["data"]["result"]]

    def values(self, query: str, start: float, end: float, **chosen: str) -> list[str]:
        """Values of a dashboard's variable, by its `label_values(series, label)`, as in Grafana."""
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        assert match, query
        params: dict[str, str | float] = {"start": start, "end": end}
        params["match[]"] = _chosen(match[1], {}, chosen)
        answer = self._client.get(f"/api/v1/label/{match[2]}/values", params=params).json()
        assert answer["status"] == "success", f"{query}: {answer.get('error')}"
        values: list[str] = answer["data"]
        return values

    def value(self, expr: str) -> float | None:
        """Current value of an expression, as KEDA queries it; None if there is none."""
        answer = self._client.get("/api/v1/query", params={"query": expr}).json()
        assert answer["status"] == "success", f"{expr}: {answer.get('error')}"
        results = answer["data"]["result"]
        assert len(results) <= 1, results
        return float(results[0]["value"][1]) if results else None

    def jobs_of(self, series: str, start: float, end: float) -> set[str]:
        """The kinds of process that showed a series at any time."""
        names: dict[str, str | float] = {"match[]": series, "start": start, "end": end}
        answer = self._client.get("/api/v1/series", params=names).json()
        assert answer["status"] == "success", answer
        return {labels["job"].partition("-")[0] for labels in answer["data"]}

    def rules(self) -> list[dict[str, Any]]:
        """Every rule, with its health."""
        groups = self._client.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def close(self) -> None:
        self._client.close()
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _chosen(expr: str, times: Mapping[str, str], chosen: Mapping[str, str]) -> str:
    """With every variable's value in its place."""
    named = {f"${name}": value for name, value in chosen.items()}
    for name, value in {**VARIABLES, **times, **named}.items():
        expr = expr.replace(name, value)
    return expr


def _apart(targets: Iterable[Target]) -> list[Target]:
    """Names of jobs must differ: the second router is `router-1`."""
    seen: dict[str, int] = {}
    renamed = []
    for target in targets:
        number = seen[target.job] = seen.get(target.job, -1) + 1
        name = f"{target.job}-{number}" if number else target.job
        renamed.append(msgspec.structs.replace(target, job=name))
    return renamed


def _series(result: dict[str, Any]) -> Series:
    points = tuple((float(at), float(value)) for at, value in result["values"])
    return Series(result["metric"], tuple(point for point in points if math.isfinite(point[1])))


def wait_for(prometheus: Prometheus, addresses: Iterable[str], within_s: float = 60.0) -> None:
    """Until every address was scraped."""
    wanted, end = set(addresses), time.monotonic() + within_s
    while True:
        up = prometheus.up() if prometheus.ready() else {}
        if all(up.get(address) == 1.0 for address in wanted):
            return
        assert time.monotonic() < end, f"not scraped within {within_s:.0f} s: {wanted}, {up}"
        time.sleep(0.2)
