"""`python -m medha_router --config FILE`: a router, of one process or several."""

from __future__ import annotations

import argparse
import pathlib
import resource
import sys

import msgspec

from medha.adapters.logs import start_logs
from medha.config import MAX_PROCESSES, RouterConfig, read
from medha.errors import SpecError, UserError


def main() -> int:
    parser = argparse.ArgumentParser(prog="medha_router", description=__doc__)
    parser.add_argument("--config", type=pathlib.Path, required=True, help="a RouterConfig, JSON")
    parser.add_argument(
        "--processes", type=int, help="processes behind the one port; replaces the config's"
    )
    arguments = parser.parse_args()
    raise_file_limit()
    try:
        run(with_processes(read(RouterConfig, arguments.config), arguments.processes))
    except UserError as error:
        sys.stderr.write(f"medha_router: {error}\n")
        return 2
    return 0


def with_processes(config: RouterConfig, processes: int | None) -> RouterConfig:
    """Return the config with another number of processes, if one is given; raises SpecError."""
    if processes is None:
        return config
    if not 1 <= processes <= MAX_PROCESSES:
        raise SpecError(
            "--processes", processes, f"must be between 1 and {MAX_PROCESSES}", "use one per core"
        )
    return msgspec.structs.replace(config, processes=processes)


def raise_file_limit() -> None:
    """Let the router open as many files as it is allowed to.

    Each connection is one, and processes often start with a limit of 1,024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run(config: RouterConfig) -> None:
    """Run the router until it has drained. A parent of processes does not load what they need."""
    if config.processes > 1:
        from medha_router.processes.parent import run_processes

        start_logs("router", config.log_level)
        run_processes(config)
        return
    import uvloop

    from medha_router.app import serve

    name = "router" if config.process is None else f"router-{config.process.index}"
    start_logs(name, config.log_level)
    uvloop.run(serve(config))


if __name__ == "__main__":
    sys.exit(main())
