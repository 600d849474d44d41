"""Run directory of a local fleet: configs, keys, sockets and logs, readable by this user only.

Without `--run-dir` it is created under the temporary folder, named after the process id, and
removed at the end. The next `medha up` removes directories that a killed one left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import re
import secrets
import shutil
import tempfile

from medha.adapters.keys import write_secret
from medha.adapters.sockets import write_keys
from medha.cli.local_fleet.fleet_plan import FleetPlan
from medha.config import Curve, render
from medha.errors import SetupError

PREFIX = "medha-up-"


class RunDir:
    """`path` has mode 0700. `named`: chosen by the user, so `clean` keeps the folder."""

    def __init__(self, path: pathlib.Path, named: bool, lock: int | None = None) -> None:
        self.path, self._named, self._lock = path, named, lock

    @classmethod
    def make(cls, chosen: pathlib.Path | None, under: pathlib.Path | None = None) -> RunDir:
        """Create and lock the folder; raises SetupError if that fails, another user owns it or
        another `medha up` uses it."""
        if chosen is None:
            parent = under or pathlib.Path(tempfile.gettempdir())
            remove_stale(parent)
            name = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent)
            return cls(pathlib.Path(name), False, _locked(pathlib.Path(name)))
        path = chosen.absolute()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)
        except OSError as error:
            raise _unusable(path, error) from None
        lock = _locked(path)
        for profile in path.glob("*.profile.json"):  # of an earlier run, perhaps on other devices
            profile.unlink()
        return cls(path, True, lock)

    @property
    def router_config(self) -> pathlib.Path:
        return self.path / "router.json"

    def worker_config(self, replica: str) -> pathlib.Path:
        return self.path / f"{replica}.json"

    def log(self, process: str) -> pathlib.Path:
        return self.path / f"{process}.log"

    def write_keys(self) -> tuple[Curve, Curve]:
        """Write fresh CURVE keys; returns the router's and the controllers' key files."""
        files = {name: self.path / f"{name}.secret" for name in ("router", "controller")}
        for name, secret in files.items():
            secret.unlink(missing_ok=True)
            (self.path / f"{name}.public").write_text(write_keys(secret) + "\n")
        router = Curve(secret=str(files["router"]), allowed=str(self.path / "controller.public"))
        controller = Curve(
            secret=str(files["controller"]), server_public=str(self.path / "router.public")
        )
        return router, controller

    def write_token(self) -> str:
        """Write a fresh token for the ops ports; returns its file."""
        path = self.path / "ops.secret"
        path.unlink(missing_ok=True)
        write_secret(path, secrets.token_urlsafe(32).encode())
        return str(path)

    def write_configs(self, plan: FleetPlan) -> None:
        self.router_config.write_bytes(render(plan.router))
        for replica in plan.replicas:
            self.worker_config(replica.name).write_bytes(render(replica.config))

    def clean(self) -> None:
        """Remove the folder; from a folder that the user chose, only sockets and secrets."""
        if not self._named:
            shutil.rmtree(self.path, ignore_errors=True)
        for pattern in ("*.sock", "*.secret"):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def check_unused(path: pathlib.Path) -> None:
    """Raises SetupError if another `medha up` uses the folder."""
    if path.is_dir():
        os.close(_locked(path.absolute()))


def _locked(path: pathlib.Path) -> int:
    """Lock the folder until the returned descriptor is closed or this process ends."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _unusable(path, error) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise _unusable(path, error) from None
        raise SetupError(
            f"run directory {path} is in use by another `medha up`: end that one or name another "
            "folder with --run-dir"
        ) from None
    return descriptor


def _unusable(path: pathlib.Path, error: OSError) -> SetupError:
    return SetupError(
        f"run directory {path} cannot be used ({error.strerror}): name one with --run-dir that "
        "this user owns"
    )


def remove_stale(parent: pathlib.Path) -> list[pathlib.Path]:
    """Remove run directories whose process has exited; returns them.

    A process in another container may have the number of none here, but holds its folder's lock.
    """
    removed = []
    for path in parent.glob(f"{PREFIX}*"):
        match = re.fullmatch(rf"{PREFIX}(\d+)-.*", path.name)
        with contextlib.suppress(OSError, SetupError):
            if match and path.stat().st_uid == os.getuid() and not _runs(int(match.group(1))):
                lock = _locked(path)
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
                removed.append(path)
    return removed


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
