"""Adapters to the outside world, for services only: sockets, metrics export, logs."""
