"""Every layout gives transformers' logits and tokens: TP × SPP × KVP, in real processes."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.driver import Driver, Running
from tests.support.rank_rig import Rig
from tests.support.recalling_prompts import recalling

from medha.config import AdapterFolder
from medha_worker.model.checkpoint_writer import FAMILIES

PAGE_TOKENS = 16
PAGES = 700
VOCAB = 512
CUT, WRONG = (pathlib.Path(__file__).parent / name for name in ("cut.py", "wrong.py"))

STAGED = (
    "qwen2",
    "qwen2, late layers windowed",
    "qwen3_moe, some layers dense",
    "deepseek_v2",
    "deepseek_v3",
)
"""Families with tied embeddings, and those in which a layer's place decides what it computes."""

Oracle = Callable[[npt.NDArray[np.int32]], npt.NDArray[np.float32]]
Families = Callable[[str], tuple[pathlib.Path, Oracle]]
Formats = Callable[..., tuple[pathlib.Path, Oracle]]
Adapted = Callable[[str], tuple[pathlib.Path, tuple[AdapterFolder, ...], dict[str, Oracle]]]
MakeRig = Callable[..., Rig]


def short_ones(driver: Driver, kvp: int, seed: int) -> list[int]:
    """Prompts around the page borders, started in one mixed batch, each in a group of its own."""
    seqs = []
    for i, length in enumerate((1, 2, 15, 16, 17, 33, 130)):
        seq = seed * 100 + i
        driver.start(seq, recalling(length, VOCAB, seed=seq), groups=(i % kvp,))
        seqs.append(seq)
    driver.batch(*((seq, driver.running[seq].prompt_tokens) for seq in seqs[:-1]))
    driver.prefill(seqs[-1], (50, 7))
    return seqs


def long_one(driver: Driver, kvp: int, seq: int, length: int, others: list[int]) -> None:
    """Prefill a prompt that grows from group to group at page borders.

    Older pages move to the new group in the background, and decodes of other sequences run in the
    same batches.
    """
    driver.start(seq, recalling(length, VOCAB, seed=seq), groups=(0,))
    run, sizes, at = driver.running[seq], (37, 111, 64, 250, 1, 15), 0
    border = length // kvp
    while run.done < length:
        size = min(sizes[at % len(sizes)], length - run.done)
        at += 1
        group = run.tail + 1
        if run.done >= border * group and group < kvp:
            ragged = -run.done % PAGE_TOKENS
            if ragged and ragged < length - run.done:
                driver.batch((seq, ragged), (others[0], 1))
            if run.done % PAGE_TOKENS == 0:
                driver.grow(seq, group)
                full = sorted(run.pages[group - 1])
                driver.move(seq, full[1::3][:7], group - 1, group)
                continue
        driver.batch((seq, size), (others[at % len(others)], 1))
    driver.settle()


