"""Medha's core: every decision as pure code, shared by operator, router, worker and simulator."""

from medha import compiled

PROTOCOL = 1
"""Version of every message that crosses ZeroMQ; peers with another number are refused by name."""

COMPILED = compiled.install()
"""Whether the modules that decide run as machine code."""
