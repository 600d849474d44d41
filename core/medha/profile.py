"""A machine's coefficients: the few rates and latencies from which batch times follow.

A profile is data, one JSON object: shipped for a class of machines, measured by calibration, or the
rough guess for one CPU core below. It knows no model and no topology; `medha.predictor` puts the
three together. Rates are per rank (one GPU or one CPU process), all costs are positive.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from medha.errors import SpecError

Rate = Annotated[float, msgspec.Meta(gt=0.0)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0)]


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates per second and latencies in seconds of one rank.

    * linear layers: `t = (t_mem^p + t_flop^p)^(1/p)`, `p` is `roofline_power`;
    * `attention_half_rows`: chunk × heads at which prefill attention reaches half its rate;
    * `layer_s`, `batch_s`, `sequence_s`: fixed cost per layer, per batch and stage, per entry;
    * all-reduce, point-to-point, KVP exchange and page transfer: latency + bytes / rate.

    `valid_rows`, `valid_keys`: the largest batch and context measured (0: not measured); beyond
    them times follow the law. `error`: relative error of the fit (root mean square).
    """

    name: str
    linear_flops_per_s: Rate
    linear_bytes_per_s: Rate
    roofline_power: Annotated[float, msgspec.Meta(ge=1.0, le=16.0)] = 2.0
    elementwise_bytes_per_s: Rate
    attention_flops_per_s: Rate
    attention_half_rows: Seconds = 0.0
    attention_bytes_per_s: Rate
    layer_s: Seconds = 0.0
    batch_s: Seconds = 0.0
    sequence_s: Seconds = 0.0
    all_reduce_latency_s: Seconds = 0.0
    all_reduce_bytes_per_s: Rate = 1e9
    p2p_latency_s: Seconds = 0.0
    p2p_bytes_per_s: Rate = 1e9
    kvp_latency_s: Seconds = 0.0
    kvp_bytes_per_s: Rate = 1e9
    transfer_latency_s: Seconds = 0.0
    transfer_bytes_per_s: Rate = 1e9
    valid_rows: Annotated[int, msgspec.Meta(ge=0)] = 0
    valid_keys: Annotated[int, msgspec.Meta(ge=0)] = 0
    error: Seconds = 0.0


# One core of a current server CPU running torch in float32: within a factor of three, no better.
# What counts there is fixed: some 60 µs of Python and dispatch per layer, a millisecond per batch.
CPU_CORE = Profile(
    name="cpu-core",
    linear_flops_per_s=4e10,
    linear_bytes_per_s=8e9,
    elementwise_bytes_per_s=4e9,
    attention_flops_per_s=1e10,
    attention_bytes_per_s=4e9,
    layer_s=2e-4,
    batch_s=1.5e-3,
    sequence_s=1e-4,
    all_reduce_latency_s=2e-4,
    all_reduce_bytes_per_s=1e9,
    p2p_latency_s=2e-4,
    p2p_bytes_per_s=1e9,
    kvp_latency_s=3e-4,
    kvp_bytes_per_s=1e9,
    transfer_latency_s=1e-3,
    transfer_bytes_per_s=1e9,
    error=0.5,
)

# 80 GB class GPUs, 8 per node. Linear and elementwise layers are fitted to public operator timings
# (Llama-3-8B and -70B, TP 1–8, up to 8,192 rows: mean error 4 %, worst 26 %), attention, fixed
# costs and all-reduce to a public measurement of isolated prefills, 1 Ki to 1 Mi tokens on
# TP8 × PP2 (each within 7 %); point-to-point is between nodes. KVP exchange and page transfer are
# not measured: they take the point-to-point rate.
A100 = Profile(
    name="a100",
    linear_flops_per_s=2.28e14,
    linear_bytes_per_s=1.77e12,
    roofline_power=1.31,
    elementwise_bytes_per_s=1.2e12,
    attention_flops_per_s=2.46e14,
    attention_half_rows=256.0,
    attention_bytes_per_s=1.5e12,
    layer_s=4.2e-5,
    batch_s=2.0e-3,
    sequence_s=4e-6,
    all_reduce_latency_s=4.3e-5,
    all_reduce_bytes_per_s=3.2e11,
    p2p_latency_s=3.1e-5,
    p2p_bytes_per_s=7.8e9,
    kvp_latency_s=3.1e-5,
    kvp_bytes_per_s=7.8e9,
    transfer_latency_s=1e-4,
    transfer_bytes_per_s=7.8e9,
    valid_rows=8192,
    valid_keys=1_048_576,
    error=0.1,
)

# The same, linear layers from Llama-2-70B (mean error 7 %, worst 35 %), collectives measured, and
# attention scaled from the A100 by peak rate: not measured.
H100 = Profile(
    name="h100",
    linear_flops_per_s=7.25e14,
    linear_bytes_per_s=3.71e12,
    roofline_power=1.23,
    elementwise_bytes_per_s=1.76e12,
    attention_flops_per_s=5.5e14,
    attention_half_rows=512.0,
    attention_bytes_per_s=2.6e12,
    layer_s=5.0e-5,
    batch_s=1.5e-3,
    sequence_s=3e-6,
    all_reduce_latency_s=3.0e-5,
    all_reduce_bytes_per_s=3.4e11,
    p2p_latency_s=2.0e-5,
    p2p_bytes_per_s=3.6e10,
    kvp_latency_s=2.0e-5,
    kvp_bytes_per_s=3.6e10,
    transfer_latency_s=1e-4,
    transfer_bytes_per_s=3.6e10,
    valid_rows=8192,
    error=0.2,
)

SHIPPED = {profile.name: profile for profile in (CPU_CORE, A100, H100)}


def encode(profile: Profile) -> bytes:
    """The profile as JSON, as Hello carries it and as a file holds it."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=1)


def decode(data: bytes, source: str = "profile") -> Profile:
    """The inverse of `encode`; raises SpecError naming `source` and the broken field."""
    try:
        return msgspec.json.decode(data, type=Profile)
    except msgspec.MsgspecError as error:
        raise SpecError(
            source,
            data[:80].decode("utf-8", "replace"),
            f"must hold a profile ({error})",
            "write it anew with `medha calibrate`",
        ) from None
