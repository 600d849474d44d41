"""Core of Medha: every decision as pure code, shared by operator, router, worker and simulator."""

from medha import compiled

PROTOCOL = 15
"""Version of the ZeroMQ messages; a peer with another version is refused."""

COMPILED = compiled.install()
"""True if the decision modules run as machine code."""