def play(driver: Driver, kvp: int, length: int, seed: int) -> list[Running]:
    """Run short prompts, a long one, a prefix hit on it, and decodes of all together."""
    shorts = short_ones(driver, kvp, seed)
    driver.decode(shorts, 2)
    long = seed * 100 + 50
    long_one(driver, kvp, long, length, shorts)
    driver.decode([long, *shorts], 3)
    hit = long + 1
    pages = (length // PAGE_TOKENS) * 2 // 3
    prompt = np.concatenate(
        (driver.running[long].tokens[: pages * PAGE_TOKENS], recalling(21, VOCAB, seed=hit))
    )
    driver.start(hit, prompt, groups=(kvp - 1,))
    driver.share(hit, long, pages)
    driver.prefill(hit, (10, 9))
    driver.decode([hit, long], 3)
    return [driver.running[seq] for seq in (*shorts, long, hit)]


def differences(runs: Iterable[Running], oracle: Oracle) -> list[str]:
    """List outputs with logits off by more than 1e-4 σ, or a token that is not greedy."""
    wrong = []
    for run in runs:
        expected = oracle(run.tokens)[run.prompt_tokens - 1 : -1]
        assert len(expected) == len(run.logits) == len(run.output) > 0
        for step, (ours, theirs) in enumerate(zip(run.logits, expected, strict=True)):
            error = float(np.abs(ours - theirs).max() / theirs.std())
            token = int(theirs.argmax())
            if not error <= 1e-4 or token != run.output[step]:
                wrong.append(
                    f"prompt of {run.prompt_tokens}, output {step}: {error:.1e} σ, token "
                    f"{run.output[step]} for {token}"
                )
    return wrong


def adapter_of(seq: int) -> str:
    """Sequences 50 and 51 of a play have the same, as the second hits pages of the first."""
    return ("legal", "poems", "")[seq // 2 % 3]


def adapted_differences(runs: Iterable[Running], oracles: dict[str, Oracle]) -> list[str]:
    """List the outputs that differ from the merged model of their adapter."""
    wrong, of = [], {name: [run for run in runs if run.adapter == name] for name in oracles}
    for name, own in of.items():
        assert own
        wrong += [f"{name}: {difference}" for difference in differences(own, oracles[name])]
    return wrong


def all_free(driver: Driver) -> bool:
    """End every sequence; True if every page is free again."""
    for seq in list(driver.running):
        driver.end(seq)
    return all(sorted(free) == list(range(PAGES)) for free in driver.free.values())


@pytest.mark.parametrize("tp, spp", [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)])
def test_each_layout_matches_transformers(
    make_rig: MakeRig, oracle: Oracle, tp: int, spp: int
) -> None:
    """KVP 1, 2 and 3 run in the same ranks, one generation after the other."""
    rig = make_rig(tp, spp, 3)
    rig.start(range(3))
    driver = Driver(rig, PAGE_TOKENS, PAGES)
    for kvp in (1, 2, 3):
        rig.form(kvp, tuple(range(kvp)))
        driver.generation = kvp
        length = 4000 if (tp, spp, kvp) == (1, 2, 3) else 300 + 97 * kvp
        runs = play(driver, kvp, length, seed=kvp + 10 * spp + 100 * tp)
        assert differences(runs, oracle) == []
        assert all_free(driver)
        rig.dissolve(kvp, range(kvp))
    assert not rig.failed


@pytest.mark.parametrize("tp, spp, kvp", [(1, 1, 2), (2, 1, 3), (1, 2, 2)])
def test_layers_cut_in_pieces_match_transformers(
    make_rig: MakeRig, oracle: Oracle, tp: int, spp: int, kvp: int
) -> None:
    """Shared and private chunks and decodes together; the exchange lies between pieces."""
    rig = make_rig(tp, spp, kvp, change=f"{CUT}:in_pieces")
    rig.start(range(kvp))
    rig.form(1, tuple(range(kvp)))
    runs = play(Driver(rig, PAGE_TOKENS, PAGES, generation=1), kvp, 500, seed=tp + 10 * spp)
    assert differences(runs, oracle) == []
    assert not rig.failed


@pytest.mark.parametrize("tp, spp", [(4, 1), (2, 2)])
def test_shards_that_replay_graphs_match_transformers(
    make_rig: MakeRig, oracle: Oracle, tp: int, spp: int
) -> None:
    """Recorded decodes hold the sums of the shards; shards record the same sizes."""
    rig = make_rig(tp, spp, 1, change=f"{CUT}:in_graphs")
    rig.start(range(1))
    rig.form(1, (0,))
    runs = play(Driver(rig, PAGE_TOKENS, PAGES, generation=1), 1, 300, seed=tp + 10 * spp)
    assert differences(runs, oracle) == []
    assert not rig.failed


@pytest.mark.parametrize(
    "name, tp, spp, kvp",
    [(name, 2, 1, 2) for name in FAMILIES if name != "llama"]
    + [(name, 1, 2, 2) for name in STAGED],
)
def test_each_family_matches_transformers_in_shards_stages_and_groups(
    make_rig: MakeRig, families: Families, name: str, tp: int, spp: int, kvp: int
) -> None:
    """A window begins in one group's pages and ends in another's while the prompt grows."""
    folder, oracle = families(name)
    rig = make_rig(tp, spp, kvp, checkpoint=str(folder))
    rig.start(range(kvp))
    rig.form(1, tuple(range(kvp)))
    driver = Driver(rig, PAGE_TOKENS, PAGES, generation=1)
    assert differences(play(driver, kvp, 400, seed=tp + 10 * spp), oracle) == []
    runs = run_random_batches(driver, kvp, random.Random(tp), batches=15)
    assert differences(runs, oracle) == []
    assert len(runs) > 2 and not rig.failed


@pytest.mark.parametrize(
    "name, tp, spp, kvp",
    [
        ("fp8, narrow blocks", 2, 1, 2),
        ("awq", 1, 2, 2),
        ("gptq, inputs in order of activation", 2, 2, 1),
    ],
)
def test_packed_weights_match_transformers_on_the_dequantised_in_layouts(
    make_rig: MakeRig, formats: Formats, name: str, tp: int, spp: int, kvp: int
) -> None:
    folder, oracle = formats(name)
    rig = make_rig(tp, spp, kvp, checkpoint=str(folder))
    rig.start(range(kvp))
    rig.form(1, tuple(range(kvp)))
    driver = Driver(rig, PAGE_TOKENS, PAGES, generation=1)
    assert differences(play(driver, kvp, 400, seed=tp + 10 * spp), oracle) == []
    assert all_free(driver) and not rig.failed


@pytest.mark.parametrize("tp, spp, kvp, length", [(4, 1, 2, 400), (2, 2, 3, 900), (1, 3, 3, 900)])
def test_latents_match_transformers_in_larger_layouts(
    make_rig: MakeRig, families: Families, tp: int, spp: int, kvp: int, length: int
) -> None:
    """Each of four shards has a single head; all hold the same latents."""
    folder, oracle = families("deepseek_v3")
    rig = make_rig(tp, spp, kvp, checkpoint=str(folder))
    rig.start(range(kvp))
    rig.form(1, tuple(range(kvp)))
    driver = Driver(rig, PAGE_TOKENS, PAGES, generation=1)
    assert differences(play(driver, kvp, length, seed=tp + 10 * spp), oracle) == []
    assert all_free(driver) and not rig.failed


@pytest.mark.parametrize("tp, spp, kvp", [(2, 1, 2), (1, 2, 1)])
def test_latents_through_a_gpus_calls_and_pieces_match_transformers(
    make_rig: MakeRig, families: Families, tp: int, spp: int, kvp: int
) -> None:
    folder, oracle = families("deepseek_v2, groups")
    rig = make_rig(tp, spp, kvp, checkpoint=str(folder), change=f"{CUT}:in_graphs")
    rig.start(range(kvp))
    rig.form(1, tuple(range(kvp)))
    driver = Driver(rig, PAGE_TOKENS, PAGES, generation=1)
    assert differences(play(driver, kvp, 400, seed=tp + 10 * spp), oracle) == []
    assert not rig.failed


@pytest.mark.parametrize(
    "name, tp, spp, kvp",
    [
        ("awq", 2, 1, 2),
        ("gptq", 1, 2, 2),
        ("fp8, blocks", 1, 2, 2),
        ("fp8, narrow blocks", 2, 1, 2),
    ],
)
def test_weights_that_stay_packed_match_transformers_in_layouts(
    make_rig: MakeRig, formats: Formats, name: str, tp: int, spp: int, kvp: int
) -> None:
    folder, oracle = formats(name)
    rig = make_rig(tp, spp, kvp, checkpoint=str(folder), packed_weights=True)
    rig.start(range(kvp))
    rig.form(1, tuple(range(kvp)))
    driver = Driver(rig, PAGE_TOKENS, PAGES, generation=1)
    assert differences(play(driver, kvp, 400, seed=tp + 10 * spp), oracle) == []
    assert all_free(driver) and not rig.failed


@pytest.mark.parametrize(
    "family, tp, spp, kvp",
    [("qwen3_moe", 2, 2, 1), ("qwen3_moe", 4, 1, 1), ("deepseek_v3", 2, 1, 2)],
)
def test_experts_and_latents_that_stay_fp8_match_transformers(
    make_rig: MakeRig, formats: Formats, family: str, tp: int, spp: int, kvp: int
) -> None:
    folder, oracle = formats("fp8, narrow blocks", family)
    rig = make_rig(tp, spp, kvp, checkpoint=str(folder), packed_weights=True)
    rig.start(range(kvp))
    rig.form(1, tuple(range(kvp)))
    driver = Driver(rig, PAGE_TOKENS, PAGES, generation=1)
    assert differences(play(driver, kvp, 400, seed=tp + 10 * spp), oracle) == []
    assert all_free(driver) and not rig.failed


def test_shards_with_fp8_weights_replay_graphs(make_rig: MakeRig, formats: Formats) -> None:
    folder, oracle = formats("fp8, narrow blocks")
    rig = make_rig(2, 1, 1, checkpoint=str(folder), packed_weights=True, change=f"{CUT}:in_graphs")
    rig.start(range(1))
    rig.form(1, (0,))
    runs = play(Driver(rig, PAGE_TOKENS, PAGES, generation=1), 1, 300, seed=1)
    assert differences(runs, oracle) == []
    assert not rig.failed


@pytest.mark.parametrize("mutant", ["scales_from_the_next_block", "cuts_scales_at_the_first_shard"])
def test_a_wrong_scale_is_found(make_rig: MakeRig, formats: Formats, mutant: str) -> None:
    folder, oracle = formats("fp8, narrow blocks")
    rig = make_rig(2, 1, 1, checkpoint=str(folder), packed_weights=True, change=f"{WRONG}:{mutant}")
    rig.start(range(1))
    rig.form(1, (0,))
    runs = play(Driver(rig, PAGE_TOKENS, PAGES, generation=1), 1, 300, seed=1)
    assert differences(runs, oracle) != []


@pytest.mark.parametrize(
    "tp, spp, kvp, length", [(2, 1, 1, 300), (1, 2, 1, 300), (1, 1, 2, 900), (2, 2, 2, 400)]
)
def test_adapters_match_the_merged_models_in_each_layout(
    make_rig: MakeRig, adapted: Adapted, tp: int, spp: int, kvp: int, length: int
) -> None:
    """Rows of two adapters and of none share batches; prompts grow, move and hit prefixes."""
    base, folders, oracles = adapted("")
    rig = make_rig(tp, spp, kvp, checkpoint=str(base), adapters=folders)
    rig.start(range(kvp))
    rig.form(1, tuple(range(kvp)))
    driver = Driver(rig, PAGE_TOKENS, PAGES, generation=1, adapter_of=adapter_of)
    runs = play(driver, kvp, length, seed=tp + 10 * spp)
    assert adapted_differences(runs, oracles) == []
    assert all_free(driver) and not rig.failed


def test_adapters_of_a_random_plan_match_the_merged_models(
    make_rig: MakeRig, adapted: Adapted
) -> None:
    base, folders, oracles = adapted("awq")
    rig = make_rig(2, 1, 2, checkpoint=str(base), adapters=folders, packed_weights=True)
    rig.start(range(2))
    rig.form(1, (0, 1))
    driver = Driver(rig, PAGE_TOKENS, PAGES, generation=1, adapter_of=adapter_of)
    runs = run_random_batches(driver, 2, random.Random(5), batches=60)
    assert adapted_differences(runs, oracles) == []
    assert driver.moved > 2 and not rig.failed


@pytest.mark.parametrize(
    "tp, spp, kvp, mutant",
    [
        (1, 1, 2, "forgets_the_adapter_where_it_grows"),
        (2, 1, 1, "takes_the_adapter_of_the_first_shard"),
        (1, 2, 1, "takes_the_adapter_of_the_first_stage"),
    ],
)
def test_a_wrong_adapter_is_found(
    make_rig: MakeRig, adapted: Adapted, tp: int, spp: int, kvp: int, mutant: str
) -> None:
    base, folders, oracles = adapted("")
    rig = make_rig(tp, spp, kvp, checkpoint=str(base), adapters=folders, change=f"{WRONG}:{mutant}")
    rig.start(range(kvp))
    rig.form(1, tuple(range(kvp)))
    driver = Driver(rig, PAGE_TOKENS, PAGES, generation=1, adapter_of=adapter_of)
    assert adapted_differences(play(driver, kvp, 300, seed=3), oracles) != []


def run_random_batches(driver: Driver, kvp: int, rng: random.Random, batches: int) -> list[Running]:
    """Run batches of random sequences, which start, hit prefixes, grow, move and end."""
    over: list[Running] = []
    for number in range(batches):
        live = driver.running
        if len(live) < 4 or rng.random() < 0.1:
            seq = 1000 + number
            prompt = recalling(rng.randrange(1, 400), VOCAB, seed=seq)
            source = rng.choice(list(live)) if live and rng.random() < 0.4 else None
            if source is not None and driver.adapter_of(source) != driver.adapter_of(seq):
                source = None
            shared = live[source].done // PAGE_TOKENS if source is not None else 0
            if source is not None and shared:
                prompt = np.concatenate((live[source].tokens[: shared * PAGE_TOKENS], prompt))
            driver.start(
                seq, prompt, groups=tuple(rng.sample(range(kvp), rng.randrange(1, kvp + 1)))
            )
            if source is not None and shared:
                driver.share(seq, source, shared)
        for seq in rng.sample(list(live), min(2, len(live))):
            grow_or_move(driver, kvp, seq, rng)
        seqs = rng.sample(list(live), rng.randrange(1, len(live) + 1))
        driver.batch(*((seq, chunk_length(live[seq], rng)) for seq in seqs))
        for seq in [seq for seq in seqs if len(live[seq].output) > 6]:
            if not driver.moving(seq):
                over.append(live[seq])
                driver.end(seq)
    driver.settle()
    return over + [run for run in driver.running.values() if run.output]


def chunk_length(run: Running, rng: random.Random) -> int:
    return rng.randint(1, min(len(run.tokens) - run.done, 90))


def grow_or_move(driver: Driver, kvp: int, seq: int, rng: random.Random) -> None:
    """Grow at a page border, or move some full pages between two groups."""
    run = driver.running[seq]
    if run.done % PAGE_TOKENS == 0 and rng.random() < 0.5:
        driver.grow(seq, rng.randrange(kvp))
        return
    source, target = rng.randrange(kvp), rng.randrange(kvp)
    full = [n for n in run.pages.get(source, {}) if (n + 1) * PAGE_TOKENS <= run.done]
    if full and source in run.known and source != target and not driver.moving(seq):
        driver.move(seq, sorted(rng.sample(full, rng.randint(1, len(full)))), source, target)


@pytest.mark.parametrize("tp, spp, kvp", [(1, 1, 3), (2, 1, 2), (1, 2, 2)])
def test_a_random_plan_matches_transformers(
    make_rig: MakeRig, oracle: Oracle, tp: int, spp: int, kvp: int
) -> None:
    rig = make_rig(tp, spp, kvp)
    rig.start(range(kvp))
    rig.form(1, tuple(range(kvp)))
    driver = Driver(rig, PAGE_TOKENS, PAGES, generation=1)
    runs = run_random_batches(driver, kvp, random.Random(tp + 10 * spp + 100 * kvp), batches=60)
    assert differences(runs, oracle) == []
    assert len(runs) > 4 and driver.moved > 4 and not rig.failed  # depends on how fast moves are


@pytest.mark.parametrize("mutant", ["sees_what_is_out_of_sight", "sees_a_window_per_group"])
def test_a_wrong_window_is_found(make_rig: MakeRig, families: Families, mutant: str) -> None:
    folder, oracle = families("mistral, a narrow window")
    rig = make_rig(1, 1, 2, checkpoint=str(folder), change=f"{WRONG}:{mutant}")
    rig.start(range(2))
    rig.form(1, (0, 1))
    driver = Driver(rig, PAGE_TOKENS, PAGES, generation=1)
    assert differences(play(driver, 2, 400, seed=7), oracle) != []


@pytest.mark.parametrize(
    "mutant",
    ["drops_a_token", "counts_a_page_twice", "is_one_position_off", "takes_the_wrong_base"],
)
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_wrong_engine_is_found(
    make_rig: MakeRig, families: Families, name: str, mutant: str
) -> None:
    folder, oracle = families(name)
    rig = make_rig(1, 1, 2, checkpoint=str(folder), change=f"{WRONG}:{mutant}")
    rig.start(range(2))
    rig.form(1, (0, 1))
    driver = Driver(rig, PAGE_TOKENS, PAGES, generation=1)
    assert differences(play(driver, 2, 400, seed=7), oracle) != []
