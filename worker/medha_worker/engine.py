"""Puts one rank's engine together: weights, pool, kernels, peers, in the order that they need.

Reads the WorkerConfig and the rank's coordinate, nothing else; the process around it (`rank`) owns
threads and sockets.
"""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable

import torch

from medha.config import WorkerConfig
from medha.errors import SpecError
from medha.profile import decode
from medha.topology import Coordinate, kv_heads_of, stage_layers
from medha_worker import weights
from medha_worker.attention.captured import CapturedDecodes
from medha_worker.attention.choice import attention_for
from medha_worker.attention.interface import Attention
from medha_worker.attention.paged import PagedAttention
from medha_worker.attention.scales import FP8, Scales
from medha_worker.attention.splits import Choice, table_of
from medha_worker.device import Device
from medha_worker.graphs import MOST_BYTES, SIZES, FixedPlan, Graphs, RecordCuda, recorded
from medha_worker.inputs import InputBuilder
from medha_worker.kv.epochs import PageEpochs
from medha_worker.kv.fetches import Copies
from medha_worker.kv.pages import KvPages, page_bytes
from medha_worker.model.arithmetic import Arithmetic, FusedArithmetic, TorchArithmetic
from medha_worker.model.config import DecoderConfig, read_config
from medha_worker.model.decoder import Decoder
from medha_worker.model.dummy import DummyCheckpoint
from medha_worker.model.rope import Rotary
from medha_worker.parallel.interface import SoloTensorParallel, TensorParallel
from medha_worker.parallel.mesh import Mesh, Wiring
from medha_worker.parallel.pipeline import Pipeline
from medha_worker.parallel.tensor import GlooTensorParallel
from medha_worker.pieces import Pieces
from medha_worker.runner import Runner, Sample
from medha_worker.seats import Seats
from medha_worker.sequences import Sequences

_LOG = logging.getLogger("medha.rank")

Progress = Callable[[int, int], None]
# Rows of each product where a row's bits must not depend on how many there are: enough for most
# batches of decodes in one, and half of what a GPU can do with large ones.
PRODUCT_ROWS = 128


