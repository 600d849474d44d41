"""Machine code of the scheduler: the same decisions as its sources, and never of other sources."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import hatch_build
import pytest

import medha
from medha import compiled

CORE = Path(medha.__file__).parents[1]
# Decisions of a few small fleets, in a process of their own: a hash for each.
DECIDE = """
import hashlib, random
import medha, msgspec
from medha.config import POLICIES, Scheduling
from medha.testing import Driven, request, scheduler, topology

print(medha.COMPILED)
for policy in POLICIES:
    for seed, (spp, kvp) in enumerate([(1, 1), (2, 2), (3, 3)]):
        dice, at, arrivals = random.Random(seed), 0.0, []
        for n in range(60):
            at += dice.expovariate(12.0)
            tokens = dice.randint(1, 1500) if dice.random() < 0.85 else dice.randint(1000, 50_000)
            arrivals.append(request(
                f"r{n}", tokens, at, within_s=1.5e-4 * tokens + dice.choice([0.2, 1.0, 4.0]),
                output_tokens=dice.randint(1, 30), tpot_s=0.05,
            ))
        plan = scheduler(
            topology(spp=spp, kvp=kvp, tokens_per_group=20_000), Scheduling(policy=policy),
            pages=900, key_s=2e-10,
        )
        driven = Driven(plan)
        driven.submit(arrivals, hashes=[bytes([k]) for k in range(5)] if seed else [])
        driven.run()
        print(policy, spp, kvp, hashlib.sha256(msgspec.json.encode(driven.batches)).hexdigest())
"""


def decisions(core: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", DECIDE],
        env={"PYTHONPATH": str(core)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def copy_of_the_core(to: Path, *, machine_code: bool) -> Path:
    leave = ["__pycache__"] if machine_code else ["__pycache__", compiled.RECORD]
    shutil.copytree(CORE, to, ignore=shutil.ignore_patterns(*leave))
    return to


@pytest.mark.skipif(not medha.COMPILED, reason=f"no machine code: {compiled.stale()}")
def test_machine_code_decides_as_its_sources_do(tmp_path: Path) -> None:
    plain = decisions(copy_of_the_core(tmp_path / "plain", machine_code=False))
    fast = decisions(CORE)
    assert (plain[0], fast[0]) == ("False", "True")
    assert len(plain) > 20 and plain[1:] == fast[1:]


@pytest.mark.skipif(not medha.COMPILED, reason=f"no machine code: {compiled.stale()}")
def test_machine_code_of_a_source_that_was_changed_is_not_used(tmp_path: Path) -> None:
    core = copy_of_the_core(tmp_path / "core", machine_code=True)
    assert compiled.stale(core / "medha" / "compiled") is None
    module = core / "medha" / "scheduling" / "batch_builder.py"
    module.write_text(module.read_text() + "\nCHANGED = True\n")
    script = "import medha, medha.scheduling.batch_builder as p; print(medha.COMPILED, p.CHANGED)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(core)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["False", "True"], done.stderr
    assert "medha.scheduling.batch_builder has changed" in str(
        compiled.stale(core / "medha" / "compiled")
    )


def test_mypyc_takes_every_module_that_decides(tmp_path: Path) -> None:
    if not find_spec("mypyc"):
        pytest.skip("mypyc is not installed")
    core = copy_of_the_core(tmp_path / "core", machine_code=False)
    files = [f"{name.replace('.', '/')}.py" for name in hatch_build.MODULES]
    done = subprocess.run(
        [sys.executable, "-c", hatch_build.TRANSLATE.format(files=files)],
        cwd=core,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_machine_code_for_another_python_is_not_used(tmp_path: Path) -> None:
    (tmp_path / compiled.RECORD).write_text(json.dumps({"python": "cpython-27", "modules": {}}))
    assert "compiled for cpython-27" in str(compiled.stale(tmp_path))
    assert not compiled.install(tmp_path)


def test_a_record_without_its_machine_code_is_no_machine_code(tmp_path: Path) -> None:
    core = tmp_path / "core"
    shutil.copytree(CORE, core, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    folder = core / "medha" / "compiled"
    known = {"medha.predictor": compiled.digest(core / "medha" / "predictor.py")}
    output = {"python": sys.implementation.cache_tag, "modules": known}
    (folder / compiled.RECORD).write_text(json.dumps(output))
    assert "the code of medha.predictor is missing" in str(compiled.stale(folder))
    assert not compiled.install(folder)


def test_machine_code_of_a_source_that_is_gone_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "core" / "medha" / "compiled"
    folder.mkdir(parents=True)
    for name in ("medha.merged", compiled.SHARED):
        (folder / f"{name}.so").touch()
    record = {"python": sys.implementation.cache_tag, "modules": {"medha.merged": "0" * 64}}
    (folder / compiled.RECORD).write_text(json.dumps(record))
    assert "the source of medha.merged is gone" in str(compiled.stale(folder))
    assert not compiled.install(folder)


def test_without_machine_code_the_remedy_is_said(tmp_path: Path) -> None:
    assert "make setup" in str(compiled.stale(tmp_path))
    assert not compiled.install(tmp_path)
