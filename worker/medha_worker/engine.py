"""Assemble the engine of a rank: weights, page pool, kernels and peers, in that order.

Reads only the WorkerConfig and the rank's coordinate; `rank` owns threads and sockets.
"""

from __future__ import annotations

import gc
import logging
import pathlib
import time
from collections.abc import Callable

import torch

from medha.checkpoints.decoder_config import DecoderConfig, read_config
from medha.checkpoints.fit import (
    check_experts,
    check_latent,
    check_packed,
    pool_pages,
    read_adapters,
)
from medha.config import WorkerConfig
from medha.errors import SetupError, SpecError
from medha.topology import Coordinate, kv_heads_of, stage_layers
from medha_worker import weights
from medha_worker.attention.backend import attention_for
from medha_worker.attention.fp8_scales import FP8, Scales
from medha_worker.attention.graph_decode import GraphDecodes
from medha_worker.attention.kernel_interface import Attention
from medha_worker.attention.latent_paged import LatentPagedAttention
from medha_worker.attention.paged import PagedAttention
from medha_worker.device import ComputeDevice
from medha_worker.grammar_masks import Grammars
from medha_worker.graphs import MOST_BYTES, SIZES, CudaGraphRecorder, FixedPlan, Graphs, recorded
from medha_worker.inputs import InputBuilder
from medha_worker.kv.fetches import MoveTargets
from medha_worker.kv.pages import KvPages, PageEpochs
from medha_worker.model.decoder import Decoder
from medha_worker.model.dummy import DummyCheckpoint
from medha_worker.model.layers import Arithmetic, FusedArithmetic, TorchArithmetic
from medha_worker.model.low_rank import load_adapter
from medha_worker.model.native_arithmetic import NativeArithmetic
from medha_worker.model.rope import Rotary
from medha_worker.parallel.collectives import SoloTensorParallel, TensorParallel
from medha_worker.parallel.communicator import ShardGroup
from medha_worker.parallel.mesh import Mesh, Wiring
from medha_worker.parallel.pipeline_parallel import Pipeline
from medha_worker.penalties import PenaltyTable
from medha_worker.piecewise_graphs import PiecewiseGraphs
from medha_worker.runner import Runner, Sample
from medha_worker.sequences import DeviceSlots, Sequences

_LOG = logging.getLogger("medha.rank")

Progress = Callable[[int, int], None]
# Rows per matrix product in deterministic mode, where a row's bits must not depend on the batch.
# 128 rows hold most decode batches in one product; large ones reach half the GPU's peak rate.
PRODUCT_ROWS = 128