class Engine:
    """What a rank holds before it knows its peers: weights and pool.

    Raises CheckpointError, SpecError or SetupError, whose messages say what to do.
    """

    def __init__(
        self, config: WorkerConfig, at: Coordinate, device: Device, progress: Progress
    ) -> None:
        folder = pathlib.Path(config.checkpoint)
        topology = config.topology
        self.at, self.model_config = at, read_config(folder)
        self._config, self.device = config, device
        self.layers = stage_layers(self.model_config.layers, topology.spp)[at.stage]
        self.dtype = dtype_of("dtype", config.dtype)
        checkpoint: weights.Checkpoint | DummyCheckpoint
        if config.dummy_weights:
            checkpoint = DummyCheckpoint(folder, device.at)
        else:
            checkpoint = weights.Checkpoint(folder)
        held = weights.load(
            checkpoint,
            self.model_config,
            self.layers,
            at.shard,
            topology.tp,
            self.dtype,
            progress,
            device.at,
        )
        # On a CPU products of float32 keep a row's bits as they are.
        self.blocked = config.deterministic and device.at.type == "cuda"
        self.weights = weights.in_blocks(held, PRODUCT_ROWS) if self.blocked else held
        self.kv = _pool(config, self.model_config, self.layers, at.shard, self.weights)
        self.epochs = PageEpochs(self.kv.pages)
        self.copies = Copies(at.group, self.epochs)

    def runner(self, wiring: Wiring, mesh: Mesh, sample: Sample) -> Runner:
        """The engine, wired to its group's ranks."""
        config, shape, at = self._config, self.model_config, self.at
        tp: TensorParallel = SoloTensorParallel()
        if wiring.tp is not None:
            tp = GlooTensorParallel(wiring.tp)
        attention = attention_for(
            shape.heads // tp.size,
            self.kv.kv_heads,
            shape.head_dim,
            config.page_tokens,
            self.dtype,
            self.kv.memory.dtype,
            self.device.at,
            deterministic=config.deterministic,
            spare=self.kv.pages,
            table=_chunk_table(config.profile, shape.heads // tp.size, self.kv.kv_heads),
        )
        arithmetic = arithmetic_for(attention, shape.norm_eps, self.device)
        model = Decoder(shape, self.layers, tp, self.weights, arithmetic)
        inputs = InputBuilder(
            Sequences(at.group, Seats(self.device)),
            attention,
            Rotary(shape.rope, shape.head_dim, self.device.at, arithmetic.turns),
            self.kv,
            shape.vocab,
            embeds=at.stage == 0,
            windows=shape.windows_in(self.layers),
            device=self.device,
            always=self.blocked,
        )
        stage: Decoder | Pieces = model
        if isinstance(attention, PagedAttention) and tp.size == 1 and not config.deterministic:
            record = RecordCuda()
            inputs.choose = self._graphs(model, attention, inputs, record).choose
            stage = Pieces(model, self._turns(inputs), record, most_bytes=2 * MOST_BYTES)
        if isinstance(attention, PagedAttention) and self.device.at.type == "cuda":
            tell_room(torch.cuda.mem_get_info()[0], attention.room_bytes)
        alone = wiring.tp is None and wiring.spp is None and config.topology.kvp_max == 1
        return Runner(
            at,
            model=stage,
            kv=self.kv,
            inputs=inputs,
            tp=tp,
            pipeline=Pipeline(
                wiring.spp, shape.hidden, self.dtype, config.topology.spp, self.device
            ),
            mesh=mesh,
            copies=self.copies,
            epochs=self.epochs,
            sample=sample,
            device=self.device,
            patience_s=None if alone else config.collective_timeout_s,
        )

    def _graphs(
        self, model: Decoder, attention: PagedAttention, inputs: InputBuilder, record: RecordCuda
    ) -> Graphs:
        """Recorded here, so that a rank which says it is ready has them."""
        kv = self.kv

        def fixed(rows: int, window: int) -> FixedPlan:
            return CapturedDecodes(attention, rows, kv.pages, spare=kv.pages, window=window)

        most = min(self._config.scheduling.max_running, SIZES[-1])
        sizes = [size for size in SIZES if size <= most]
        with torch.inference_mode():
            return recorded(
                self.at.group, model, kv, self._turns(inputs), fixed, inputs.windows, record,
                sizes=sizes,
            )  # fmt: skip

    def _turns(self, inputs: InputBuilder) -> Callable[[int], torch.Tensor]:
        """Memory for the turns of so many rows."""

        @torch.inference_mode()
        def turns(rows: int) -> torch.Tensor:
            nowhere = torch.zeros(rows, dtype=torch.int64, device=self.device.at)
            return inputs.rotary.turns(nowhere, [(rows, 0)])

        return turns


def _chunk_table(profile: str, heads: int, kv_heads: int) -> tuple[Choice, ...]:
    """How small chunks attend by the profile in a file, if any; the controller judges the file."""
    if not profile:
        return table_of((), heads, kv_heads)
    measured = decode(pathlib.Path(profile).read_bytes(), profile)
    return table_of(measured.chunk_kernels, heads, kv_heads)


def tell_room(free_bytes: int, room_bytes: int) -> None:
    """Warn where the pool leaves less than attention may take."""
    if free_bytes < room_bytes:
        _LOG.warning(
            "%.1f GiB of the GPU are free beside weights, pool and graphs: chunks of 2,048 tokens"
            " after a million in FP8 take up to %.1f GiB; set spec.engine.kvPages or kvMemory lower"
            " where contexts are that long", free_bytes / 2**30, room_bytes / 2**30,
        )  # fmt: skip


def arithmetic_for(attention: Attention, eps: float, device: Device) -> Arithmetic:
    """Plain torch, or on a GPU the kernels of the library that attends."""
    if isinstance(attention, PagedAttention):
        return FusedArithmetic(attention.library, eps, device.at)
    return TorchArithmetic(eps, device.at)


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
    return KvPages(
        layers, pages, heads, config.page_tokens, shape.head_dim, dtype, held.at, scales=scales,
        spare=0 if held.at.type == "cpu" else 1,
    )  # fmt: skip


def dtype_of(field: str, name: str) -> torch.dtype:
    """Raises SpecError naming the field."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if field == "kv_dtype":
        known["fp8_e4m3"] = FP8
    if name not in known:
        raise SpecError(field, name, "must be a torch dtype that this engine computes in",
                        f"use one of {', '.join(known)}")  # fmt: skip
    return known[name]
