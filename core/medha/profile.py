"""Profile of a machine: the few rates and latencies that determine batch times.

A profile is one JSON object: shipped for a class of machines or for one CPU core, or measured by
`medha calibrate`. It is independent of model and topology; `medha.predictor` combines the three.
Rates are per rank (one GPU or one CPU process); all costs are positive.
"""

from __future__ import annotations

import importlib.resources
import pathlib
from typing import Annotated

import msgspec

from medha.errors import SpecError

Rate = Annotated[float, msgspec.Meta(gt=0.0)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0)]


class Tile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tile of a matrix product on one multiprocessor.

    `efficiency`: share of the device's rate that kernels with such tiles reach.
    """

    rows: Annotated[int, msgspec.Meta(ge=1)]
    columns: Annotated[int, msgspec.Meta(ge=1)]
    efficiency: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates per second and latencies in seconds of one rank.

    * linear layers: `t = (t_mem^p + t_flop^p)^(1/p)`, `p` is `roofline_power`; with `tiles` each
      product by itself, in waves of tiles on `multiprocessors`, see `medha.predictor.Products`;
    * `elementwise_s`: lower bound of norms, rotation, activation and sums of one layer;
    * `attention_half_rows`: chunk × heads at which prefill attention reaches half its rate;
      `attention_s`: fixed cost of a chunk's attention, per layer;
    * `layer_s`, `batch_s`, `sequence_s`: fixed cost per layer, per batch and stage, per entry;
    * all-reduce, point-to-point, KVP exchange and page transfer: latency + bytes / rate.

    `valid_rows`, `valid_keys`: the largest batch and context measured (0: not measured); beyond
    them, times follow the formula. `error`: relative error of the fit (root mean square).
    """

    name: str
    linear_flops_per_s: Rate
    linear_bytes_per_s: Rate
    roofline_power: Annotated[float, msgspec.Meta(ge=1.0, le=16.0)] = 2.0
    tiles: tuple[Tile, ...] = ()
    multiprocessors: Annotated[int, msgspec.Meta(ge=1)] = 1
    wave_share: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    product_s: Seconds = 0.0
    elementwise_bytes_per_s: Rate
    elementwise_s: Seconds = 0.0
    attention_flops_per_s: Rate
    attention_half_rows: Seconds = 0.0
    attention_s: Seconds = 0.0
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


def encode(profile: Profile) -> bytes:
    """Encode as JSON, for Hello and for files."""
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
            "write it again with `medha calibrate`",
        ) from None


def read(path: pathlib.Path, field: str = "profile") -> Profile:
    """Read the profile of a file that `field` names; raises SpecError."""
    try:
        return decode(path.read_bytes(), str(path))
    except OSError as error:
        raise SpecError(
            field,
            str(path),
            f"must be readable ({error.strerror})",
            "write it with medha calibrate",
        ) from None


def shipped(name: str) -> Profile:
    """Read a profile of this package; profiles/README.md names their origins."""
    file = importlib.resources.files("medha") / "profiles" / f"{name}.json"
    return decode(file.read_bytes(), f"medha/profiles/{name}.json")


CPU_CORE, A100, H100, H200 = map(shipped, ("cpu-core", "a100", "h100", "h200"))
SHIPPED = {profile.name: profile for profile in (CPU_CORE, A100, H100, H200)}


def guess_for(device: str) -> Profile:
    """Initial guess of a fit for this kind of device."""
    return CPU_CORE if device == "cpu" else H200
