"""From nothing to a served model on Kubernetes and back to nothing: what is said there, is seen.

    make demo-cluster

Finds or starts a cluster (see testbed), installs both charts, applies a MedhaReplica of the small
model of `make demo`, and then: asks it through the `openai` client; sends prompts that outgrow a
KVP group, so that the replica grows and shrinks again; scales it; changes it under load, open
loop; deletes it. Prints a table. Exit status 0: all of it was as promised.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import openai
import yaml
from examples import images
from examples.demo import MODEL
from examples.demo_load import Growth, Load, one
from examples.images import HOUSE
from examples.testbed import ARCHIVES, Failed, Testbed, opened, until
from rich.console import Console
from rich.table import Table

from medha.cli.open_loop import faults
from medha.cli.watch import read_status
from medha.messages import ReplicaStatus
from medha_worker.testing.checkpoint import write_checkpoint

NAMESPACE = "medha"
RESOURCE = HOUSE / "examples" / "kubernetes" / "tiny.yaml"
LONG_TOKENS, SHORT_TOKENS = 24_576, 64
TOKENS_PER_GROUP, PAGE_TOKENS = 20_480, 64
GROWTHS = 3
FULL = 0.6
"""A second group must be asked for before this part of the first one is used."""
RATE = 2.0
"""Requests per second while the fleet is changed."""
READY_S, GROW_S, BACK_S, UPDATE_S, GONE_S = 180.0, 120.0, 120.0, 300.0, 120.0


class Demo:
    """One run on one cluster; `rows` is what was seen."""

    def __init__(self, testbed: Testbed, console: Console) -> None:
        self._bed, self._console = testbed, console
        self._began_s = time.monotonic()
        self._api = ""
        self.rows: list[tuple[str, str, str]] = []
        self.good = True

    # --- telling ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _step(self, name: str) -> Iterator[list[str]]:
        """Times a step; what it saw is put into the list. A step that fails ends the run."""
        self._console.print(f"[{time.monotonic() - self._began_s:5.0f} s] {name} …")
        began_s, seen = time.monotonic(), list[str]()
        try:
            yield seen
        except Failed as failure:
            self.good = False
            seen.append(f"FAILED: {failure}")
            raise
        finally:
            self.rows.append((name, f"{time.monotonic() - began_s:.1f} s", "; ".join(seen)))

    def _expect(self, true: object, what: str) -> None:
        if not true:
            raise Failed(what)

    def table(self) -> Table:
        table = Table(title=f"Seen on the cluster ({self._bed.kind})", title_justify="left")
        for column in ("step", "took", "seen"):
            table.add_column(column, justify="right" if column == "took" else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def tell_why(self) -> None:
        """After a failure: what the cluster says of it."""
        for command in (
            ["get", "mr,pods", "-A", "-o", "wide"],
            ["get", "events", "--sort-by=.lastTimestamp"],
            ["logs", "-n", NAMESPACE, "deployment/medha-operator", "--tail=20"],
            ["logs", "-l", "medha.dev/replica=tiny", "--tail=20", "--prefix"],
        ):
            with contextlib.suppress(Failed):
                self._console.print(f"$ kubectl {' '.join(command)}\n{self._bed.kubectl(*command)}",
                                    highlight=False, markup=False, soft_wrap=True)  # fmt: skip

    # --- the story --------------------------------------------------------------------------------

    def run(self) -> None:
        loading = self._load()
        self._install()
        self._apply()
        loading.join()
        self._serve()
        with (
            self._bed.proxied() as self._api,
            self._bed.forwarded(NAMESPACE, "service/medha-router", 8000) as url,
        ):
            self._chat(url)
            for number in range(1, GROWTHS + 1):
                self._grow(url, number)
            self._scale()
            self._update(url)
        self._delete()

    def _load(self) -> threading.Thread:
        """The worker's image takes longest: it comes while the rest is set up."""
        with self._step("load the operator's and the router's image") as seen:
            for target in ("operator", "router"):
                self._bed.load(target)
            seen.append("on every node")
        loading = threading.Thread(target=self._bed.load, args=("worker",), name="worker's image")
        loading.start()
        return loading

    def _install(self) -> None:
        with self._step("helm install medha-crds, medha") as seen:
            for chart in ("medha-crds", "medha"):
                self._bed.run(
                    "helm", "install", chart, str(HOUSE / "charts" / chart), "--namespace",
                    NAMESPACE, "--create-namespace", "--wait", "--timeout", "3m", timeout_s=200.0,
                )  # fmt: skip
            pods = self._bed.get("-n", NAMESPACE, "pods")["items"]
            seen.append(f"{len(pods)} pods are ready")

    def _apply(self) -> None:
        with self._step("kubectl apply -f examples/kubernetes/tiny.yaml") as seen:
            if self._bed.kind != "given":
                write_checkpoint(self._bed.model, MODEL)
            found = yaml.safe_load(RESOURCE.read_text())
            found["spec"]["model"]["source"] = {"hostPath": {"path": str(self._bed.model)}}
            # What is released sooner is seen sooner.
            found["spec"].setdefault("scheduling", {})["releaseCooldown"] = "5s"
            seen.append(self._bed.kubectl("apply", "-f", "-", text=yaml.safe_dump(found)).strip())

    def _serve(self) -> None:
        with self._step("kubectl wait --for=condition=Ready") as seen:
            self._ready()
            names = [f"{each['metadata']['name']} on {each['spec']['nodeName']}"
                     for each in self._pods()]  # fmt: skip
            seen.append(", ".join(names))

    def _chat(self, url: str) -> None:
        with self._step("a streamed chat through the openai client") as seen:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60.0)
            stream = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "Who goes first?"}],
                max_tokens=24, stream=True,
            )  # fmt: skip
            pieces = [part.choices[0].delta.content or "" for part in stream if part.choices]
            self._expect(any(pieces), "the stream said nothing")
            seen.append(f"{len(pieces)} pieces")

    def _grow(self, url: str, number: int) -> None:
        with self._step(f"a prompt of {LONG_TOKENS} tokens, {number} of {GROWTHS}") as seen:
            before = self._status()
            watch = Growth(self._controller(), TOKENS_PER_GROUP, PAGE_TOKENS)
            with watch:
                record = asyncio.run(one(url, "tiny", LONG_TOKENS, 16, f"long-{number}"))
            self._expect(not record.refused, f"the long prompt ended with {record.refused}")
            self._expect(watch.joined_s is not None, f"no second group joined: {watch.last}")
            self._expect(watch.used <= FULL,
                         f"asked for when {watch.used:.0%} of group 0 was used")  # fmt: skip
            self._expect(watch.generation > before.generation, "no new generation")
            events = self._bed.get("events", "--field-selector", "reason=GroupJoined")["items"]
            self._expect(len(events), "no Event tells that a group joined")
            seen += [
                f"asked for at {watch.used:.0%} of group 0",
                f"2 groups after {watch.joined_s:.0f} s",
                f"generation {watch.generation}",
                f"first token {record.ttft_s or 0.0:.1f} s",
                f"largest gap {record.worst_gap_s * 1000:.0f} ms",
            ]
            took_s = until(self._is_small, "back to one group", BACK_S)
            seen.append(f"back to 1 group {took_s:.0f} s later")

    def _scale(self) -> None:
        with self._step("kubectl scale mr tiny --replicas=2") as seen:
            self._bed.kubectl("scale", "mr", "tiny", "--replicas=2")
            until(lambda: self._mr()["status"].get("readyReplicas") == 2, "two replicas", READY_S)
            seen.append(self._bed.kubectl("get", "mr").strip().splitlines()[-1])

    def _update(self, url: str) -> None:
        """Another spec, replica by replica, while requests come in at their own times."""
        with self._step("a rolling update under load") as seen:
            load = Load(url, "tiny", RATE, SHORT_TOKENS)
            with load:
                until(lambda: len(load.records) >= 3, "the first answers", 60.0)
                before = {each["metadata"]["uid"] for each in self._pods()}
                change = {"spec": {"template": {"env": [{"name": "CHANGED", "value": "yes"}]}}}
                self._bed.kubectl("patch", "mr", "tiny", "--type=merge", "-p", msgspec.json.encode(
                    change).decode())  # fmt: skip
                took_s = until(lambda: self._updated(before), "the update", UPDATE_S)
            failed = faults(load.records)
            cut = [each for each in load.records if each.finished_s is None and not each.refused]
            self._expect(not failed and not cut, f"{dict(failed)} failed, {len(cut)} truncated")
            seen += [
                f"every pod is another after {took_s:.0f} s",
                f"{len(load.records)} requests, 0 failed, 0 truncated",
                f"TTFT p99 {load.ttft_p99_s():.2f} s",
            ]

    def _delete(self) -> None:
        with self._step("kubectl delete mr tiny, helm uninstall") as seen:
            self._bed.kubectl("delete", "mr", "tiny")
            until(lambda: not self._left("default"), "nothing left of it", GONE_S)
            for chart in ("medha", "medha-crds"):
                self._bed.run("helm", "uninstall", chart, "--namespace", NAMESPACE, "--wait")
            kinds = "pods,services,configmaps,poddisruptionbudgets"
            seen.append(f"nothing left: {kinds.replace(',', ', ')}")

    # --- looking ----------------------------------------------------------------------------------

    def _mr(self) -> dict[str, Any]:
        return self._bed.get("mr", "tiny")

    def _pods(self) -> list[dict[str, Any]]:
        pods: list[dict[str, Any]] = self._bed.get("pods", "-l", "medha.dev/replica=tiny")["items"]
        return pods

    def _ready(self) -> None:
        try:
            self._bed.kubectl("wait", "mr/tiny", "--for=condition=Ready", f"--timeout={READY_S}s",
                              timeout_s=READY_S + 10.0)  # fmt: skip
        except Failed:
            told = [f"{each['type']}: {each['message']}" for each in self._mr()["status"][
                "conditions"] if each["status"] != "True" and each["message"]]  # fmt: skip
            raise Failed(f"not Ready within {READY_S:.0f} s: {'; '.join(told)}") from None

    def _controller(self) -> str:
        """The ops port of the first replica's controller, through the API server."""
        return f"{self._api}/api/v1/namespaces/default/pods/tiny-0-g0-s0:8091/proxy"

    def _status(self) -> ReplicaStatus:
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            found = read_status(client, self._controller())
        if found is None:
            raise Failed("the controller of tiny-0 does not answer")
        return found

    def _is_small(self) -> bool:
        return len(self._pods()) == 2 and self._status().wanted_groups == 1

    def _updated(self, before: set[str]) -> bool:
        found, pods = self._mr(), self._pods()
        status = found["status"]
        return (
            not before & {each["metadata"]["uid"] for each in pods}
            and status.get("observedGeneration") == found["metadata"]["generation"]
            and status.get("readyReplicas") == 2
            and len(pods) == 4
        )

    def _left(self, namespace: str) -> list[str]:
        kinds = "pods,services,configmaps,poddisruptionbudgets,endpointslices"
        found = self._bed.kubectl(
            "-n",
            namespace,
            "get",
            kinds,
            "-l",
            "app.kubernetes.io/managed-by=medha-operator",
            "-o",
            "name",
        )
        return found.split()


def main() -> int:
    console = Console(width=160)
    for target in images.TARGETS:
        console.print(f"image {target}")
        images.build(target, "cpu")
        images.archive(target, ARCHIVES)
    began_s = time.monotonic()
    with opened("demo") as testbed:
        demo = Demo(testbed, console)
        try:
            demo.run()
        except Failed:
            demo.tell_why()
        console.print(demo.table())
    console.print(f"{time.monotonic() - began_s:.0f} s in all, after the images were built")
    return 0 if demo.good else 1


if __name__ == "__main__":
    sys.exit(main())
