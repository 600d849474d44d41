"""The core's only contact with the world: sockets, metrics export, logs; for services alone."""
