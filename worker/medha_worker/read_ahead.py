"""Reading of a rank's weight files into the page cache while its process imports torch.

Storage then works from the first moment on, with several requests at once. The load itself maps the
files: what is cached by then costs it no wait, and what is not, it reads. Nothing is kept here, so
an error is left to the load, which names it.
"""

from __future__ import annotations

import logging
import os
import pathlib
import threading
from concurrent.futures import ThreadPoolExecutor

from medha.checkpoints.checkpoint_files import extents
from medha.checkpoints.decoder_config import read_config
from medha.config import WorkerConfig
from medha.errors import UserError
from medha.topology import Coordinate, stage_layers

READERS, PIECE_BYTES = 4, 8 << 20
_LOG = logging.getLogger("medha.rank")

# File, first byte and number of bytes.
Piece = tuple[pathlib.Path, int, int]


def read_ahead(config: WorkerConfig, at: Coordinate) -> threading.Thread:
    """Start to read the files' parts that rank `at` will load, in the order of loading."""
    thread = threading.Thread(target=_read, args=(config, at), name="read ahead", daemon=True)
    thread.start()
    return thread


def _read(config: WorkerConfig, at: Coordinate) -> None:
    try:
        pieces = pieces_of(config, at, _most_bytes())
        with ThreadPoolExecutor(READERS, "read ahead") as readers:
            list(readers.map(_fetch, pieces))
    except (UserError, OSError) as error:
        _LOG.debug("nothing is read ahead: %s", error)


def pieces_of(config: WorkerConfig, at: Coordinate, most_bytes: int) -> list[Piece]:
    """Return at most `most_bytes` of what rank `at` will load, in pieces; shards of a stage, which
    run on one machine, share all of them. Raises CheckpointError."""
    if config.dummy_weights:
        return []
    folder = pathlib.Path(config.checkpoint)
    model = read_config(folder)
    layers = stage_layers(model.layers, config.topology.spp)[at.stage]
    pieces: list[Piece] = []
    left = most_bytes
    for path, begin, end in extents(folder, layers, model.layers, tied=model.tied_embeddings):
        pieces += (
            (path, first, min(PIECE_BYTES, end - first))
            for first in range(begin, min(end, begin + left), PIECE_BYTES)
        )
        left -= end - begin
        if left <= 0:
            break
    return pieces


class _Buffers(threading.local):
    """A thread's memory to read into: what it holds does not matter."""

    def __init__(self) -> None:
        self.own = memoryview(bytearray(PIECE_BYTES))


_BUFFERS = _Buffers()


def _fetch(piece: Piece) -> None:
    path, first, size = piece
    file = os.open(path, os.O_RDONLY)
    try:
        os.preadv(file, [_BUFFERS.own[:size]], first)
    finally:
        os.close(file)


def _most_bytes() -> int:
    """Return half of the memory that the page cache may take; more would displace what is read
    first."""
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    entries = dict(line.split(":", 1) for line in lines)
    return int(entries["MemAvailable"].split()[0]) * 1024 // 2
