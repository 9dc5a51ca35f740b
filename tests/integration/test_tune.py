"""``torchperfd tune`` with real scripts: what is faster, what fails, and what never ends."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.node import Node, eventually
from tests.support.processes import processes_of, started

from torchperfd_cli.tune.trial import LOADER, OPTIMIZER, THREADS, ZERO_GRAD, Trial, change
from torchperfd_cli.tune.trial_process import ScriptTrials, TrialScript

pytestmark = pytest.mark.timeout(600)  # each run imports torch

SCRIPT = """
import sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Waits(Dataset):
    def __len__(self):
        return 100000
    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.full((16,), index / 1000), index % 2

def main(mode):
    if mode == 'raises':
        raise ValueError('no such data')
    while mode == 'stuck':
        time.sleep(1)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(Waits(), batch_size=4, shuffle=True)
    for number, (inputs, labels) in enumerate(loader):
        if mode == 'short' and number == 2:
            return
        if mode == 'medium' and number == 12:
            return
        optimizer.zero_grad(set_to_none=False)
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        time.sleep(0.01 if mode == 'trains' else 0)
        print('step', number)

if __name__ == '__main__':
    main(sys.argv[1])
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train_waits.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def script(written: Path) -> Iterator[Path]:
    """A script that no process runs any more when a test is over."""
    yield written
    eventually(lambda: not processes_of(written), 20)


def trials(script: Path, mode: str = "trains") -> ScriptTrials:
    return ScriptTrials(TrialScript(str(script), (mode,), False, 0.2, 4, 150.0))


@pytest.fixture
def short_temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give tempfile an empty directory, with a path that leaves room for the name of a socket."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr("tempfile.tempdir", None)
        yield Path(folder)


@pytest.fixture(scope="module")
def measured(written: Path) -> Trial:
    """The script as it is; no test changes what was measured."""
    return trials(written).run(())


def test_trial_finds_what_the_script_is_made_of(script: Path, measured: Trial) -> None:
    facts = measured.facts
    lines = script.read_text().splitlines()

    def line(text: str) -> int:
        return next(number for number, each in enumerate(lines, 1) if text in each)

    (loader,), (optimizer,), (zeroing,) = facts.loaders, facts.optimizers, facts.zeroing
    assert (loader.name, loader.workers) == ("DataLoader", 0)
    assert loader.site is not None
    assert (loader.site.file, loader.site.line) == (str(script), line("loader = DataLoader"))
    assert (optimizer.name, optimizer.can_fuse, optimizer.fused, optimizer.tensors) == (
        "AdamW",
        True,
        None,
        4,
    )
    assert optimizer.site is not None
    assert optimizer.site.line == line("torch.optim.AdamW")
    assert zeroing.line == line("zero_grad")
    assert facts.threads == 1
    assert facts.threads_site is not None
    assert facts.threads_site.line == line("set_num_threads")
    assert measured.phases["data"] >= 0.016
    assert len(measured.losses) >= 4
    assert len(measured.batches) >= 4


def test_trial_with_changes_trains_the_same(script: Path, measured: Trial) -> None:
    changes = [
        change(LOADER, num_workers=2, persistent_workers=True),
        change(OPTIMIZER, fused=True),
        change(ZERO_GRAD, set_to_none=True),
        change(THREADS, threads=2),
    ]
    changed = trials(script).run(changes)
    count = min(len(measured.losses), len(changed.losses))
    assert changed.losses[:count] == pytest.approx(measured.losses[:count], rel=1e-4)
    assert changed.batches[:count] == measured.batches[:count]
    # What the script itself has is recorded, and not what it was changed to.
    assert changed.facts.loaders == measured.facts.loaders
    assert changed.facts.optimizers == measured.facts.optimizers


@pytest.mark.slow
def test_pairs_of_loaders_have_workers_ahead(script: Path, short_temporary: Path) -> None:
    pairs = trials(script).pairs((), [change(LOADER, num_workers=4)])
    found = [next(pairs) for _ in range(3)]
    pairs.close()
    assert [each for each in short_temporary.iterdir() if each.name.startswith(("pymp-", "tune-"))] == []
    # Four items of 4 ms, one after another or side by side.
    assert all(without >= 0.016 for without, _ in found)
    assert sum(with_it < without for without, with_it in found) >= 2


@pytest.mark.slow
def test_pairs_of_short_script_are_runs_of_their_own(script: Path) -> None:
    pairs = trials(script, "medium").pairs((), [change(OPTIMIZER, fused=True)])
    assert all(seconds >= 0.016 for seconds in next(pairs))
    pairs.close()


def tune(node: Node, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return node.command("tune", *arguments, timeout=500)


@pytest.mark.slow
@pytest.mark.serial
def test_tune_of_slow_loader_gives_it_workers(node: Node, script: Path) -> None:
    before = script.read_bytes()
    done = tune(node, "--json", "--seconds", "0.4", "--steps", "4", "--only", "loader", str(script), "trains")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["schema"] == "torchperfd.tune/1"
    loader = next(each for each in found["kept"] if each["target"] == "loader")
    assert loader["values"]["num_workers"] >= 2
    assert loader["losses"] == "equal"
    assert loader["speedup"]["low"] > 1.02
    assert (
        "+    loader = DataLoader(Waits(), batch_size=4, shuffle=True, num_workers=" in found["edits"]["diff"]
    )
    assert script.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "timeout", "code", "expected"),
    [
        ("raises", "150", 1, "the script raised ValueError: no such data at train_waits.py:"),
        ("short", "150", 1, "the script ended after 2 training steps, too few to measure"),
        ("stuck", "6", 124, "0 training steps within 6 s, too few to measure"),
    ],
)
def test_tune_of_script_that_fails_costs_one_line(
    node: Node, script: Path, mode: str, timeout: str, code: int, expected: str
) -> None:
    done = tune(node, "--timeout", timeout, str(script), mode)
    assert done.returncode == code
    assert expected in done.stderr
    # Beside other tests the machine may be busy, which has a line of its own.
    assert len([line for line in done.stderr.splitlines() if "other programs use" not in line]) == 2
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ((), 2, "no script given"),
        (("--no-such-option", "a.py"), 2, "no such option '--no-such-option'; see `torchperfd tune --help`"),
        (("nowhere.py",), 3, "there is no file nowhere.py"),
    ],
)
def test_tune_of_bad_command_line_names_it(
    node: Node, arguments: tuple[str, ...], code: int, expected: str
) -> None:
    done = tune(node, *arguments)
    assert done.returncode == code
    assert expected in done.stderr


@pytest.mark.slow
def test_tune_ctrl_c_leaves_no_process(node: Node, script: Path) -> None:
    process = started(node, script, "tune", str(script), "trains")
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130


@pytest.mark.slow
def test_tune_killed_leaves_no_process(node: Node, script: Path) -> None:
    process = started(node, script, "tune", str(script), "trains")
    process.kill()
    process.communicate(timeout=30)
