"""Arrivals of requests, from traces or drawn from a seed; always open-loop.

One seeded generator draws everything, so the same seed gives the same arrivals on any fleet. The
project ships no trace files.
"""

from __future__ import annotations

import csv
import datetime
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from medha.errors import SpecError

BLOCK_TOKENS = 512  # of a Mooncake hash id
MOST_TOKENS = 1 << 30  # of a request
Row = TypeVar("Row")
Parsed = TypeVar("Parsed")
P95_NORMAL = 1.6449  # 95th percentile of the standard normal distribution


class Arrival(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A future request. `blocks` name its 512-token blocks, each with all blocks before it.

    `output_tokens`: the actual length of the output; `max_tokens`: the limit that the client sets,
    None if it knows the length.
    """

    id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int = 1
    max_tokens: int | None = None
    blocks: tuple[int, ...] = ()
    tenant: str = ""
    slo_class: str = "default"

    @property
    def max_output_tokens(self) -> int:
        return self.max_tokens or self.output_tokens

    def page_names(self, page_tokens: int) -> tuple[bytes, ...]:
        """A 16-byte name for each full page of the prompt that `blocks` cover."""
        pages = min(self.prompt_tokens, len(self.blocks) * BLOCK_TOKENS) // page_tokens
        return tuple(
            self.blocks[((page + 1) * page_tokens - 1) // BLOCK_TOKENS].to_bytes(8, "little")
            + (page * page_tokens).to_bytes(8, "little")
            for page in range(pages)
        )


class LogNormal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Log-normal distribution of a number of tokens."""

    median: float
    p95: float

    def __post_init__(self) -> None:
        if not 1.0 <= self.median <= self.p95 < math.inf:
            raise ValueError(
                f"median {self.median:g} and p95 {self.p95:g}: 1 <= median <= p95 must hold"
            )

    def at(self, normals: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Token counts at standard normal variates."""
        sigma = math.log(self.p95 / self.median) / P95_NORMAL
        return np.maximum(1, np.rint(self.median * np.exp(sigma * normals))).astype(np.int64)


# Of Azure's conversation trace (2023): all requests, and the tenth with the longest prompts.
CHAT_OUTPUT = LogNormal(median=129, p95=451)
DOCUMENT_OUTPUT = LogNormal(median=58, p95=154)


def poisson(
    lengths: Sequence[tuple[int, int]],
    per_second: float,
    count: int,
    seed: int = 0,
    first_s: float = 0.0,
) -> list[Arrival]:
    """`count` arrivals of a Poisson process; (prompt, output) lengths are drawn from `lengths`."""
    rng = np.random.default_rng(seed)
    times = first_s + np.cumsum(rng.exponential(1.0 / per_second, count))
    picks = rng.integers(0, len(lengths), count)
    return [
        Arrival(
            id=f"r{index}",
            arrival_s=float(times[index]),
            prompt_tokens=lengths[pick][0],
            output_tokens=max(1, lengths[pick][1]),
        )
        for index, pick in enumerate(picks.tolist())
    ]


def mixed(
    long_share: float,
    count: int = 10_000,
    seed: int = 0,
    short_output: LogNormal = CHAT_OUTPUT,
    long_output: LogNormal = DOCUMENT_OUTPUT,
) -> list[tuple[int, int]]:
    """(prompt, output) lengths: prompts like the papers' evaluation mix.

    Short prompts of 2 to 8,032 tokens (log-normal, median 1,700); a share of long ones, uniform
    between 128 Ki and 1 Mi (Medha, section 6.1).
    """
    rng = np.random.default_rng(seed)
    short = np.clip(rng.lognormal(7.44, 1.3, count), 2, 8032).astype(int)
    normals = rng.standard_normal(count)
    long = rng.integers(128 * 1024, 1024 * 1024, count)
    is_long = rng.random(count) < long_share
    prompts = np.where(is_long, long, short)
    outputs = np.where(is_long, long_output.at(normals), short_output.at(normals))
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def read_lengths(path: pathlib.Path) -> list[tuple[int, int]]:
    """(prompt, output) lengths of a CSV with num_prefill_tokens and num_decode_tokens.

    Raises SpecError, as the other readers do.
    """

    def lengths(_: int, row: Mapping[str, str]) -> tuple[int, int]:
        return _tokens(row["num_prefill_tokens"]), _tokens(row["num_decode_tokens"])

    return list(_read(path, _rows(path, ("num_prefill_tokens", "num_decode_tokens")), lengths))


def read_azure(path: pathlib.Path) -> list[Arrival]:
    """Arrivals of Azure's public trace: TIMESTAMP, ContextTokens, GeneratedTokens."""

    def request(_: int, row: Mapping[str, str]) -> tuple[datetime.datetime, int, int]:
        moment = datetime.datetime.fromisoformat(row["TIMESTAMP"])
        moment = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
        return moment, _tokens(row["ContextTokens"]), _tokens(row["GeneratedTokens"])

    rows = _rows(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
    requests = sorted(_read(path, rows, request), key=lambda request: request[0])
    return [
        Arrival(
            id=f"r{index}",
            arrival_s=(moment - requests[0][0]).total_seconds(),
            prompt_tokens=prompt,
            output_tokens=output,
        )
        for index, (moment, prompt, output) in enumerate(requests)
    ]


class _MooncakeRow(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0.0)]
    input_length: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]


def read_mooncake(path: pathlib.Path) -> list[Arrival]:
    """Arrivals of Mooncake's public trace (JSON lines): timestamp in ms, lengths, hash_ids."""

    def arrival(index: int, line: str) -> Arrival:
        row = msgspec.json.decode(line, type=_MooncakeRow)
        if max(row.hash_ids, default=0) >= 1 << 64:
            raise ValueError(f"of hash_ids {max(row.hash_ids):.3g} has more than 64 bits")
        return Arrival(
            id=f"r{index}",
            arrival_s=row.timestamp / 1e3,
            prompt_tokens=max(1, row.input_length),
            output_tokens=max(1, row.output_length),
            blocks=row.hash_ids,
        )

    return sorted(_read(path, _lines(path), arrival), key=lambda arrival: arrival.arrival_s)


def scaled(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same requests, arriving `rate` times as fast."""
    return [
        msgspec.structs.replace(arrival, arrival_s=arrival.arrival_s / rate) for arrival in arrivals
    ]


def _read(
    path: pathlib.Path,
    rows: Iterator[tuple[int, str, Row]],
    parse: Callable[[int, Row], Parsed],
) -> Iterator[Parsed]:
    """Parse rows of a file, which come with their line and text; `parse` gets their index.

    Raises SpecError for the first that it does not understand, or if the file is not text.
    """
    index = 0
    try:
        for number, text, row in rows:
            try:
                yield parse(index, row)
            except (msgspec.MsgspecError, RecursionError, TypeError, ValueError) as error:
                raise SpecError(
                    f"{path}:{number}",
                    text,
                    f"must be a request ({error!s:.120})",
                    "correct the line, or remove it",
                ) from None
            index += 1
    except UnicodeDecodeError as error:
        raise SpecError(
            str(path), "not text", f"must be a trace in UTF-8 ({error})", "name another file"
        ) from None
    except csv.Error as error:
        raise SpecError(
            str(path), "damaged", f"must be a CSV of requests ({error})", "name another file"
        ) from None


def _rows(
    path: pathlib.Path, columns: Sequence[str]
) -> Iterator[tuple[int, str, Mapping[str, str]]]:
    with path.open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.DictReader(lines)
        missing = [name for name in columns if name not in (reader.fieldnames or ())]
        if missing:
            raise SpecError(
                str(path),
                ", ".join(reader.fieldnames or ()),
                f"must have {', '.join(missing)}",
                "use a trace of this format",
            )
        for row in reader:
            yield reader.line_num, ",".join(map(str, row.values())), row


def _lines(path: pathlib.Path) -> Iterator[tuple[int, str, str]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            yield number, line.strip(), line


def _tokens(number: str) -> int:
    """Return a number of tokens; traces count none where there was one at least."""
    tokens = float(number)
    if not 0.0 <= tokens <= MOST_TOKENS:
        raise ValueError(f"{number:.40} is no number of tokens from 0 to {MOST_TOKENS:,}")
    return max(1, int(tokens))
