"""A whole engine in one process and one rank: the real inputs, pages, model and sampler.

Tests and benchmarks call it instead of a controller: it allocates pages in order of request and
steps the chunks that the caller names.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from medha.batch import Batch, Chunk
from medha.checkpoints.decoder_config import read_config
from medha.checkpoints.lora import read_lora
from medha.messages.fields import Logprob, Sampling
from medha.messages.ranks import SequenceStart, Step
from medha_worker import sampler, weights
from medha_worker.attention.backend import attention_for
from medha_worker.attention.fp8_scales import FP8
from medha_worker.attention.graph_decode import GraphDecodes
from medha_worker.attention.kernel_interface import Attention
from medha_worker.attention.latent_paged import LatentPagedAttention
from medha_worker.attention.paged import PagedAttention
from medha_worker.device import CPU, ComputeDevice
from medha_worker.engine import arithmetic_for
from medha_worker.grammar_masks import Grammars
from medha_worker.graphs import FixedPlan, GraphRecorder, recorded
from medha_worker.inputs import InputBuilder, StepInputs
from medha_worker.kv.pages import KvPages
from medha_worker.model.decoder import Decoder
from medha_worker.model.low_rank import load_adapter
from medha_worker.model.rope import Rotary
from medha_worker.parallel.collectives import SoloColumn, SoloTensorParallel
from medha_worker.penalties import PenaltyTable
from medha_worker.piecewise_graphs import PiecewiseGraphs
from medha_worker.sequences import DeviceSlots, Sequences

Tokens = npt.NDArray[np.int32]
GREEDY = Sampling(temperature=0.0)


@dataclasses.dataclass(slots=True)
class _Running:
    tokens: Tokens
    sampling: Sampling
    rope_tokens: int
    adapter: str = ""
    done: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    started: bool = False


class SoloEngine:
    """A rank that holds the whole model of the checkpoint in `folder`."""

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        pages: int = 256,
        page_tokens: int = 64,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        attention: Attention | None = None,
        device: ComputeDevice = CPU,
        grammars: bool = False,
        packed: bool = False,
        adapters: Mapping[str, pathlib.Path] | None = None,
    ) -> None:
        config, at, kv_dtype = read_config(folder), device.at, kv_dtype or dtype
        layers, tp = range(config.layers), SoloTensorParallel()
        loaded = weights.load(
            weights.Checkpoint(folder), config, layers, 0, 1, dtype, device=at, packed=packed
        )
        self.config = config
        self.attention = attention or attention_for(
            config.heads,
            config.kv_heads,
            config.head_dim,
            page_tokens,
            dtype,
            kv_dtype,
            at,
            latent=config.latent,
        )
        arithmetic = arithmetic_for(self.attention, config.norm_eps, device)
        low_ranks = {
            name: load_adapter(read_lora(folder, config), config, layers, 0, 1, dtype, at)
            for name, folder in (adapters or {}).items()
        }
        self.model = Decoder(config, layers, tp, loaded, arithmetic, low_ranks)
        rotary = Rotary(config.rope, config.rotated_dim, at, arithmetic.turns)
        scales = (
            weights.kv_scales(loaded, config.kv_heads, config.head_dim, rotary.scale)
            if kv_dtype == FP8
            else ()
        )
        self.kv = KvPages(
            layers,
            pages,
            config.kv_heads,
            page_tokens,
            config.head_dim,
            kv_dtype,
            at,
            planes=config.planes,
            scales=scales,
            spare=1,
        )
        self.inputs = InputBuilder(
            Sequences(
                0,
                DeviceSlots(device),
                Grammars(folder / "tokenizer.json", config.vocab) if grammars else None,
                penalties=PenaltyTable(config.vocab, device),
            ),
            self.attention,
            rotary,
            self.kv,
            config.vocab,
            embeds=True,
            windows=config.windows_in(layers),
            device=device,
        )
        self._free = list(range(pages))[::-1]
        self._running: dict[int, _Running] = {}
        self._steps = 0

    def record(self, record: GraphRecorder, sizes: Sequence[int], cuts: Sequence[int]) -> None:
        """Replay decodes of up to the largest of `sizes` from now on, and run mixed batches in
        pieces.

        `cuts` are the row counts of pieces, as on a GPU; its kernels only, and of latents only
        pieces.
        """
        model, kv, attention = self.model, self.kv, self.attention

        @torch.inference_mode()
        def turns(rows: int) -> torch.Tensor:
            nowhere = torch.zeros(rows, dtype=torch.int64, device=kv.memory.device)
            return self.inputs.rotary.turns(nowhere, [(rows, 0)])

        if isinstance(attention, PagedAttention):

            def fixed(rows: int, window: int) -> FixedPlan:
                return GraphDecodes(attention, rows, kv.pages, spare=kv.pages, window=window)

            windows = self.inputs.windows
            with torch.inference_mode():
                graphs = recorded(0, model, kv, turns, fixed, windows, record, sizes=sizes)
            self.inputs.choose = graphs.choose
        else:
            assert isinstance(attention, LatentPagedAttention)
        # It takes the place of its decoder.
        self.model = PiecewiseGraphs(model, kv, turns, record, sizes=cuts)  # type: ignore[assignment]

    def start(
        self,
        seq: int,
        prompt: Tokens,
        sampling: Sampling = GREEDY,
        rope_tokens: int = 0,
        adapter: str = "",
    ) -> None:
        """Register a sequence; `step` computes its prompt."""
        prompt = np.asarray(prompt, dtype=np.int32)
        self._running[seq] = _Running(prompt, sampling, rope_tokens or len(prompt), adapter)

    def share(self, seq: int, other: int, pages: int) -> None:
        """Give the new sequence `seq` the first full `pages` of `other`: a prefix hit."""
        run = self._running[seq]
        run.pages = self._running[other].pages[:pages]
        run.done = pages * self.kv.page_tokens

    def end(self, seq: int, *, shared_pages: int = 0) -> None:
        """Forget a sequence and free all its pages but the first `shared_pages`."""
        self._free.extend(self._running.pop(seq).pages[shared_pages:])

    def step(self, *work: tuple[int, int]) -> torch.Tensor:
        """Run the next `length` tokens of each (sequence, length); return logits [rows, vocab]
        of all."""
        inputs, hidden = self._forward(work)
        assert inputs.rows == len(hidden)
        return hidden if inputs.whole else self.model.logits(hidden)

    def sample(self, *work: tuple[int, int]) -> list[tuple[int, Logprob | None]]:
        """Run the next tokens of each sequence, sample all, and append the drawn tokens."""
        inputs, hidden = self._forward(work)
        logits = hidden if inputs.whole else self.model.logits(hidden[inputs.yield_rows])
        sampled = sampler.draw(
            logits, [state.draw(at) for _, state, at in inputs.yielding], self.inputs.device
        )
        self.inputs.drew(inputs, sampled.tokens, range(len(inputs.yielding)))
        drawn = sampled.read()
        for (seq, _), (_, state, at), (token, _) in zip(work, inputs.yielding, drawn, strict=True):
            state.sampled(at, token)
            run = self._running[seq]
            if at == len(run.tokens):
                run.tokens = np.append(run.tokens, np.int32(token))
        return drawn

    def generate(
        self,
        prompts: Sequence[Tokens],
        count: int,
        *,
        chunk: int = 512,
        on_step: Callable[[], None] = lambda: None,
    ) -> list[list[int]]:
        """Return `count` greedy tokens after each prompt: prompts one by one, then decodes in one
        batch.

        Calls `on_step` after each step.
        """
        seqs = range(self._steps + 1_000_000, self._steps + 1_000_000 + len(prompts))
        out: list[list[int]] = []
        for seq, prompt in zip(seqs, prompts, strict=True):
            self.start(seq, prompt, rope_tokens=len(prompt) + count)
            while len(prompt) - self._running[seq].done > chunk:
                self._forward([(seq, chunk)])
            out.append([self.sample((seq, len(prompt) - self._running[seq].done))[0][0]])
        for _ in range(count - 1):
            drawn = self.sample(*((seq, 1) for seq in seqs))
            for tokens, (token, _) in zip(out, drawn, strict=True):
                tokens.append(token)
            on_step()
        for seq in seqs:
            self.end(seq)
        return out

    def answer(self, prompt: Tokens, sampling: Sampling, count: int) -> list[int]:
        """Return at most `count` tokens drawn after the prompt, up to the first stop token."""
        seq = self._steps + 2_000_000
        self.start(seq, prompt, sampling, rope_tokens=len(prompt) + count)
        output = [self.sample((seq, len(prompt)))[0][0]]
        while output[-1] not in sampling.stop_tokens and len(output) < count:
            output.append(self.sample((seq, 1))[0][0])
        self.end(seq)
        return output

    def _forward(self, work: Sequence[tuple[int, int]]) -> tuple[StepInputs, torch.Tensor]:
        self._steps += 1
        starts, chunks, rows = [], [], []
        for seq, length in work:
            run = self._running[seq]
            if not run.started:
                starts.append(self._begin(seq, run))
            chunks.append(self._chunk(seq, run, length))
            rows.append(run.tokens[run.done : run.done + length])
            run.done += length
        step = Step(
            step=self._steps,
            batch=Batch(number=self._steps, generation=0, chunks=tuple(chunks)),
            tokens=np.concatenate(rows).tobytes(),
            starts=tuple(starts),
        )
        inputs = self.inputs.build(step)
        if inputs.whole is not None:  # it gives logits at once
            with torch.inference_mode():
                return inputs, inputs.whole.run(inputs.tokens, inputs)
        return inputs, self.model.forward(inputs.tokens, inputs, self.kv, SoloColumn())

    def _begin(self, seq: int, run: _Running) -> SequenceStart:
        run.started = True
        return SequenceStart(
            seq=seq,
            sampling=run.sampling,
            prompt_tokens=len(run.tokens),
            cached=tuple(enumerate(run.pages)),
            history=run.tokens.tobytes() if run.sampling.needs_tokens else b"",
            rope_tokens=run.rope_tokens,
            adapter=run.adapter,
        )

    def _chunk(self, seq: int, run: _Running, length: int) -> Chunk:
        needed = -(-(run.done + length) // self.kv.page_tokens) - len(run.pages)
        taken = tuple(self._free.pop() for _ in range(needed))
        run.pages.extend(taken)
        return Chunk(
            seq=seq,
            start=run.done,
            length=length,
            groups=(0,),
            tail=0,
            pages=taken,
            yields=True,
            decode=length == 1,
        )
