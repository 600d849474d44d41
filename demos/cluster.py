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

import httpx
import openai
from demos import images
from demos.batch_gaps import gaps
from demos.load import Growth, Load, one
from demos.release import DECISIONS, NAMESPACE, READY_S, TOKENS_PER_GROUP, Installed
from demos.testbed import Failed, Testbed, built, opened, until
from rich.console import Console
from rich.table import Table

from medha.cli.local_fleet.status_poll import read_status
from medha.cli.open_loop import faults
from medha.messages import ReplicaStatus

LEADER = "tiny-0-g0-s0"
LONG_TOKENS, FITTING_TOKENS, SHORT_TOKENS = 18_432, 12_288, 64
GROWTHS = 3
FULL = 0.6
"""A second group must be asked for before this part of the first one is used."""
RATE = 2.0
"""Requests per second while the fleet is changed."""
BACK_S, UPDATE_S = 120.0, 300.0


class Demo:
    """A run of the demo on a cluster; `rows` holds the results."""

    def __init__(self, testbed: Testbed, console: Console) -> None:
        self._bed, self._console = testbed, console
        self._medha = Installed(testbed)
        self._api = ""
        self._usual_s = 0.0
        self._began_s = time.monotonic()
        self.rows: list[tuple[str, str, str]] = []

    # --- reporting --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _step(self, name: str) -> Iterator[list[str]]:
        """Times a step; what it saw is put into the list. A step that fails ends the run."""
        self._console.print(f"{time.monotonic() - self._began_s:5.0f} s  {name}", highlight=False)
        began_s, seen = time.monotonic(), list[str]()
        try:
            yield seen
        except Failed as failure:
            seen.append(f"FAILED: {failure}")
            self._console.print(f"        FAILED: {failure}", style="red", highlight=False)
            raise
        finally:
            self.rows.append((name, f"{time.monotonic() - began_s:.1f} s", "; ".join(seen)))

    def table(self) -> Table:
        table = Table(title=f"Seen on the cluster ({self._bed.kind})", title_justify="left")
        for column in ("step", "took", "seen"):
            table.add_column(column, justify="right" if column == "took" else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    # --- the story --------------------------------------------------------------------------------

    def run(self) -> None:
        loading = self._install()
        self._apply(loading)
        with (
            self._bed.proxied() as self._api,
            self._bed.forwarded(NAMESPACE, "service/medha-router", 8000) as url,
        ):
            self._chat(url)
            self._steady(url)
            for number in range(1, GROWTHS + 1):
                self._grow(url, number)
            self._scale()
            self._update(url)
        self._delete()

    def _install(self) -> threading.Thread:
        with self._step("load images, helm install medha-crds and medha") as seen:
            loading = self._medha.load()
            self._medha.install()
            pods = self._bed.get("-n", NAMESPACE, "pods")["items"]
            seen.append(f"{len(pods)} pods are ready")
        return loading

    def _apply(self, loading: threading.Thread) -> None:
        with self._step("the worker's image on every node"):
            loading.join()
        with self._step("kubectl apply, kubectl wait --for=condition=Ready mr/tiny") as seen:
            self._medha.apply()
            self._medha.ready()
            seen += [
                f"{pod['metadata']['name']} on {pod['spec']['nodeName']}"
                for pod in self._medha.pods()
            ]

    def _chat(self, url: str) -> None:
        with self._step("a streamed chat through the openai client") as seen:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60.0)
            stream = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "Who goes first?"}],
                max_tokens=24,
                stream=True,
            )
            pieces = [part.choices[0].delta.content or "" for part in stream if part.choices]
            expect(any(pieces), "the stream said nothing")
            seen.append(f"{len(pieces)} pieces")

    def _steady(self, url: str) -> None:
        """Measure the gaps between batches of a prompt that fits into its group."""
        with self._step(f"a prompt of {FITTING_TOKENS} tokens, which fits into a group") as seen:
            record = asyncio.run(one(url, "tiny", FITTING_TOKENS, 16, "fitting"))
            expect(not record.refused, f"it ended with {record.refused}")
            between, after = gaps(self._medha.decisions(LEADER))
            expect(between and not after, "the decision log does not show it")
            self._usual_s = between[int(0.99 * len(between))]
            seen.append(f"p99 of {self._usual_s * 1000:.0f} ms between its batches")

    def _grow(self, url: str, number: int) -> None:
        with self._step(f"a prompt of {LONG_TOKENS} tokens, {number} of {GROWTHS}") as seen:
            before = self._status()
            with Growth(self._controller()) as watch:
                record = asyncio.run(one(url, "tiny", LONG_TOKENS, 16, f"long-{number}"))
            expect(not record.refused, f"the long prompt ended with {record.refused}")
            expect(watch.joined_s is not None, f"no second group joined: {watch.last}")
            requested, joined = (
                tokens / TOKENS_PER_GROUP
                for tokens in (watch.requested_tokens, watch.joined_tokens)
            )
            expect(requested <= FULL, f"asked for when group 0 was {requested:.0%} full")
            expect(watch.generation > before.generation, "no new generation")
            events = self._bed.get("events", "--field-selector", "reason=GroupJoined")["items"]
            expect(events, "no Event reports that a group joined")
            until_joined, after = gaps(self._medha.decisions(LEADER))
            expect(until_joined and after, "the decision log does not show it")
            expect(after[-1] <= 2 * self._usual_s, f"a pause of {after[-1]:.2f} s")
            seen += [
                f"2nd group asked for with group 0 {requested:.0%} full",
                f"runs {watch.joined_s:.0f} s later at {joined:.0%}",
                f"generation {watch.generation}",
                f"{watch.moved_bytes / (1 << 20):.0f} MiB of pages moved",
                f"first token {record.ttft_s or 0.0:.1f} s",
                # Until then the new group's pods start: on few cores, on those that it runs on.
                f"at most {until_joined[-1] * 1000:.0f} ms between its batches until then",
                f"{after[-1] * 1000:.0f} ms from then on",
            ]
            took_s = until(self._is_small, "back to one group", BACK_S)
            seen.append(f"back to 1 group {took_s:.0f} s later")

    def _scale(self) -> None:
        with self._step("kubectl scale mr tiny --replicas=2") as seen:
            self._bed.kubectl("scale", "mr", "tiny", "--replicas=2")
            until(lambda: self._medha.ready_replicas() == 2, "two replicas", READY_S)
            self._medha.ready()
            seen.append(" ".join(self._bed.kubectl("get", "mr").splitlines()[-1].split()))

    def _update(self, url: str) -> None:
        """Another spec, replica by replica, while requests come in at their own times."""
        with self._step("a rolling update under load") as seen:
            with Load(url, "tiny", RATE, SHORT_TOKENS) as load:
                until(lambda: len(load.records) >= 3, "the first answers", 60.0)
                before = {pod["metadata"]["uid"] for pod in self._medha.pods()}
                env = [{"name": "MEDHA_DECISION_LOG", "value": DECISIONS + ".again"}]
                self._medha.patch({"template": {"env": env}})
                took_s = until(lambda: self._medha.updated(before, 4), "the update", UPDATE_S)
            failed = faults(load.records)
            cut = [
                record
                for record in load.records
                if record.finished_s is None and not record.refused
            ]
            expect(not failed and not cut, f"{dict(failed)} failed, {len(cut)} truncated")
            seen += [
                f"every pod is another after {took_s:.0f} s",
                f"{len(load.records)} requests, 0 failed, 0 truncated",
                f"TTFT p99 {load.ttft_p99_s():.2f} s",
            ]

    def _delete(self) -> None:
        with self._step("kubectl delete mr tiny, helm uninstall") as seen:
            seen.append(f"nothing left of it after {self._medha.delete():.0f} s")
            self._medha.uninstall()

    # --- looking ----------------------------------------------------------------------------------

    def _controller(self) -> str:
        """The ops port of the first replica's controller, through the API server."""
        return f"{self._api}/api/v1/namespaces/default/pods/{LEADER}:8091/proxy"

    def _status(self) -> ReplicaStatus:
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            status = read_status(client, self._controller())
        if status is None:
            raise Failed("the controller of tiny-0 does not answer")
        return status

    def _is_small(self) -> bool:
        return len(self._medha.pods()) == 2 and self._status().wanted_groups == 1

    def diagnosis(self) -> None:
        self._console.print(self._medha.diagnosis(), highlight=False, markup=False, soft_wrap=True)


def expect(true: object, what: str) -> None:
    if not true:
        raise Failed(what)


def main() -> int:
    console = Console(width=160)
    try:
        for name in built():
            console.print(f"image {name}")
    except images.Unreachable as error:
        sys.exit(str(error))
    began_s, good = time.monotonic(), True
    with opened("demo") as testbed:
        demo = Demo(testbed, console)
        try:
            demo.run()
        except Failed:
            good = False
            demo.diagnosis()
        console.print(demo.table())
    console.print(f"{time.monotonic() - began_s:.0f} s in all, after the images were built")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
