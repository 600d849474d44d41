"""Both ends of a link, for the tests of this folder."""

from __future__ import annotations

import time
from collections.abc import Callable

from medha.adapters.sockets import Dialer, Listener
from medha.config import Curve
from medha.messages import Codec, LoadReport, RouterMessage, Welcome
from medha.messages.fields import Load
from medha.messages.routing import ReplicaMessage

Front = Listener[RouterMessage, ReplicaMessage]
Back = Dialer[ReplicaMessage, RouterMessage]

DOWN: Codec[RouterMessage] = Codec(RouterMessage)
UP: Codec[ReplicaMessage] = Codec(ReplicaMessage)
REPORT = LoadReport(Load(waiting=3))


def listen(
    bind: str = "tcp://127.0.0.1:0", curve: Curve | None = None, limit: int = 1 << 20
) -> Front:
    return Listener(bind, sends=DOWN, receives=UP, curve=curve, max_bytes=limit)


def dial(address: str, name: bytes = b"one", curve: Curve | None = None) -> Back:
    return Dialer(address, name, sends=UP, receives=DOWN, curve=curve)


def until(happens: Callable[[], object], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.005)


def exchange(front: Front, back: Back) -> None:
    assert back.send(REPORT)
    assert front.receive(30.0) == (b"one", REPORT)
    assert front.send(b"one", Welcome("r"))
    assert back.receive(30.0) == Welcome("r")
