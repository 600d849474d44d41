"""Weights with built-in copying heads: otherwise random ones that attend to text far back.

Default initialisation gives flat attention and near-zero logits, so tests would not notice a lost
page or a shifted position. Here the residual stream has sections

    [ 1 constant | codes of token i, of token i − 1, of token i − 2, of the copied token | noise … ]

* layer 0, KV heads 0 and 1: heads that attend one and two tokens back. Their queries and keys are
  constants that match at that distance; they write the codes found there into their sections.
* layers 1 …, KV head 0: induction heads (Olsson et al., 2022). The query is the codes of this
  token and the one before, the key those before the key's own token, all in the slow rotary
  pairs, so distance does not matter: they find an earlier place of the same two tokens and copy
  the code of the next token.
* everything else is random and large enough to matter.

So a greedy continuation repeats what followed the same words before, however far back (in windowed
layers: within the window). With one KV head there is no second look back, and one token is matched.
In a family with biases, the constants of layer 0 are biases; where heads are normed, the norms'
weights raise scores to the same size. With latent attention, the heads of layer 0 use the rotated
entries alone and induction heads the plain ones; latents hold the codes. So no part of a family can
be missing unnoticed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from medha.checkpoints.latent_attention import LatentAttention
from medha.checkpoints.routed_experts import RoutedExperts

Array = npt.NDArray[np.float32]

PEAK = (12.0, 8.0)  # score of a match of this token, of the one before
CONSTANT = 2.0
SHARP = 2.5  # weight of the norms of queries and keys
BIAS = 0.5  # of random heads
NOISE = 0.08  # what each random head and MLP adds to an entry of the residual stream
EXPERT_NOISE = 0.2  # what an expert adds, before its weight
ROUTED = 1.5  # spread of a router's logits
CORRECTION = 0.3  # spread of the bias in the choice of experts


@dataclasses.dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes of the model, its rotary frequencies, fastest first, and the copying distance.

    With `latent`, `head_dim` is that of values.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    frequencies: Array
    biased: bool = False
    head_norms: bool = False
    reach: int = 4096
    experts: RoutedExperts | None = None
    latent: LatentAttention | None = None

    @property
    def code(self) -> int:
        """E: entries of a token's code."""
        return min(self.head_dim, (self.hidden - 1) // 4)

    @property
    def slow(self) -> npt.NDArray[np.int64]:
        """Pairs that turn less than half a radian in `reach` tokens, or the two slowest."""
        count = max(2, int((self.frequencies * self.reach < 0.5).sum()))
        return np.arange(self.head_dim // 2 - count, self.head_dim // 2)

    @property
    def compared(self) -> int:
        """Entries of a code that an induction head compares, for each of the two tokens."""
        if self.latent:
            return min(self.latent.shape.nope_dim // 2, self.code)
        return min(len(self.slow), self.code)

    @property
    def rotated(self) -> int:
        """Entries of a head that are rotated."""
        return 2 * len(self.frequencies)

    @property
    def sharpness(self) -> float:
        """Square root of what a product of query and key must be for a score of 1."""
        score = 1.0 / self.latent.scale if self.latent else math.sqrt(self.head_dim)
        return math.sqrt(score)


def tensors(sizes: Dimensions, seed: int) -> Iterator[tuple[str, Array]]:
    """Yield all tensors by their Hugging Face names, float32, [out, in]."""
    dice = np.random.default_rng(seed)
    codes = _codes(sizes, dice)
    yield "model.embed_tokens.weight", _embedding(sizes, codes, dice)
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", _norm(sizes.hidden, dice)
        attention = _latent_attention if sizes.latent else _attention
        for name, array in attention(sizes, layer, dice).items():
            yield f"{prefix}self_attn.{name}", array
        yield prefix + "post_attention_layernorm.weight", _norm(sizes.hidden, dice)
        experts = sizes.experts
        if experts is None or layer not in experts.layers:
            yield from _mlp(sizes, prefix + "mlp.", sizes.intermediate, NOISE, dice)
            continue
        shape = (experts.count, sizes.hidden)
        yield prefix + "mlp.gate.weight", _random(dice, shape, ROUTED * sizes.hidden**-0.5)
        if experts.biased:
            bias = _random(dice, (experts.count,), CORRECTION)
            yield prefix + "mlp.gate.e_score_correction_bias", bias
        if width := experts.shared_intermediate:
            yield from _mlp(sizes, prefix + "mlp.shared_experts.", width, NOISE, dice)
        for number in range(experts.count):
            of_expert = f"{prefix}mlp.experts.{number}."
            yield from _mlp(sizes, of_expert, experts.intermediate, EXPERT_NOISE, dice)
    yield "model.norm.weight", _norm(sizes.hidden, dice)
    if not sizes.tied:
        yield "lm_head.weight", _head(sizes, codes, dice)


def _mlp(
    sizes: Dimensions, prefix: str, width: int, noise: float, dice: np.random.Generator
) -> Iterator[tuple[str, Array]]:
    """Yield the projections of an MLP that adds `noise` to an entry of the residual stream."""
    for name in ("gate", "up"):
        yield (
            f"{prefix}{name}_proj.weight",
            _random(dice, (width, sizes.hidden), sizes.hidden**-0.5),
        )
    yield prefix + "down_proj.weight", _random(dice, (sizes.hidden, width), noise * _fan(width))


def _codes(sizes: Dimensions, dice: np.random.Generator) -> Array:
    """Return [vocab, E], entries about 1.

    The part that attention compares has equal length for all tokens, and so has the rest.
    """
    codes = dice.standard_normal((sizes.vocab, sizes.code), dtype=np.float32)
    for part in (codes[:, : sizes.compared], codes[:, sizes.compared :]):
        part *= part.shape[1] ** 0.5 / np.linalg.norm(part, axis=1, keepdims=True)
    return codes


def _rooms(sizes: Dimensions) -> list[npt.NDArray[np.int64]]:
    """Return the entries of the codes of token i, i − 1, i − 2, and of the copied one."""
    return [np.arange(1 + i * sizes.code, 1 + (i + 1) * sizes.code) for i in range(4)]


def _embedding(sizes: Dimensions, codes: Array, dice: np.random.Generator) -> Array:
    table = _random(dice, (sizes.vocab, sizes.hidden), NOISE)
    table[:, 0] = CONSTANT
    table[:, _rooms(sizes)[0]] = codes
    return table


def _attention(sizes: Dimensions, layer: int, dice: np.random.Generator) -> dict[str, Array]:
    """Return a layer's projections, biases and norms, by name."""
    D, H, E = sizes.head_dim, sizes.hidden, sizes.code
    rooms, group = _rooms(sizes), sizes.heads // sizes.kv_heads
    scale = H**-0.5
    q = _random(dice, (sizes.heads * D, H), scale)
    k = _random(dice, (sizes.kv_heads * D, H), scale)
    v = _random(dice, (sizes.kv_heads * D, H), scale)
    o = _random(dice, (H, sizes.heads * D), 2 * NOISE * (sizes.heads * D) ** -0.5)
    biases = _biases(sizes, dice)
    # Root mean square of the residual stream here: norms divide by it.
    looks = min(2, sizes.kv_heads)
    rms = ((CONSTANT**2 + E * (1 if layer == 0 else 1 + looks)) / H) ** 0.5
    for head in range(looks if layer == 0 else 1):
        of_q, of_kv = slice(head * group * D, (head * group + 1) * D), slice(head * D, head * D + D)
        q[of_q], k[of_kv], v[of_kv], o[:, of_q] = 0.0, 0.0, 0.0, 0.0
        for name in biases:
            biases[name][of_q if name == "q" else of_kv] = 0.0
        v[of_kv][np.arange(E), rooms[0]] = rms
        if layer == 0:
            key = _constant_key(sizes)
            query = _turned(sizes, key, -1 - head)
            if sizes.biased:
                biases["k"][of_kv], biases["q"][of_q] = key, query
            else:
                k[of_kv, 0], q[of_q, 0] = key * rms / CONSTANT, query * rms / CONSTANT
            o[:, of_q][rooms[1 + head], np.arange(E)] = 1.0
    if layer > 0:
        n = sizes.compared
        for match, peak in enumerate(PEAK[:looks]):
            entries = sizes.slow[:n] + match * (D // 2)
            gain = rms * (peak * D**0.5 / n) ** 0.5
            q[entries, rooms[match][:n]] = gain
            k[entries, rooms[match + 1][:n]] = gain
        # A tied head reads the first room: the last layer alone writes there.
        copied = rooms[0] if sizes.tied and layer == sizes.layers - 1 else rooms[3]
        o[copied, np.arange(E)] = 2.0 if copied is rooms[0] else 1.0 / (sizes.layers - 1)
    parts = {f"{name}_proj.bias": bias for name, bias in biases.items()}
    if sizes.head_norms:
        parts |= {f"{name}_norm.weight": SHARP * _norm(D, dice) for name in ("q", "k")}
    weights = {"q": q, "k": k, "v": v, "o": o}
    return parts | {f"{name}_proj.weight": weight for name, weight in weights.items()}


def _latent_attention(sizes: Dimensions, layer: int, dice: np.random.Generator) -> dict[str, Array]:
    """Return a layer's projections and norms for latent attention, by name.

    Latents of queries and tokens hold codes, about 1 like their random entries, so that their norms
    divide by about 1.
    """
    latent = sizes.latent
    assert latent is not None
    shape, H, E, n = latent.shape, sizes.hidden, sizes.code, sizes.compared
    nope, rank, wide = shape.nope_dim, shape.kv_rank, shape.nope_dim + shape.rope_dim
    rooms = _rooms(sizes)
    rms = ((CONSTANT**2 + E * (1 if layer == 0 else 3)) / H) ** 0.5
    down = _random(dice, (rank + shape.rope_dim, H), H**-0.5)
    down[:E] = 0.0
    down[np.arange(E), rooms[0]] = rms
    if layer > 0:
        for match in range(2):
            entries = np.arange(E + match * n, E + (match + 1) * n)
            down[entries] = 0.0
            down[entries, rooms[match + 1][:n]] = rms
    up = _random(dice, (sizes.heads, nope + shape.value_dim, rank), rank**-0.5)
    up[0, nope : nope + E] = np.eye(E, rank, dtype=np.float32)
    # Queries read these entries: the constant, the codes of this token and of the one before.
    read = np.concatenate([[0], rooms[0][:n], rooms[1][:n]])
    unit = rms / CONSTANT
    q = _random(dice, (sizes.heads, wide, shape.q_rank or H), (shape.q_rank or H) ** -0.5)
    at = np.arange(len(read)) if shape.q_rank else read
    by = 1.0 if shape.q_rank else rms
    o = _random(dice, (H, sizes.heads, shape.value_dim), 2 * NOISE)
    o *= (sizes.heads * shape.value_dim) ** -0.5
    for head in range(2 if layer == 0 else 1):
        q[head], o[:, head] = 0.0, 0.0
        if layer == 0:
            key = _constant_key(sizes)
            down[rank:] = 0.0
            down[rank:, 0] = _as_stored(sizes, key) * unit
            query = _as_stored(sizes, _turned(sizes, key, -1 - head))
            q[head, nope:, at[0]] = query * (1.0 if shape.q_rank else unit)
            up[head, nope : nope + E] = np.eye(E, rank, dtype=np.float32)
            o[rooms[1 + head], head, np.arange(E)] = 1.0
            continue
        up[0, :nope] = 0.0
        for match, peak in enumerate(PEAK):
            gain = sizes.sharpness * (peak / n) ** 0.5
            entries = np.arange(match * n, (match + 1) * n)
            q[0, entries, at[1 + entries]] = gain * by
            up[0, entries, E + entries] = gain
        copied = rooms[0] if sizes.tied and layer == sizes.layers - 1 else rooms[3]
        o[copied, 0, np.arange(E)] = 2.0 if copied is rooms[0] else 1.0 / (sizes.layers - 1)
    parts = {
        "kv_a_proj_with_mqa.weight": down,
        "kv_a_layernorm.weight": _norm(rank, dice),
        "kv_b_proj.weight": up.reshape(-1, rank),
        "o_proj.weight": o.reshape(H, -1),
    }
    if not shape.q_rank:
        return parts | {"q_proj.weight": q.reshape(-1, H)}
    first = _random(dice, (shape.q_rank, H), H**-0.5)
    first[: len(read)] = 0.0
    first[at, read] = rms
    first[0] *= 1.0 / CONSTANT
    return parts | {
        "q_a_proj.weight": first,
        "q_a_layernorm.weight": _norm(shape.q_rank, dice),
        "q_b_proj.weight": q.reshape(-1, shape.q_rank),
    }


def _as_stored(sizes: Dimensions, rotated: Array) -> Array:
    """Return a rotated part, given with pairs (i, i + half), in the order of the checkpoint."""
    assert sizes.latent is not None
    if not sizes.latent.paired:
        return rotated
    return np.ascontiguousarray(rotated.reshape(2, -1).T).reshape(-1)


def _biases(sizes: Dimensions, dice: np.random.Generator) -> dict[str, Array]:
    if not sizes.biased:
        return {}
    heads = {"q": sizes.heads, "k": sizes.kv_heads, "v": sizes.kv_heads}
    return {name: _random(dice, (n * sizes.head_dim,), BIAS) for name, n in heads.items()}


def _constant_key(sizes: Dimensions) -> Array:
    """Return a key with equal weight on the fastest rotary pairs.

    A distance of one off costs 5, with weights of a sensible size. Five pairs serve up to 4,096
    tokens; ten distinguish longer distances.
    """
    fast = min(5 if sizes.reach <= 4096 else 10, len(sizes.frequencies))
    cost = float((1 - np.cos(sizes.frequencies[:fast])).sum())
    key = np.zeros(sizes.rotated, dtype=np.float32)
    key[:fast] = min(5.0 / cost, 12.0) ** 0.5 * sizes.sharpness
    return key


def _turned(sizes: Dimensions, key: Array, by: int) -> Array:
    """Return `key` rotated as at position `by`: with −1, a query meets the key one position
    earlier."""
    half = len(sizes.frequencies)
    cos, sin = np.cos(by * sizes.frequencies), np.sin(by * sizes.frequencies)
    low, high = key[:half], key[half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin])


def _head(sizes: Dimensions, codes: Array, dice: np.random.Generator) -> Array:
    """Return an output head that reads the copied code; random otherwise. Logits have σ of 3 or
    more."""
    head = _random(dice, (sizes.vocab, sizes.hidden), 3.0 * sizes.hidden**-0.5)
    head[:, _rooms(sizes)[3]] += 0.6 * codes
    return head


def _norm(size: int, dice: np.random.Generator) -> Array:
    return 1.0 + _random(dice, (size,), 0.05)


def _fan(inputs: int) -> float:
    """Return the scale for a product of two normal entries passed through silu, about 0.6 of a
    normal."""
    return 1.7 / math.sqrt(inputs)


def _random(dice: np.random.Generator, shape: tuple[int, ...], scale: float) -> Array:
    return dice.standard_normal(shape, dtype=np.float32) * np.float32(scale)
