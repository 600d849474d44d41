"""`python -m medha_operator`: the operator process, configured by its environment."""

from __future__ import annotations

import asyncio
import os
import sys

from medha.adapters.logs import start_logs
from medha.errors import UserError
from medha_operator.app import OperatorApp
from medha_operator.settings import Settings, from_environment


async def serve(settings: Settings) -> None:
    await OperatorApp(settings).serve()


def main() -> int:
    try:
        settings = from_environment(os.environ)
        start_logs("operator", settings.log_level)
        asyncio.run(serve(settings))
    except UserError as error:
        sys.stderr.write(f"medha_operator: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
