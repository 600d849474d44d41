"""The replica controller: owns the scheduler, sends ranks their batches and routers the results.

`python -m medha_worker.controller --config FILE` starts it; `Controller` is the same without I/O.
"""
