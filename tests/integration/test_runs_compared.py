"""Two short real runs: kept, listed, compared, and one with the other as its baseline."""

import json
import stat
import subprocess
from pathlib import Path

import pytest
from tests.support.node import TRAIN, Node, eventually
from tests.support.run_documents import run_file

TRAINING = (str(TRAIN), "--steps", "50", "--epoch", "50")


def run_until_kept(node: Node, run: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a script until its report is kept: on a busy machine that may take longer than an exit may."""
    for _ in range(5):
        done = node.command("run", "--no-daemon", "--run", run, *arguments)
        assert done.returncode == 0, done.stderr
        if (node.directory / f"state/torchperfd/runs/{run}.json").exists():
            return done
    pytest.fail(f"not kept: {done.stderr}")


@pytest.mark.slow
def test_two_real_runs_are_kept_and_compared(node: Node, tmp_path: Path) -> None:
    first = run_until_kept(node, "first", *TRAINING, "--token", "secret")
    assert "torchperfd runs show first" in first.stderr
    report = tmp_path / "second.json"
    second = run_until_kept(
        node,
        "second",
        *("--quiet", "--report", str(report)),
        # A limit that no machine exceeds: what is asserted is the structure, not a time.
        *("--baseline", "fir", "--fail-above", "100000%", *TRAINING),
    )
    assert "compared with the baseline" in second.stderr

    kept = sorted((node.directory / "state/torchperfd/runs").iterdir())
    assert [file.name for file in kept] == ["first.json", "second.json"]
    assert [stat.S_IMODE(file.stat().st_mode) for file in kept] == [0o600, 0o600]
    assert "secret" not in kept[0].read_text()
    assert json.loads(kept[1].read_text()) == json.loads(report.read_text())

    listed = node.json("runs")
    assert {(each["id"], each["steps"], each["exit_state"]) for each in listed["runs"]} == {
        ("first", 50, "finished"),
        ("second", 50, "finished"),
    }
    for other in ("second", str(report)):
        document = node.json("compare", "first", other)
        assert document["schema"] == "torchperfd.run_comparison/1"
        assert (document["before"]["run"], document["after"]["run"]) == ("first", "second")
        assert {"forward", "backward", "optimizer"} & {each["phase"] for each in document["phases"]}
        assert document["differences"] == []


@pytest.mark.parametrize(("ending", "code"), [("raise SystemExit(0)", 1), ("raise SystemExit(3)", 3)])
def test_gate_that_cannot_judge_fails_unless_the_script_did(
    node: Node, tmp_path: Path, ending: str, code: int
) -> None:
    """The script trains nothing, so there is nothing to compare."""
    script, baseline = tmp_path / "train.py", tmp_path / "main.json"
    script.write_text(f"print('ran')\n{ending}\n")
    baseline.write_text(json.dumps(run_file("main", steps=20, seconds={"forward": 0.01})))
    done = node.command(
        *("run", "--no-daemon", "--no-keep", "--quiet"),
        *("--baseline", str(baseline), "--fail-above", "5%", str(script)),
    )
    assert (done.returncode, done.stdout) == (code, "ran\n")
    assert "no comparison with the baseline" in done.stderr
    assert "it has no training steps" in done.stderr
    assert not (node.directory / "state").exists()


def test_missing_baseline_ends_before_the_script_begins(node: Node, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('ran')")
    done = node.command("run", "--no-daemon", "--baseline", "nosuch", str(script))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "torchperfd: --baseline: no kept run nosuch; `torchperfd runs` lists them\n"


def test_unwritable_directory_of_runs_harms_nothing(node: Node, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('ran')")
    (tmp_path / "file").touch()
    done = node.command("run", "--no-daemon", "--runs-dir", str(tmp_path / "file" / "runs"), str(script))
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "kept    not: " in done.stderr


WAITING_SCRIPT = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

ITEM_SECONDS = 0.004


class Items(Dataset):
    def __len__(self):
        return 8 * 160

    def __getitem__(self, index):
        time.sleep(ITEM_SECONDS)
        return torch.randn(64), index % 8


torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    for inputs, labels in DataLoader(Items(), batch_size=8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
"""


@pytest.mark.slow
def test_faster_loader_is_compared_with_its_promise(node: Node, tmp_path: Path) -> None:
    """A run waits for its data; items of the next take a quarter of the time; the third changes nothing."""
    script = tmp_path / "train.py"
    script.write_text(WAITING_SCRIPT)
    first = node.command("run", "--name", "first", str(script), timeout=300)
    assert "your change" not in first.stderr
    promised = json.loads((node.directory / "state/torchperfd/runs/first.json").read_text())["verdict"]
    assert promised["cause"] == "input-bound"
    script.write_text(WAITING_SCRIPT.replace("0.004", "0.001"))
    node.start_daemon()
    second = node.command("run", "--name", "second", str(script), "--lr", "1", timeout=300)
    assert "  done  your change: \N{MINUS SIGN}" in second.stderr, second.stderr

    def finished() -> list[str]:
        rows = json.loads(node.get("/api/v1/runs")[1])["finished"]
        return [row["outcome"] for row in rows if row["run"] == "second"]

    eventually(lambda: finished() and finished()[0].startswith("your change: "), 60)
    node.command("run", "--name", "third", str(script), "--lr", "1", timeout=300)
    listed = {each["id"]: each["promise"] for each in node.json("runs")["runs"]}
    assert listed["first"] is None
    assert (listed["second"]["run"], listed["second"]["state"]) == ("first", "changed")
    assert listed["second"]["ratio"] + listed["second"]["ratio_margin"] < -0.3
    assert (listed["third"]["run"], listed["third"]["state"]) == ("second", "unchanged")
    assert "no change since second" in node.command("runs", "show", "third").stdout
