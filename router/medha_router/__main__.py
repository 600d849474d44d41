"""`python -m medha_router --config FILE`: one router process."""

from __future__ import annotations

import argparse
import pathlib
import sys

import uvloop

from medha.adapters.logs import start_logs
from medha.config import RouterConfig, read
from medha.errors import UserError
from medha_router.app import serve


def main() -> int:
    parser = argparse.ArgumentParser(prog="medha_router", description=__doc__)
    parser.add_argument("--config", type=pathlib.Path, required=True, help="a RouterConfig, JSON")
    arguments = parser.parse_args()
    try:
        config = read(RouterConfig, arguments.config)
        start_logs("router", config.log_level)
        uvloop.run(serve(config))
    except UserError as error:
        sys.stderr.write(f"medha_router: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
