"""`medha checkpoint new`: write a small checkpoint, in a process of its own.

The worker's writer needs torch, which the command line must not import. Its options are the
writer's, which parses them and prints their help.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence

from medha.errors import SetupError


def new_checkpoint(arguments: Sequence[str]) -> int:
    """Run the writer and return its exit status."""
    for package in ("medha_worker", "torch"):
        if importlib.util.find_spec(package) is None:
            raise SetupError(f"package {package} is not installed: install medha[worker]")
    argv = [sys.executable, "-m", "medha_worker.model.checkpoint_writer", *arguments]
    return subprocess.run(argv, check=False).returncode
