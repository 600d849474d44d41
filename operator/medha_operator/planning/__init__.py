"""Decisions: actions and status from a snapshot of the cluster, without clock or client."""
