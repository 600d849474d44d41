"""Material for tests, benchmarks and the demo: checkpoints made on the spot, and a one-rank engine.

Machines need no model hub: checkpoints are written here in the standard format, so that the real
loading code runs. Nothing that serves requests imports this package.
"""
