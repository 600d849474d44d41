"""The GPU benchmark, its logic played on a CPU: what is measured, never how fast."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import msgspec
import pytest
import torch
from tests.support.served import Served, Wish
from tests.support.stopwatch import Stopwatch

from medha.config import Scheduling
from medha.messages import BatchTokens, RankReport
from medha.profile import CPU_CORE, encode
from medha_worker.device import CPU
from medha_worker.model.checkpoint_writer import TinyModel, write_config
from medha_worker.runner import LaunchedBatch

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
ROWS = ("ttft", "tpot", "convoy", "queue", "burst", "chunks", "decode", "host")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("shape")
    write_config(folder, TinyModel(layers=2, max_tokens=8192))
    return folder


@pytest.fixture(scope="module")
def served(folder: pathlib.Path) -> Served:
    return Served(folder, CPU, profile=CPU_CORE, dtype="float32", pages=96, page_tokens=16)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_engine", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    ended = run()
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.count("\n") == 1 and "torch finds no GPU" in ended.stderr


def test_a_dry_run_has_every_row_and_judges_none(tmp_path: pathlib.Path) -> None:
    ended = run("--device", "cpu", "--shape", "tiny", "--json", str(tmp_path / "table.json"))
    assert ended.returncode == 0, ended.stderr
    table = json.loads((tmp_path / "table.json").read_text())
    assert {row["row"] for row in table["rows"]} == set(ROWS)
    assert all(row["met"] is None and row["value"] >= 0 for row in table["rows"])
    assert table["whole"] and table["profile"] == "cpu-core"
    assert "MISSED" not in ended.stdout and "not timed" in ended.stdout


def test_a_long_prompt_is_computed_when_named_unless_it_takes_too_long(
    tmp_path: pathlib.Path,
) -> None:
    dry = ("--device", "cpu", "--shape", "tiny", "--rows", "prefill900k")
    slow = tmp_path / "slow.json"
    lame = dict.fromkeys(("linear_flops_per_s", "attention_flops_per_s"), 1e4)
    slow.write_bytes(encode(msgspec.structs.replace(CPU_CORE, name="slow", **lame)))
    ended = run(*dry, "--profile", str(slow), "--json", str(tmp_path / "table.json"))
    assert ended.returncode == 0 and "--patience is 450" in ended.stdout, ended.stderr
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["profile"] == "slow" and [row["value"] for row in table["rows"]] == [None]


def test_a_profile_that_is_none_is_one_sentence_and_status_two(tmp_path: pathlib.Path) -> None:
    (tmp_path / "p.json").write_text("{}")
    for file, reason in (("p.json", "must hold a profile"), ("none.json", "must be readable")):
        ended = run("--device", "cpu", "--shape", "tiny", "--profile", str(tmp_path / file))
        assert ended.returncode == 2 and ended.stdout == ""
        assert ended.stderr.count("\n") == 1 and reason in ended.stderr


def test_the_stopwatch_knows_every_batch_and_leaves_nothing_behind(served: Served) -> None:
    watch, own = Stopwatch(served), (served.scheduler, served.runner)
    with watch:
        served.play([Wish(prompt_tokens=40, output_tokens=30)] * 4)
    assert (served.scheduler, served.runner) == own
    assert len(watch.of(4)) > 10 and sum(turn.rows for turn in watch.turns) == 4 * (40 + 29)
    for turn in watch.turns:
        assert set(turn.parts_s) == set(Stopwatch.parts) and turn.host_s > 0
        assert turn.parts_s["launch"] > 0 and turn.device_s > 0
        assert not turn.behind, "on a CPU a batch is done when it was launched"


def test_a_wish_gets_all_its_tokens_in_order_of_time(served: Served) -> None:
    wishes = [Wish(prompt_tokens=40, output_tokens=5), Wish(prompt_tokens=7, output_tokens=3)]
    for story in served.play(wishes):
        assert len(story.token_s) == story.wish.output_tokens
        assert story.token_s == sorted(story.token_s) and story.ttft_s > 0
        assert len(story.gaps_s()) == story.wish.output_tokens - 1


def test_a_filled_prompt_is_not_computed_and_its_decodes_are(served: Served) -> None:
    before = len(served.engine.kv.memory.nonzero())
    (story,) = served.play([Wish(prompt_tokens=1000, output_tokens=3, filled=True)])
    written = len(served.engine.kv.memory.nonzero()) - before
    assert len(story.token_s) == 3
    config = served.engine.model_config
    token = 2 * config.layers * config.kv_heads * config.head_dim
    assert written <= 2 * token, "two tokens were computed: those after the made-up first"


def drawn(folder: pathlib.Path, ahead_s: float) -> dict[int, list[int]]:
    """Tokens of five requests, by sequence."""
    served = Served(
        folder,
        CPU,
        profile=CPU_CORE,
        dtype="float32",
        pages=96,
        page_tokens=16,
        settings=Scheduling(ahead_s=ahead_s),
    )
    table: dict[int, list[int]] = {}
    finish = served.runner.finish

    def noted(launched: LaunchedBatch) -> list[RankReport]:
        reports = finish(launched)
        for out in (o for r in reports if isinstance(r, BatchTokens) for o in r.tokens):
            table.setdefault(out.seq, []).append(out.token)
        return reports

    served.runner.finish = noted  # type: ignore[method-assign]
    served.play([Wish(prompt_tokens=9 * n, output_tokens=4 * n) for n in range(1, 6)])
    return table


def test_a_play_draws_the_same_one_step_ahead(folder: pathlib.Path) -> None:
    behind, ahead = drawn(folder, 0.0), drawn(folder, 0.05)
    assert {seq: len(tokens) for seq, tokens in ahead.items()} == {n: 4 * n for n in range(1, 6)}
    assert ahead == behind


def test_a_play_ends_when_told_and_leaves_nothing_behind(served: Served) -> None:
    endless = [Wish(prompt_tokens=16, output_tokens=400, filled=True)] * 3
    short = Wish(prompt_tokens=16, output_tokens=1, arrival_s=0.01)
    stories = served.play(
        [*endless, short], lambda seen: any(s.wish is short and s.token_s for s in seen)
    )
    assert all(len(story.token_s) < 400 for story in stories)
    again = served.play([Wish(prompt_tokens=1200, output_tokens=2)])
    assert len(again[0].token_s) == 2, "all pages came back"
