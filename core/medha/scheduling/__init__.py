"""Decisions of one replica and of the fleet: pure, clockless, shared with the simulator."""
