"""IP addresses of both versions, as sockets and URLs need them."""

from __future__ import annotations

import socket


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of an IP address; a name has IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listening(host: str, port: int, *, backlog: int, shared: bool = False) -> socket.socket:
    """Open a port; `::` listens on all addresses of both versions. Raises OSError."""
    family = family_of(host)
    return socket.create_server(
        (host, port),
        family=family,
        backlog=backlog,
        reuse_port=shared,
        dualstack_ipv6=family == socket.AF_INET6,
    )


def http_url(host: str, port: int) -> str:
    """Return the URL of a server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
