"""Across ranks, on traces of a real run with gloo in which one rank is slow on purpose."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.node import torchrun

from torchperfd_cli import main
from torchperfd_daemon import analysis

pytestmark = [pytest.mark.slow, pytest.mark.serial]

pytest.importorskip("torch")

RANKS, SLOW, STEPS = 3, 1, 6
SCRIPT = """
import json, os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

# DDP arranges its buckets anew after the first step.
WARMUP = 3
slow, steps, folders = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_num_threads(1)
pair = dist.new_group([0, 1])

def train(folder):
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    inputs, took = torch.randn(8, 64), []
    plan = schedule(wait=0, warmup=WARMUP, active=steps, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=plan) as profiler:
        for _ in range(steps + WARMUP):
            if rank == slow:
                time.sleep(0.05)
            loss = model(inputs).sum()
            begun = time.monotonic()
            loss.backward()
            took.append(time.monotonic() - begun)
            if folder.endswith("subgroup") and rank < 2:
                dist.all_reduce(torch.ones(4), group=pair)
            if rank == 0:
                dist.send(torch.ones(1), 2)
            if rank == 2:
                dist.recv(torch.ones(1), 0)
            profiler.step()
    profiler.export_chrome_trace(f"{folder}/rank{rank}.json")
    with open(f"{folder}/took{rank}", "w") as file:
        json.dump(took[WARMUP:], file)

for folder in folders:
    train(folder)
    dist.barrier()
# All is written. How torch's threads and the interpreter end beside each other, in which a rank was once
# aborted, is not what is looked at here.
os._exit(0)
"""


def train(base: Path, *names: str) -> list[Path]:
    """Run the script on all ranks; return a folder per name with its traces and what the ranks measured."""
    script = base / "slow.py"
    script.write_text(SCRIPT)
    folders = [base / name for name in names]
    for folder in folders:
        folder.mkdir()
    command = [*torchrun(RANKS), str(script), str(SLOW), str(STEPS), *map(str, folders)]
    env = os.environ | {"PYTHONFAULTHANDLER": "1"}  # a rank that dies says where
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return folders


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield runs of a job that trains several times: to start its ranks takes far longer than to train."""

    def endless() -> Iterator[Path]:
        while True:
            yield from train(tmp_path_factory.mktemp("runs"), *map(str, range(5)))

    return endless()


@pytest.fixture
def run(runs: Iterator[Path]) -> Path:
    """Return a run of the test's own: one that other programs disturb must not fail all tests."""
    return next(runs)


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def across(folder: Path) -> analysis.Across:
    files = analysis.rank_files(folder)
    found = {}
    for file in files:
        trace = analysis.load(file.path)
        assert file.rank is not None
        found[file.rank] = analysis.collectives(trace, analysis.steps(trace))
    result = analysis.across(found)
    assert result is not None
    return result


def measured_ns(folder: Path) -> list[float]:
    """Return how much longer than the fastest each rank was in backward, by the script's own clock."""
    took = [json.loads((folder / f"took{rank}").read_text()) for rank in range(RANKS)]
    fastest = [min(step) for step in zip(*took, strict=True)]
    return [1e9 * sum(mine - least for mine, least in zip(each, fastest, strict=True)) for each in took]


def judge(result: analysis.Across, folder: Path, *, tolerance: float = 0.2) -> None:
    """Assert that the slow rank is named, and that the others waited what they measured themselves."""
    slow = result.blamed
    assert slow is not None
    assert slow.rank == SLOW
    # On a busy machine another may be kept from one collective for longer.
    assert slow.last > STEPS // 2
    for each in result.ranks:
        if each.rank != SLOW:
            assert each.wait_ns == pytest.approx(measured_ns(folder)[each.rank], rel=tolerance)
    others = sum(each.wait_ns for each in result.ranks if each.rank != SLOW)
    assert slow.cost_ns == pytest.approx(others, rel=tolerance)


def test_the_slow_rank_is_named_with_what_the_others_waited(run: Path) -> None:
    result = across(run)
    judge(result, run)
    assert [(each.matched, each.unmatched) for each in result.ranks] == [(STEPS, 0)] * RANKS
    assert (result.steps, result.missing) == (STEPS, ())
    (kind,) = result.kinds
    assert (kind.kind.name, kind.ranks, kind.calls) == ("all_reduce", (0, 1, 2), STEPS)
    assert kind.bytes == STEPS * (64 * 64 + 64) * 4


def shift(file: Path, microseconds: int) -> None:
    """Set the clock of a trace: every ``ts`` by so much."""
    moved = re.sub(r'"ts": (\d+)\.', lambda match: f'"ts": {int(match[1]) + microseconds}.', file.read_text())
    file.write_text(moved)


@pytest.mark.parametrize("seconds", [5, -5])
def test_a_clock_that_is_5_s_off_changes_nothing_but_its_offset(run: Path, copy: Path, seconds: int) -> None:
    shift(copy / "rank2.json", seconds * 1_000_000)
    before, after = across(run), across(copy)
    judge(after, copy)
    assert after.ranks[:2] == before.ranks[:2]
    assert after.ranks[2].clock_ns is not None
    assert before.ranks[2].clock_ns is not None
    assert after.ranks[2].clock_ns - before.ranks[2].clock_ns == seconds * 10**9
    assert after.ranks[2].clock_residual_ns == before.ranks[2].clock_residual_ns


def test_groups_without_distinct_names_are_matched_by_end(tmp_path: Path) -> None:
    (folder,) = train(tmp_path, "subgroup")
    result = across(folder)
    assert result.blamed is not None
    assert result.blamed.rank == SLOW
    assert [(each.matched, each.unmatched) for each in result.ranks] == [
        (2 * STEPS, 0),
        (2 * STEPS, 0),
        (STEPS, 0),
    ]
    shift(folder / "rank0.json", 5_000_000)
    moved = across(folder)
    assert [each.matched for each in moved.ranks] == [each.matched for each in result.ranks]


@pytest.fixture
def analyze(capfd: pytest.CaptureFixture[str]) -> Any:
    def command(folder: Path) -> tuple[int, dict[str, Any]]:
        code = main.run_command(["analyze", str(folder), "--json"])
        document: dict[str, Any] = json.loads(capfd.readouterr().out)
        return code, document

    return command


def test_without_one_rank_s_trace_the_others_are_compared(copy: Path, analyze: Any) -> None:
    (copy / "rank0.json").unlink()
    code, document = analyze(copy)
    found = document["across"]
    assert code == 0
    assert (found["missing"], found["slowest"]) == ([0], SLOW)
    assert [each["rank"] for each in found["ranks"]] == [1, 2]


def test_a_truncated_rank_is_compared_as_far_as_it_goes(copy: Path, analyze: Any) -> None:
    file = copy / "rank2.json"
    text = file.read_text()
    spans = [match.start() for match in re.finditer('"gloo:all_reduce"', text)]
    # Events are not in order of time: which are gone is known from the file that is left.
    file.write_text(text[: spans[STEPS // 2]])
    code, document = analyze(copy)
    found = document["across"]
    left = STEPS // 2
    assert code == 0
    assert [(each["matched"], each["unmatched"]) for each in found["ranks"]] == [
        (STEPS, 0),
        (STEPS, 0),
        (left, 0),
    ]
    assert found["slowest"] == SLOW
    judge(across(copy), copy, tolerance=1.0)
