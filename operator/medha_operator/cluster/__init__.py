"""The cluster as the operator last saw it."""
