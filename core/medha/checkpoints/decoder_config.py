"""Typed values of a checkpoint's config.json, as far as the engine needs them.

Reads the keys of the `families`. Unknown settings are refused by name: a silently ignored setting
gives wrong tokens, not an error.
"""

from __future__ import annotations

import math
import pathlib
from typing import Any

import msgspec

from medha.checkpoints.families import family_of, windows_of
from medha.checkpoints.json_fields import count, even_count, read_json
from medha.checkpoints.latent_attention import LatentAttention, latent_of
from medha.checkpoints.quantization import Quantization, quantization_of
from medha.checkpoints.rope_settings import Rope, rope_of
from medha.checkpoints.routed_experts import RoutedExperts, experts_of
from medha.errors import CheckpointError
from medha.messages import GenerationDefaults
from medha.model import ModelShape

GENERATION_CONFIG = "generation_config.json"
MAX_LAYERS = 10_000


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and options of the whole model. `max_context_tokens` is the longest context that
    max_position_embeddings and the scaling of `rope` allow.

    `head_norms`: each head's query and key are normed before rotation. `windows`: window of each
    layer in tokens, a row's own included (0: all); () if no layer has one. `experts` is None if all
    layers have one MLP, of width `intermediate`. `quantization` is None if no weights are packed.
    With `latent`, `kv_heads` and `head_dim` are those of the pages: one head, of the latent and the
    rotated key.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    rope: Rope
    tied_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    windows: tuple[int, ...] = ()
    experts: RoutedExperts | None = None
    quantization: Quantization | None = None
    latent: LatentAttention | None = None
    max_context_tokens: int = 2048
    stop_tokens: tuple[int, ...] = ()

    def window(self, layer: int) -> int:
        """Return the window of `layer` in tokens; 0: all."""
        return self.windows[layer] if self.windows else 0

    def windows_in(self, layers: range) -> tuple[int, ...]:
        """Return the distinct windows of `layers`."""
        return tuple(sorted({self.window(layer) for layer in layers}))

    def experts_in(self, layer: int) -> RoutedExperts | None:
        """Return the experts of `layer`; None: it has one MLP."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None

    @property
    def planes(self) -> int:
        """Rows that pages hold of a token and head: key and value (2), or a latent for both (1)."""
        return 1 if self.latent else 2

    @property
    def rotated_dim(self) -> int:
        """Entries of a head's query and key that positions rotate."""
        return self.latent.rope_dim if self.latent else self.head_dim

    @property
    def divided_width(self) -> int:
        """The greatest common divisor of the widths that TP divides: of MLPs and experts."""
        if self.experts is None:
            return self.intermediate
        if len(self.experts.layers) == self.layers:
            return self.experts.intermediate
        return math.gcd(self.intermediate, self.experts.intermediate)

    def shape(
        self,
        param_bytes: float,
        kv_bytes: float,
        max_context_tokens: int | None = None,
        packed_bytes: float = 0.0,
    ) -> ModelShape:
        """Return the sizes that scheduling needs, with bytes per parameter, per cached scalar and
        per packed weight."""
        return ModelShape(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate=self.intermediate,
            vocab=self.vocab,
            tied_embeddings=self.tied_embeddings,
            param_bytes=param_bytes,
            packed_bytes=packed_bytes,
            kv_bytes=kv_bytes,
            max_context_tokens=max_context_tokens or self.max_context_tokens,
            window_tokens=max(self.windows, default=0),
            window_layers=sum(window > 0 for window in self.windows),
            experts=self.experts.count if self.experts else 0,
            experts_per_token=self.experts.per_token if self.experts else 0,
            expert_intermediate=self.experts.intermediate if self.experts else 0,
            expert_layers=len(self.experts.layers) if self.experts else 0,
            shared_intermediate=self.experts.shared_intermediate if self.experts else 0,
            latent=self.latent.shape if self.latent else None,
        )


