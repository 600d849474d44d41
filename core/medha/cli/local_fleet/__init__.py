"""Processes of a fleet on this machine or in one pod: start, watch, restart."""
