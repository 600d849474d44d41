"""Ranks connect to their controller over TCP only with a listed key."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

import msgspec
import pytest
from tests.support.replica_processes import ReplicaProcesses

from medha.adapters.sockets import Dialer, write_keys
from medha.cli.local_fleet.preflight import free_ports
from medha.config import Curve, Scheduling, WorkerConfig
from medha.errors import SpecError
from medha.messages import Codec, RankCommand, RankHello, RankReport
from medha.topology import Topology
from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint


def pair(folder: pathlib.Path, name: str) -> str:
    """Write `name.secret` and `name.public`; returns the path without its suffix."""
    (folder / f"{name}.public").write_text(write_keys(folder / f"{name}.secret") + "\n")
    return str(folder / name)


@pytest.fixture
def config(tmp_path: pathlib.Path) -> WorkerConfig:
    """A replica of two stages and up to two groups whose ranks dial over TCP with keys."""
    router, controller, rank = (pair(tmp_path, name) for name in ("router", "controller", "rank"))
    (port,) = free_ports("127.0.0.1", 1)
    return WorkerConfig(
        replica="r0",
        model="tiny",
        checkpoint=str(write_checkpoint(tmp_path / "model", TinyModel(layers=2, hidden=64))),
        max_context_tokens=1024,
        topology=Topology(spp=2, kvp_max=2, tokens_per_group=2048),
        page_tokens=16,
        kv_pages=128,
        scheduling=Scheduling(),
        curve=Curve(secret=f"{controller}.secret", server_public=f"{router}.public"),
        rank_bind=f"tcp://127.0.0.1:{port}",
        rank_curve=Curve(
            secret=f"{rank}.secret",
            server_public=f"{controller}.public",
            allowed=f"{rank}.public",
        ),
    )


@pytest.fixture
def fleet(config: WorkerConfig, tmp_path: pathlib.Path) -> Iterator[ReplicaProcesses]:
    router = Curve(
        secret=str(tmp_path / "router.secret"), allowed=str(tmp_path / "controller.public")
    )
    with contextlib.closing(ReplicaProcesses(tmp_path, config, router)) as running:
        yield running


def test_ranks_with_a_listed_key_serve_and_strangers_are_ignored(
    fleet: ReplicaProcesses, config: WorkerConfig, tmp_path: pathlib.Path
) -> None:
    fleet.until_ready()
    assert config.rank_curve is not None
    stranger = Curve(
        secret=pair(tmp_path, "stranger") + ".secret",
        server_public=config.rank_curve.server_public,
    )
    hello = RankHello(group=0, stage=0, shard=0, incarnation="stranger", pid=os.getpid())
    for curve in (stranger, None):
        dialer: Dialer[RankReport, RankCommand] = Dialer(
            config.rank_bind,
            b"g0-s0-t0",
            sends=Codec(RankReport),
            receives=Codec(RankCommand),
            curve=curve,
        )
        with contextlib.closing(dialer):
            dialer.send(hello)
            name = f"with {'a strange' if curve else 'no'} key"
            fleet.submit(name, [5, 9, 200], 8)
            fleet.until_over()
            assert fleet.replies[name].finished is not None
            assert dialer.handshakes == 0 and dialer.receive() is None
    status = fleet.status()
    assert status.ready and status.restart_groups == () and "stranger" not in fleet.text


def test_a_link_between_machines_needs_keys(config: WorkerConfig) -> None:
    change = msgspec.structs.replace
    assert change(config, rank_bind="ipc:///run/r0", rank_curve=None).listening_curve() is None
    with pytest.raises(SpecError, match=r"rank_bind is tcp://10\.0\.0\.7:7900: must be ipc://"):
        change(config, rank_bind="tcp://10.0.0.7:7900", rank_curve=None).listening_curve()
    with pytest.raises(SpecError, match="curve is absent: must be given with rank_curve"):
        change(config, curve=None).listening_curve()
