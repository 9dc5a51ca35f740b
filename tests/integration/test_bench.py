"""``torchperfd bench`` with real code: of a script, of a module, and what raises, hangs or never ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.node import Node, eventually
from tests.support.processes import processes_of, started

SCRIPT = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

class Waits(Dataset):
    '''Each item waits, as one read from a disk does.'''
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((16,), float(index)), index

def waits():
    print('making it')
    return DataLoader(Waits(), batch_size=8)

def with_step():
    return waits(), lambda batch: time.sleep(0.004)

loader = DataLoader(Waits(), batch_size=8)

def raises():
    with open('/nonexistent/list.txt') as file:
        return file

class Broken(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        raise ValueError(f'no sample {index}')

def broken():
    return DataLoader(Broken(), batch_size=8)

class DeadlocksInWorkers(Waits):
    def __getitem__(self, index):
        while get_worker_info() is not None:
            time.sleep(60)
        return super().__getitem__(index)

def deadlocks():
    return DataLoader(DeadlocksInWorkers(), batch_size=8)

class Stuck(Waits):
    def __getitem__(self, index):
        time.sleep(600)

def stuck():
    return DataLoader(Stuck(), batch_size=8)

def never_made():
    time.sleep(600)

class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(4)

def endless():
    return DataLoader(Endless(), batch_size=4)

class Dies(Waits):
    def __getitem__(self, index):
        os._exit(3)

def dies():
    return DataLoader(Dies(), batch_size=8)

def no_loader():
    return [1, 2, 3]

if __name__ == '__main__':
    sys.exit('the script must not run')
"""

