"""A listener, and keys for both ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.adapters.links import Front, listen

from medha.adapters.sockets import write_keys
from medha.config import Curve


@pytest.fixture
def front() -> Iterator[Front]:
    with closing(listen()) as link:
        yield link


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Curve]:
    """Keys of a router, of a controller that it admits, and of a stranger."""
    names = ("router", "friend", "stranger")
    public = {name: write_keys(tmp_path / f"{name}.secret") for name in names}
    for name in names:
        (tmp_path / f"{name}.public").write_text(public[name])
    server = str(tmp_path / "router.public")
    return {
        "router": Curve(
            secret=str(tmp_path / "router.secret"), allowed=str(tmp_path / "friend.public")
        ),
        "friend": Curve(secret=str(tmp_path / "friend.secret"), server_public=server),
        "stranger": Curve(secret=str(tmp_path / "stranger.secret"), server_public=server),
    }
