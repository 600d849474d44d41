"""The replica controller: owns the scheduler, tells ranks what to run and routers what came of it.

`python -m medha_worker.controller --config FILE` starts it; `Controller` is the same without I/O.
"""