FUNCTIONS = """
import time

def make(size):
    return list(range(size))

def slow(numbers):
    time.sleep(0.004)

def fast(numbers):
    time.sleep(0.001)

def counts(size):
    return sum(range(size))

def loops(size):
    total = 0
    for number in range(size):
        total += number
        total -= 0
    return total

def broken(size):
    return {}['weight']

def stuck(size):
    time.sleep(600)
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "train_waits.py"
    path.write_text(SCRIPT)
    yield path
    eventually(lambda: not processes_of(path), 10)


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def bench(node: Node, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return node.command("bench", *arguments)


def document(node: Node, *arguments: str) -> dict[str, Any]:
    done = bench(node, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.serial
def test_loader_that_waits_gets_workers(node: Node, script: Path) -> None:
    found = document(node, "dataloader", f"{script}:waits", "--seconds", "0.2")
    assert found["schema"] == "torchperfd.bench_dataloader/1"
    assert found["recommended"]["workers"] >= 2
    assert found["gain_ratio"] > 1.5
    assert found["current"] == {
        "workers": 0,
        "batch_size": 8,
        "prefetch": 0,
        "pin_memory": False,
        "start_method": "",
        "threads": 0,
    }
    assert {each["batch_size"] for each in found["settings"]} == {8}


@pytest.mark.slow
@pytest.mark.serial
def test_table_shows_the_setting_to_write(node: Node, script: Path) -> None:
    done = bench(node, "dataloader", f"{script}:loader", "--seconds", "0.1", "--max-workers", "2")
    assert done.returncode == 0, done.stderr
    assert "recommended  DataLoader(..., num_workers=2" in done.stdout
    assert "the loader's own" in done.stdout


def test_module_is_found_from_the_working_directory(node: Node, script: Path) -> None:
    command = [sys.executable, "-m", "torchperfd", "bench", "dataloader", "train_waits:waits"]
    command += ["--seconds", "0.05", "--max-workers", "1", "--json"]
    done = subprocess.run(
        command, env=node.env, cwd=script.parent, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["is_complete"]


@pytest.mark.slow
@pytest.mark.serial
def test_step_gives_a_ceiling_near_its_own_length(node: Node, script: Path) -> None:
    found = document(node, "dataloader", f"{script}:with_step", "--seconds", "0.3")
    assert found["rest_seconds"] >= 0.004
    # A step that sleeps needs no caches, and what torch's steps need of them is subtracted.
    assert found["predicted_rest_seconds"] >= 0.001
    own = next(each for each in found["settings"] if each["workers"] == 0)
    # 8 items of 2 ms, then 4 ms.
    assert own["speed"]["batch_seconds"] >= 0.020
    assert own["speed"]["wait_seconds"] >= 0.016


@pytest.mark.slow
def test_batch_sizes_and_start_methods_are_tried_on_request(node: Node, script: Path) -> None:
    options = ("--batch-sizes", "4,16", "--start-methods", "spawn", "--max-workers", "2", "--seconds", "0.05")
    found = document(node, "dataloader", f"{script}:waits", *options)
    assert {each["batch_size"] for each in found["settings"]} == {4, 8, 16}
    spawned = [each for each in found["settings"] if each["start_method"] == "spawn"]
    assert spawned
    assert all(each["speed"] for each in spawned)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code", "expected"),
    [
        ("raises", 1, "gave no loader: FileNotFoundError: [Errno 2] No such file or directory"),
        ("no_loader", 3, "it gives a list; have it return a DataLoader"),
        ("nothing", 3, "has no nothing"),
        ("broken", 1, "gave no batch: ValueError: no sample 0 at train_waits.py:"),
        ("dies", 1, "gave no batch: its process ended without an answer"),
        ("stuck", 1, "gave no batch: no answer within"),
        ("never_made", 1, "gave no loader: no answer within"),
    ],
)
def test_loader_that_fails_costs_one_line(
    node: Node, script: Path, name: str, code: int, expected: str
) -> None:
    began = time.monotonic()
    done = bench(node, "dataloader", f"{script}:{name}", "--timeout", "8", "--seconds", "0.05")
    assert done.returncode == code
    assert expected in done.stderr
    # Beside other tests the machine may be busy, which has a line of its own.
    ours = [line for line in done.stderr.splitlines() if line.startswith("torchperfd:")]
    assert len([line for line in ours if "other programs use" not in line]) == 1
    assert done.stdout == ""
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("target", "expected"),
    [("nowhere.py:loader", "there is no file nowhere.py"), ("no_such_module:loader", "there is no module")],
)
def test_target_that_does_not_exist_is_exit_code_3(node: Node, target: str, expected: str) -> None:
    done = bench(node, "dataloader", target)
    assert done.returncode == 3
    assert expected in done.stderr


@pytest.mark.serial
def test_loader_that_deadlocks_with_workers_stays_without(node: Node, script: Path) -> None:
    found = document(node, "dataloader", f"{script}:deadlocks", "--timeout", "8", "--seconds", "0.1")
    assert found["recommended"]["workers"] == 0
    with_workers = [each for each in found["settings"] if each["workers"]]
    assert [each["speed"] for each in with_workers] == [None]
    assert with_workers[0]["unusable"].startswith("no answer within")


@pytest.mark.slow
def test_loader_that_never_ends_is_measured(node: Node, script: Path) -> None:
    found = document(node, "dataloader", f"{script}:endless", "--seconds", "0.05", "--max-workers", "1")
    assert found["is_complete"]
    assert found["recommended"] is not None


@pytest.mark.serial
def test_ctrl_c_ends_it_with_its_workers(node: Node, script: Path) -> None:
    process = started(node, script, "bench", "dataloader", f"{script}:waits", "--seconds", "30")
    time.sleep(4)  # until it is in the first measurement, which takes 30 s
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "interrupted" in out


def test_kill_of_the_command_leaves_no_process(node: Node, script: Path) -> None:
    process = started(node, script, "bench", "dataloader", f"{script}:waits", "--seconds", "30")
    process.kill()
    process.communicate(timeout=10)
    eventually(lambda: not processes_of(script), 10)


def test_functions_are_compared_row_by_row(node: Node, functions: Path) -> None:
    targets = [f"{functions}:slow", f"{functions}:fast"]
    options = ["--setup", f"{functions}:make", "-p", "size=10,100", "--seconds", "0.05", "--rounds", "3"]
    found = document(node, "compare", *targets, *options)
    assert [row["parameters"] for row in found["rows"]] == [{"size": 10}, {"size": 100}]
    for row in found["rows"]:
        slow, fast = row["functions"]
        assert slow["seconds"] >= 0.004
        assert fast["beside_first"]["high"] < 0.6
        assert len(fast["rounds_seconds"]) == 3


@pytest.mark.slow
def test_table_is_that_of_torch(node: Node, functions: Path) -> None:
    targets = [f"{functions}:loops", f"{functions}:counts"]
    options = ["-p", "size=2000,20000", "--threads", "1,2", "--seconds", "0.02", "--rounds", "3"]
    done = bench(node, "compare", *targets, *options)
    assert done.returncode == 0, done.stderr
    assert "|  loops" in done.stdout
    assert "2 threads: -" in done.stdout
    assert "size=20000, threads=2\n  counts: " in done.stdout
    assert "times as fast as loops (95 %: " in done.stdout


@pytest.mark.slow
def test_function_that_is_slower_fails_the_command(node: Node, functions: Path) -> None:
    targets = [f"{functions}:counts", f"{functions}:loops"]
    options = ["-p", "size=20000", "--seconds", "0.02", "--rounds", "3", "--fail-above"]
    done = bench(node, "compare", *targets, *options, "5%")
    assert done.returncode == 7
    assert "beyond the limit of 5.0%: loops takes" in done.stderr
    assert bench(node, "compare", *targets, *options, "10000%").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "code", "expected"),
    [
        ("broken", 1, "broken(size=1) failed: KeyError: 'weight' at functions.py:"),
        ("stuck", 1, "stuck(size=1) could not be timed: no answer within"),
        ("nothing", 3, "has no nothing"),
    ],
)
def test_function_that_fails_costs_one_line(
    node: Node, functions: Path, target: str, code: int, expected: str
) -> None:
    targets = [f"{functions}:counts", f"{functions}:{target}"]
    done = bench(node, "compare", *targets, "-p", "size=1", "--seconds", "0.02", "--timeout", "8")
    assert done.returncode == code
    assert expected in done.stderr


@pytest.mark.serial
def test_client_bench_counts_no_step(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "trains.py"
    path.write_text(
        "import json, time, torch, torchperfd\n"
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Waits(Dataset):\n"
        "    def __len__(self): return 64\n"
        "    def __getitem__(self, index):\n"
        "        time.sleep(0.002)\n"
        "        return torch.full((16,), float(index))\n"
        "client = torchperfd.attach()\n"
        "model = torch.nn.Linear(16, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "loader = DataLoader(Waits(), batch_size=8)\n"
        "def train():\n"
        "    for batch in loader:\n"
        "        optimizer.zero_grad()\n"
        "        model(batch).mean().backward()\n"
        "        optimizer.step()\n"
        "train()\n"
        "before = client.report().to_dict()['train']['steps']\n"
        "found = client.bench(loader, seconds=0.1, max_workers=2)\n"
        "train()\n"
        "after = client.report().to_dict()['train']['steps']\n"
        "print(json.dumps([before, after, found.to_dict()]))\n"
    )
    done = subprocess.run(
        [sys.executable, str(path)], env=node.env, capture_output=True, text=True, check=True, timeout=120
    )
    before, after, found = json.loads(done.stdout.splitlines()[-1])
    assert (before, after) == (8, 16)
    assert found["recommended"]["workers"] >= 1
    assert found["target"] == "Waits"
    assert 0 < found["rest_seconds"] < 0.1
