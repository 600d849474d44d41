"""Medha's core: every decision as pure code, shared by operator, router, worker and simulator."""

PROTOCOL = 1
"""Version of every message that crosses ZeroMQ; peers with another number are refused by name."""
