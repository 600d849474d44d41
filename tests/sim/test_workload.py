"""Workloads: a seed is a workload, traces are read as they lie, names of pages follow prefixes."""

from __future__ import annotations

import itertools
import pathlib
import statistics
from collections.abc import Callable

import pytest

from medha.errors import SpecError
from medha.sim.workload import (
    Arrival,
    mixed,
    poisson,
    read_azure,
    read_lengths,
    read_mooncake,
    scaled,
)


def test_a_seed_is_a_workload() -> None:
    lengths = mixed(0.05, 1000, seed=3)
    assert lengths == mixed(0.05, 1000, seed=3) != mixed(0.05, 1000, seed=4)
    assert poisson(lengths, 2.0, 50, seed=1) == poisson(lengths, 2.0, 50, seed=1)
    assert poisson(lengths, 2.0, 50, seed=1) != poisson(lengths, 2.0, 50, seed=2)


def test_poisson_arrivals_come_at_the_asked_rate_and_vary_as_they_should() -> None:
    arrivals = poisson([(10, 5)], 4.0, 20_000, seed=0)
    gaps = [b.arrival_s - a.arrival_s for a, b in itertools.pairwise(arrivals)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.03)
    assert min(gaps) >= 0
    half = scaled(arrivals, 2.0)
    assert half[-1].arrival_s == pytest.approx(arrivals[-1].arrival_s / 2)


def test_the_mix_has_the_share_of_long_prompts() -> None:
    lengths = mixed(0.05, 40_000, seed=0)
    long = [prompt for prompt, _ in lengths if prompt > 100_000]
    short = sorted(prompt for prompt, _ in lengths if prompt <= 8032)
    assert len(long) / 40_000 == pytest.approx(0.05, abs=0.005)
    assert min(long) >= 128 * 1024 and max(long) < 1024 * 1024
    assert len(long) + len(short) == 40_000
    assert 1300 < short[len(short) // 2] < 2200
    assert min(output for _, output in lengths) >= 1
    answers = sorted(output for prompt, output in lengths if prompt <= 8032)
    assert answers[len(answers) // 2] == pytest.approx(129, abs=3)
    assert answers[int(0.95 * len(answers))] == pytest.approx(451, rel=0.05)


def test_lengths_and_azure_traces_are_read(tmp_path: pathlib.Path) -> None:
    lengths = tmp_path / "l.csv"
    lengths.write_text("\ufeffnum_prefill_tokens,num_decode_tokens,x\n2979,484,1\n6468.0,3,2\n")
    assert read_lengths(lengths) == [(2979, 484), (6468, 3)]
    azure = tmp_path / "a.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9051690,396,0\n"
    )
    first, second = read_azure(azure)
    assert (first.arrival_s, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.arrival_s == pytest.approx(4.224579)
    assert second.output_tokens == 1


def test_a_trace_of_another_format_is_named_with_the_columns_it_lacks(
    tmp_path: pathlib.Path,
) -> None:
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("a,b\n1,2\n")
    with pytest.raises(SpecError, match=r"wrong\.csv is a, b: must have num_prefill_tokens"):
        read_lengths(wrong)
    lines = tmp_path / "wrong.jsonl"
    lines.write_text('{"timestamp": 1}\n')
    with pytest.raises(SpecError, match=r"wrong\.jsonl:1"):
        read_mooncake(lines)


MOONCAKE = '{"timestamp": 0, "input_length": 9, "output_length": 5, "hash_ids": [0]}'


@pytest.mark.parametrize(
    ("read", "content", "line", "reason"),
    [
        (read_lengths, "num_prefill_tokens,num_decode_tokens\n9,1\nx,1\n", 3, "x"),
        (read_lengths, "num_prefill_tokens,num_decode_tokens\n9\n", 2, "None"),
        (read_lengths, "num_prefill_tokens,num_decode_tokens\n-9,1\n", 2, "0 to"),
        (read_lengths, "num_prefill_tokens,num_decode_tokens\n1e30,1\n", 2, "from 0 to"),
        (read_lengths, "num_prefill_tokens,num_decode_tokens\ninf,1\n", 2, "from 0 to"),
        (read_azure, "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,9,1\n", 2, "now"),
        (read_azure, "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,nan,1\n", 2, "nan is no"),
        (read_azure, "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,9\n", 2, "None"),
        (read_mooncake, MOONCAKE + "\n[]\n", 2, "array"),
        (read_mooncake, MOONCAKE + "\n{\n", 2, "truncated"),
        (read_mooncake, MOONCAKE.replace("[0]", "7") + "\n", 1, "array"),
        (read_mooncake, MOONCAKE.replace("0,", "NaN,", 1) + "\n", 1, "malformed"),
        (read_mooncake, MOONCAKE.replace("[0]", "[-1]") + "\n", 1, "hash_ids"),
        (read_mooncake, MOONCAKE.replace("[0]", f"[{1 << 64}]") + "\n", 1, "hash_ids"),
        (read_mooncake, MOONCAKE.replace("{", '{"x": ' + "[" * 100_000, 1), 1, "recursion"),
    ],
)
def test_a_line_that_is_no_request_is_named_with_the_reason(
    tmp_path: pathlib.Path,
    read: Callable[[pathlib.Path], object],
    content: str,
    line: int,
    reason: str,
) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(SpecError, match=rf"trace:{line} is .*: must be a request .*{reason}"):
        read(path)


@pytest.mark.parametrize("read", [read_lengths, read_azure, read_mooncake])
def test_a_file_that_is_not_text_is_no_trace(
    tmp_path: pathlib.Path, read: Callable[[pathlib.Path], object]
) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\x00\xd0\xff" * 40)
    with pytest.raises(SpecError, match="trace is not text: must be a trace in UTF-8"):
        read(path)


def test_requests_of_a_trace_come_in_order_of_time(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 20:15:50+02:00,1,1\n"
        "2023-11-16 18:15:46.1,1,1\n2023-11-16 18:15:46.4000000,1,1\n"
    )
    assert [arrival.arrival_s for arrival in read_azure(path)] == [0.0, 0.3, 3.9]


def test_mooncake_blocks_become_page_names_shared_exactly_by_equal_prefixes(
    tmp_path: pathlib.Path,
) -> None:
    trace = tmp_path / "m.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 1500, "input_length": 1536, "output_length": 5, "hash_ids": [0, 1, 7]}\n'
    )
    first, second = read_mooncake(trace)
    assert second.arrival_s == 1.5
    for page_tokens in (64, 512, 1024):
        mine, theirs = first.page_names(page_tokens), second.page_names(page_tokens)
        assert len(mine) == 1100 // page_tokens and len(theirs) == 1536 // page_tokens
        shared = sum(a == b for a, b in zip(mine, theirs, strict=False))
        assert shared == 1024 // page_tokens
        assert all(len(name) == 16 for name in mine) and len(set(mine)) == len(mine)
    assert Arrival(id="x", arrival_s=0.0, prompt_tokens=1000).page_names(64) == ()
