"""``torchperfd run`` under SIGTERM: the run is reported and kept, and the process dies as it would have."""

import signal
from pathlib import Path

import pytest
from tests.support.node import Node, eventually
from tests.support.processes import processes_of

from torchperfd.launch import script as script_module

pytestmark = pytest.mark.skipif(not script_module.HANDLES_SIGTERM, reason="its C module is not compiled")

TRAINS = """
import os, time, torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(4096, 8), torch.randn(4096, 1))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
number = 0
for epoch in range(10**6):
    for x, y in DataLoader(data, batch_size=4, num_workers=1):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        time.sleep(0.01)
        number += 1
        if number == 20:
            print("trains", flush=True)
            if os.environ.get("RANK") == "1":
                raise ValueError("no such label")
"""
# A system call that begins again after a signal.
STUCK = (
    "import ctypes, os\n"
    "print('trains', flush=True)\n"
    "ctypes.{}(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)\n"
    "print('goes on', flush=True)\n"
)
OWN = (
    "import signal, sys, time\n"
    "print(signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)) == signal.SIG_DFL, flush=True)\n"
    "time.sleep(600)\n"
)
FORKS = (
    "import multiprocessing, time\n"
    "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,))\n"
    "child.start(); child.terminate(); child.join(); print(child.exitcode)\n"
)


def terminate(node: Node, script: Path, *options: str, says: str = "trains") -> tuple[int, str]:
    """Run a script, end it once it has printed a line, and return the status and what was on stderr."""
    with node.train(script=script, options=options) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{says}\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        return process.returncode, errors


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "endless.py"


def test_run_terminated_is_reported_kept_and_killed(node: Node, script: Path) -> None:
    script.write_text(TRAINS)
    status, errors = terminate(node, script)
    assert status == -signal.SIGTERM
    assert "terminated by SIGTERM" in errors
    (run,) = node.json("runs")["runs"]
    assert run["exit_state"] == "terminated"
    assert run["steps"] >= 19
    assert " terminated by SIGTERM\n" in node.command("runs", "show", run["id"]).stdout
    eventually(lambda: not processes_of(script), 20)


@pytest.mark.parametrize(("library", "has_report"), [("CDLL", True), ("PyDLL", False)])
def test_run_terminated_while_stuck_in_c_dies(
    node: Node, script: Path, library: str, has_report: bool
) -> None:
    """Other threads report while a call waits; if it holds the interpreter, only the timer is left."""
    script.write_text(STUCK.format(library))
    status, errors = terminate(node, script, "--no-daemon")
    assert status == -signal.SIGTERM
    assert (
        "SIGTERM ended the script before its first training step" in " ".join(errors.split())
    ) == has_report


def test_run_terminated_with_own_handler_obeys_it(node: Node, script: Path) -> None:
    script.write_text(OWN)
    status, errors = terminate(node, script, "--no-daemon", says="True")
    assert status == 7
    assert "exit code 7" in errors


def test_run_forked_child_is_terminated_at_once(node: Node, script: Path) -> None:
    script.write_text(FORKS)
    done = node.command("run", "--quiet", "--no-daemon", str(script))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{-signal.SIGTERM}\n", "")


def test_run_whose_other_rank_fails_is_kept(node: Node, script: Path) -> None:
    script.write_text(TRAINS)
    with node.train(script=script, ranks=2, options=(), TORCHPERFD_RUN="pair") as process:
        _, errors = process.communicate(timeout=150)
        assert process.returncode == 1
    assert errors.count("── torchperfd · run pair ──") == 1
    (run,) = node.json("runs")["runs"]
    assert (run["exit_state"], run["world_size"]) == ("terminated", 2)
    shown = node.command("runs", "show", "pair").stdout
    assert "terminated by SIGTERM" in shown