class RankEngine:
    """Weights and page pool of a rank, before it is wired to its peers.

    Raises CheckpointError, SpecError or SetupError, whose messages name the remedy.
    """

    def __init__(
        self, config: WorkerConfig, at: Coordinate, device: ComputeDevice, progress: Progress
    ) -> None:
        folder = pathlib.Path(config.checkpoint)
        topology = config.topology
        self.at, self.model_config = at, read_config(folder)
        self._config, self.device = config, device
        self.layers = stage_layers(self.model_config.layers, topology.spp)[at.stage]
        self.dtype = dtype_of("dtype", config.dtype)
        check_experts(self.model_config, config)
        check_latent(self.model_config, config)
        check_packed(self.model_config, config)
        loras = read_adapters(self.model_config, config)
        if self.model_config.experts and device.at.type == "cuda" and not config.deterministic:
            check_grouped_products(torch.cuda.get_device_capability(device.at))
        checkpoint: weights.Checkpoint | DummyCheckpoint
        if config.dummy_weights:
            checkpoint = DummyCheckpoint(folder, device.at)
        else:
            checkpoint = weights.Checkpoint(folder)
        began_s = time.monotonic()
        held = weights.load(
            checkpoint,
            self.model_config,
            self.layers,
            at.shard,
            topology.tp,
            self.dtype,
            progress,
            device.at,
            packed=config.packed_weights,
        )
        seconds = round(time.monotonic() - began_s, 3)
        _LOG.info("weights loaded", extra={"fields": {"seconds": seconds}})
        # float32 products on a CPU are deterministic per row anyway.
        self.blocked = config.deterministic and device.at.type == "cuda"
        self.weights = weights.in_blocks(held, PRODUCT_ROWS) if self.blocked else held
        rows = PRODUCT_ROWS if self.blocked else 0
        self.adapters = {
            name: load_adapter(
                lora,
                self.model_config,
                self.layers,
                at.shard,
                topology.tp,
                self.dtype,
                device.at,
                rows,
            )
            for name, lora in loras.items()
        }
        self.kv = _pool(config, self.model_config, self.layers, at.shard, self.weights)
        _LOG.info("KV pool allocated", extra={"fields": {"pages": self.kv.pages}})
        self.epochs = PageEpochs(self.kv.pages)
        self.copies = MoveTargets(at.group, self.epochs)

    def renew(self) -> None:
        """Forget what pages hold, before the next `runner`; drop the last one first."""
        self.epochs = PageEpochs(self.kv.pages)
        self.copies = MoveTargets(self.at.group, self.epochs)
        gc.unfreeze()
        gc.collect()  # of its graphs and workspaces
        if self.device.at.type == "cuda":
            torch.cuda.empty_cache()

    def runner(self, wiring: Wiring, mesh: Mesh, sample: Sample) -> Runner:
        """Wire the engine to the ranks of its group."""
        config, shape, at = self._config, self.model_config, self.at
        tp: TensorParallel = SoloTensorParallel()
        if wiring.tp is not None:
            tp = ShardGroup(wiring.tp, ordered=config.deterministic)
        attention = attention_for(
            shape.heads // tp.size,
            self.kv.kv_heads,
            shape.head_dim,
            config.page_tokens,
            self.dtype,
            self.kv.memory.dtype,
            self.device.at,
            latent=shape.latent,
            deterministic=config.deterministic,
            spare=self.kv.pages,
        )
        arithmetic = arithmetic_for(attention, shape.norm_eps, self.device)
        model = Decoder(shape, self.layers, tp, self.weights, arithmetic, self.adapters)
        inputs = InputBuilder(
            Sequences(at.group, DeviceSlots(self.device), self._grammars(), self._penalties()),
            attention,
            Rotary(shape.rope, shape.rotated_dim, self.device.at, arithmetic.turns),
            self.kv,
            shape.vocab,
            embeds=at.stage == 0,
            windows=shape.windows_in(self.layers),
            device=self.device,
            always=self.blocked,
        )
        stage: Decoder | PiecewiseGraphs = model
        on_gpu_kernels = isinstance(attention, PagedAttention | LatentPagedAttention)
        if on_gpu_kernels and not config.deterministic and self.weights.on_device:
            record = CudaGraphRecorder(tp)
            if isinstance(attention, PagedAttention):
                inputs.choose = self._graphs(model, attention, inputs, record).choose
            turns = self._turns(inputs)
            stage = PiecewiseGraphs(model, self.kv, turns, record, most_bytes=2 * MOST_BYTES)
        if isinstance(attention, PagedAttention) and self.device.at.type == "cuda":
            attention.prepare(inputs.windows)
            warn_if_memory_is_tight(torch.cuda.mem_get_info()[0], attention.scratch_bytes)
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

    @property
    def _samples(self) -> bool:
        """True in the last stage."""
        return self.at.stage == self._config.topology.spp - 1

    def _penalties(self) -> PenaltyTable | None:
        return PenaltyTable(self.model_config.vocab, self.device) if self._samples else None

    def _grammars(self) -> Grammars | None:
        if not self._samples:
            return None
        tokenizer = pathlib.Path(self._config.checkpoint) / "tokenizer.json"
        return Grammars(tokenizer, self.model_config.vocab)

    def _graphs(
        self,
        model: Decoder,
        attention: PagedAttention,
        inputs: InputBuilder,
        record: CudaGraphRecorder,
    ) -> Graphs:
        """Record CUDA graphs before the rank reports that it is ready."""
        kv = self.kv

        def fixed(rows: int, window: int) -> FixedPlan:
            # Sequences that share pages name them one by one.
            entries = min(rows * -(-self._config.max_context_tokens // kv.page_tokens), 1 << 20)
            entries = max(kv.pages, entries)
            return GraphDecodes(attention, rows, entries, spare=kv.pages, window=window)

        most = min(self._config.scheduling.max_running, SIZES[-1])
        sizes = [size for size in SIZES if size <= most]
        with torch.inference_mode():
            return recorded(
                self.at.group,
                model,
                kv,
                self._turns(inputs),
                fixed,
                inputs.windows,
                record,
                sizes=sizes,
            )

    def _turns(self, inputs: InputBuilder) -> Callable[[int], torch.Tensor]:
        """Return a function that allocates rotary factors for a number of rows."""

        @torch.inference_mode()
        def turns(rows: int) -> torch.Tensor:
            nowhere = torch.zeros(rows, dtype=torch.int64, device=self.device.at)
            return inputs.rotary.turns(nowhere, [(rows, 0)])

        return turns


def warn_if_memory_is_tight(free_bytes: int, scratch_bytes: int) -> None:
    """Warn if the pool leaves less free memory than attention may need for its scratch buffers."""
    if free_bytes < scratch_bytes:
        _LOG.warning(
            "%.1f GiB of the GPU are free after weights, pool and graphs: large chunks of long"
            " prompts take up to %.1f GiB; set spec.engine.kvPages or kvMemory lower where contexts"
            " are long",
            free_bytes / 2**30,
            scratch_bytes / 2**30,
        )


def check_grouped_products(capability: tuple[int, int]) -> None:
    """Raise SetupError for a GPU on which torch's grouped products wait for the host."""
    if capability[0] not in (9, 10):
        raise SetupError(
            f"the GPU has compute capability {capability[0]}.{capability[1]}: a model with experts"
            " needs 9.x or 10.x (Hopper, Blackwell); use such a GPU, or set"
            " spec.engine.arithmetic to Deterministic, which is slower"
        )


def arithmetic_for(attention: Attention, eps: float, device: ComputeDevice) -> Arithmetic:
    """Return FlashInfer's kernels on a GPU, and compiled ones on a CPU."""
    if isinstance(attention, PagedAttention | LatentPagedAttention):
        return FusedArithmetic(attention.library, eps, device.at)
    return TorchArithmetic(eps, device.at) if device.at.type != "cpu" else NativeArithmetic(eps)


def _pool(
    config: WorkerConfig, shape: DecoderConfig, layers: range, shard: int, held: weights.Weights
) -> KvPages:
    """Allocate `kv_pages` pages, or as many as fit into `kv_bytes` per rank."""
    heads = len(kv_heads_of(shard, config.topology.tp, shape.kv_heads))
    auto = config.kv_dtype == "auto"
    dtype = dtype_of("dtype", config.dtype) if auto else dtype_of("kv_dtype", config.kv_dtype)
    pages = pool_pages(shape, config, len(layers))
    scales: tuple[Scales, ...] = ()
    if dtype == FP8:
        stretch = Rotary(shape.rope, shape.head_dim).scale
        scales = weights.kv_scales(held, heads, shape.head_dim, stretch)
    return KvPages(
        layers,
        pages,
        heads,
        config.page_tokens,
        shape.head_dim,
        dtype,
        held.at,
        planes=shape.planes,
        scales=scales,
        spare=1,
    )


def dtype_of(field: str, name: str) -> torch.dtype:
    """Return the torch dtype of that name. Raises SpecError naming the field."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if field == "kv_dtype":
        known["fp8_e4m3"] = FP8
    if name not in known:
        raise SpecError(
            field,
            name,
            "must be a torch dtype that this engine computes in",
            f"use one of {', '.join(known)}",
        )
    return known[name]
