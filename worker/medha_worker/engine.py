"""Puts one rank's engine together: weights, pool, kernels, peers, in the order that they need.

Reads the WorkerConfig and the rank's coordinate, nothing else; the process around it (`rank`) owns
threads and sockets.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import torch

from medha.config import WorkerConfig
from medha.errors import SetupError, SpecError
from medha.topology import Coordinate, kv_heads_of, stage_layers
from medha_worker import weights
from medha_worker.attention.cpu import cpu_attention
from medha_worker.attention.scales import FP8, Scales
from medha_worker.inputs import InputBuilder
from medha_worker.kv.epochs import PageEpochs
from medha_worker.kv.fetches import Copies
from medha_worker.kv.pages import KvPages, page_bytes
from medha_worker.model.config import DecoderConfig, read_config
from medha_worker.model.decoder import Decoder
from medha_worker.model.dummy import DummyCheckpoint
from medha_worker.model.rope import Rotary
from medha_worker.parallel.interface import SoloTensorParallel, TensorParallel
from medha_worker.parallel.mesh import Mesh, Wiring
from medha_worker.parallel.pipeline import Pipeline
from medha_worker.parallel.tensor import GlooTensorParallel
from medha_worker.runner import Runner, Sample
from medha_worker.sequences import Sequences

Progress = Callable[[int, int], None]


class Engine:
    """What a rank holds before it knows its peers: weights and pool.

    Raises CheckpointError, SpecError or SetupError, whose messages say what to do.
    """

    def __init__(self, config: WorkerConfig, at: Coordinate, progress: Progress) -> None:
        folder = pathlib.Path(config.checkpoint)
        topology = config.topology
        self.at, self.model_config = at, read_config(folder)
        self._config = config
        self.layers = stage_layers(self.model_config.layers, topology.spp)[at.stage]
        self.dtype = dtype_of("dtype", config.dtype)
        checkpoint: weights.Checkpoint | DummyCheckpoint
        checkpoint = DummyCheckpoint(folder) if config.dummy_weights else weights.Checkpoint(folder)
        self._weights = weights.load(
            checkpoint,
            self.model_config,
            self.layers,
            at.shard,
            topology.tp,
            self.dtype,
            progress,
        )
        self.kv = _pool(config, self.model_config, self.layers, at.shard, self._weights)
        self.epochs = PageEpochs(self.kv.pages)
        self.copies = Copies(at.group, self.epochs)

    def runner(self, wiring: Wiring, mesh: Mesh, sample: Sample) -> Runner:
        """The engine, wired to its group's ranks."""
        config, shape, at = self._config, self.model_config, self.at
        tp: TensorParallel = SoloTensorParallel()
        if wiring.tp is not None:
            tp = GlooTensorParallel(wiring.tp)
        inputs = InputBuilder(
            Sequences(at.group),
            cpu_attention(
                shape.heads // tp.size,
                self.kv.kv_heads,
                shape.head_dim,
                config.page_tokens,
                self.kv.memory.dtype,
            ),
            Rotary(shape.rope, shape.head_dim),
            self.kv,
            shape.vocab,
            embeds=at.stage == 0,
            windows=shape.windows_in(self.layers),
        )
        return Runner(
            at,
            model=Decoder(shape, self.layers, tp, self._weights),
            kv=self.kv,
            inputs=inputs,
            tp=tp,
            pipeline=Pipeline(wiring.spp, shape.hidden, self.dtype, config.topology.spp),
            mesh=mesh,
            copies=self.copies,
            epochs=self.epochs,
            sample=sample,
        )


def _pool(
    config: WorkerConfig, shape: DecoderConfig, layers: range, shard: int, held: weights.Weights
) -> KvPages:
    """`kv_pages` pages, or as many as `kv_bytes` per rank hold."""
    heads = len(kv_heads_of(shard, config.topology.tp, shape.kv_heads))
    auto = config.kv_dtype == "auto"
    dtype = dtype_of("dtype", config.dtype) if auto else dtype_of("kv_dtype", config.kv_dtype)
    each = page_bytes(heads, config.page_tokens, shape.head_dim, dtype)
    pages = config.kv_pages or config.kv_bytes // (each * len(layers))
    if pages < 1:
        raise SpecError(
            "kv_bytes", config.kv_bytes, f"must hold a page of {each * len(layers)} bytes",
            "give more memory or make page_tokens smaller",
        )  # fmt: skip
    scales: tuple[Scales, ...] = ()
    if dtype == FP8:
        stretch = Rotary(shape.rope, shape.head_dim).scale
        scales = weights.kv_scales(held, heads, shape.head_dim, stretch)
    return KvPages(layers, pages, heads, config.page_tokens, shape.head_dim, dtype, scales=scales)


def dtype_of(field: str, name: str) -> torch.dtype:
    """Raises SpecError naming the field."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if field == "kv_dtype":
        known["fp8_e4m3"] = FP8
    if name not in known:
        raise SpecError(field, name, "must be a torch dtype that this engine computes in",
                        f"use one of {', '.join(known)}")  # fmt: skip
    return known[name]


def check_device(device: str) -> None:
    """Raises SetupError for a device that this build does not drive."""
    if device != "cpu":
        raise SetupError(f"device is {device}: this version computes on cpu; set device to cpu")
