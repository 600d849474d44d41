"""CURVE on a socket: the server admits keys of an allow-list, the client trusts one server key."""

from __future__ import annotations

import logging
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from medha.adapters.keys import read_key, read_keys
from medha.config import Curve
from medha.errors import SetupError

ZAP_DOMAIN = "medha"


class _AllowList:
    """Answers ZAP: admits the public keys (Z85) of a file, which it reads at each handshake."""

    def __init__(self, path: str) -> None:
        self._path = path

    def callback(self, domain: str, key: bytes) -> bool:
        try:
            return domain == ZAP_DOMAIN and key in read_keys(self._path)
        except SetupError as error:
            logging.getLogger("medha.sockets").error("every peer is refused: %s", error)
            return False


def serve_curve(
    context: zmq.Context[Any], socket: zmq.Socket[bytes], curve: Curve
) -> ThreadAuthenticator:
    """Make `socket` a CURVE server that admits only the keys of `curve.allowed`."""
    secret = read_key(curve.secret)
    read_keys(curve.allowed)  # report a missing or invalid list now, not at the first peer
    guard = ThreadAuthenticator(context, log=logging.getLogger("medha.sockets.zap"))
    guard.configure_curve_callback(ZAP_DOMAIN, _AllowList(curve.allowed))
    guard.start()
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no authenticator, no entry
    return guard


def use_curve(socket: zmq.Socket[bytes], curve: Curve) -> None:
    """Make `socket` a CURVE client with its own key pair that trusts only the server's key."""
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret := read_key(curve.secret))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
    socket.setsockopt(zmq.CURVE_SERVERKEY, read_key(curve.server_public))