def read_config(folder: pathlib.Path) -> DecoderConfig:
    """Return the configuration of the checkpoint in `folder`. Raises CheckpointError naming the
    file."""
    path = folder / "config.json"
    raw = read_json(path)
    family = family_of(path, raw)
    layers = count(path, raw, "num_hidden_layers", most=MAX_LAYERS)
    heads = count(path, raw, "num_attention_heads")
    hidden = count(path, raw, "hidden_size")
    max_tokens = count(path, raw, "max_position_embeddings", family.max_tokens)
    chosen = family.biases == "chosen"
    attention_bias = chosen and bool(raw.get("attention_bias", False))
    unsaid = heads if "num_key_value_heads" in raw else family.kv_heads or heads
    kv_heads = count(path, raw, "num_key_value_heads", unsaid)
    if heads % kv_heads:
        raise CheckpointError(
            f"{path}: num_key_value_heads is {kv_heads}: must divide num_attention_heads, which is"
            f" {heads}; fetch the file again"
        )
    rope = rope_of(path, raw, max_tokens)
    latent = latent_of(path, raw, rope, heads, kv_heads) if family.latent else None
    if latent is not None:
        kv_heads, head_dim = 1, latent.width
    else:
        head_dim = even_count(path, raw, "head_dim", family.head_dim or hidden // heads)
    return DecoderConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=count(path, raw, "intermediate_size"),
        vocab=count(path, raw, "vocab_size"),
        norm_eps=_epsilon(path, raw),
        rope=rope,
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.biases == "qkv" or attention_bias,
        out_bias=attention_bias,
        mlp_bias=chosen and bool(raw.get("mlp_bias", False)),
        head_norms=family.head_norms,
        windows=windows_of(path, raw, family, layers),
        experts=experts_of(path, raw, layers, family.mixture),
        latent=latent,
        quantization=quantization_of(path, raw),
        max_context_tokens=rope.longest_context(max_tokens),
        stop_tokens=_stop_tokens(folder, raw),
    )


def _epsilon(path: pathlib.Path, raw: dict[str, Any]) -> float:
    value = raw.get("rms_norm_eps", 1e-6)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 < value < 1.0:
        raise CheckpointError(
            f"{path}: rms_norm_eps is {value!r}: must be a number between 0 and 1, such as 1e-05;"
            " fetch the file again"
        )
    return float(value)


def read_generation_defaults(folder: pathlib.Path) -> GenerationDefaults:
    """Return the sampling parameters in generation_config.json; CheckpointError if one is out of
    range.

    As in vLLM, `do_sample` does not count.
    """
    path = folder / GENERATION_CONFIG
    if not path.exists():
        return GenerationDefaults()
    given = read_json(path)
    names = GenerationDefaults.__struct_fields__
    fields = {name: given[name] for name in names if name in given}
    if fields.get("top_k") == -1:  # off, as 0 is
        fields["top_k"] = 0
    try:
        return msgspec.convert(fields, GenerationDefaults)
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"{path} does not fit ({error}): correct or remove the field"
        ) from None


class _TokenizerConfig(msgspec.Struct, frozen=True):
    eos_token: Any = None


class _AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str


class _Tokenizer(msgspec.Struct, frozen=True):
    added_tokens: tuple[_AddedToken, ...] = ()


def _stop_tokens(folder: pathlib.Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """Return end-of-sequence ids: those of generation_config.json, or else of config.json, and
    that of the tokenizer, as in vLLM."""
    path = folder / GENERATION_CONFIG
    given = read_json(path).get("eos_token_id") if path.exists() else None
    if given is None:
        path, given = folder / "config.json", raw.get("eos_token_id")
    return tuple(dict.fromkeys([*_stated_ids(path, given), *_ids_of_tokenizer(folder)]))


def _stated_ids(path: pathlib.Path, ids: Any) -> list[int]:
    """Return the ids that a file states as `eos_token_id`. Raises CheckpointError."""
    if ids is None:
        return []
    stated = ids if isinstance(ids, list) else [ids]
    for number in stated:
        if type(number) is not int or not -1 <= number < 1 << 31:
            raise CheckpointError(
                f"{path}: eos_token_id is {ids!r:.80}: must be a token's number, or a list of"
                " them; correct it"
            )
    return [number for number in stated if number >= 0]  # some checkpoints have -1 for none


def _ids_of_tokenizer(folder: pathlib.Path) -> list[int]:
    """Return the id of the tokenizer's `eos_token`. `check_tokenizer` reports unsound files."""
    try:
        config = (folder / "tokenizer_config.json").read_bytes()
        text = msgspec.json.decode(config, type=_TokenizerConfig).eos_token
        tokenizer = (folder / "tokenizer.json").read_bytes()
        added = msgspec.json.decode(tokenizer, type=_Tokenizer).added_tokens
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return []
    if isinstance(text, dict):
        text = text.get("content")
    return [token.id for token in added if token.content == text]
