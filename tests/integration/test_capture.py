"""Captures of running jobs: by command, by a script of itself, and by rank 0 of the whole job."""

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from tests.support.node import EXAMPLE, Node, eventually, new_node, side_by_side, torchrun


def test_no_job_at_all_is_exit_3_and_no_daemon_is_exit_4(node: Node) -> None:
    unreachable = node.command("capture")
    assert (unreachable.returncode, unreachable.stderr.count("\n")) == (4, 1)
    node.start_daemon()
    nothing = node.command("capture")
    assert (nothing.returncode, nothing.stderr.count("\n")) == (3, 1)
    assert "no run" in nothing.stderr


def test_a_job_that_makes_no_steps_is_an_error_that_says_so(node: Node, tmp_path: Path) -> None:
    script = tmp_path / "idle.py"
    # A process that imports torch may not answer in time.
    script.write_text("import time, torch\nprint('imported', flush=True)\ntime.sleep(600)\n")
    node.start_daemon()
    with node.train(script=script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "imported\n"
        eventually(lambda: node.metric("torchperfd_clients") == 1, 30, node.log)
        done = node.command("capture", "--timeout", "2", "--json")
        process.kill()
        process.communicate()
    assert done.returncode == 124
    assert "makes no training steps" in done.stderr
    document = json.loads(done.stdout)
    assert document["state"] == "failed"
    assert not list(node.captures.glob("*/rank*.json")) or all(
        path.name.endswith(".manifest.json") for path in node.captures.glob("*/rank*.json")
    )


def test_a_job_that_ends_in_the_middle_says_so(node: Node, tmp_path: Path) -> None:
    script = tmp_path / "short.py"
    script.write_text(_LOOP + "train(40)\n")
    node.start_daemon()
    with node.train(script=script) as process:
        eventually(lambda: (node.metric("torchperfd_train_steps_total{") or 0) > 0, 60, node.log)
        done = node.command("capture", "--steps", "1000")
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    assert done.returncode == 1
    assert re.search(r"training ended (after \d+ of 1000|before the chosen) steps", done.stderr), done.stderr


def test_the_scripts_own_profiler_is_left_alone(node: Node, tmp_path: Path) -> None:
    script = tmp_path / "profiled.py"
    script.write_text(
        _LOOP + "import os, sys\nfrom torch.profiler import profile\nwith profile() as own:\n"
        "    while not os.path.exists(sys.argv[1]):\n        train(1)\n"
        "assert any(event.key == 'aten::addmm' for event in own.key_averages())\n"
    )
    captured = tmp_path / "captured"
    node.start_daemon()
    with node.train(str(captured), script=script) as process:
        eventually(lambda: (node.metric("torchperfd_train_steps_total{") or 0) > 0, 60, node.log)
        done = node.command("capture", "--steps", "2")
        captured.touch()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    assert done.returncode == 1
    assert "own profiler is active" in done.stderr


def captures_itself(with_daemon: bool) -> None:
    with new_node() as node:
        if with_daemon:
            node.start_daemon()
        script = node.directory / "itself.py"
        script.write_text(
            "import torchperfd\nclient = torchperfd.attach()\n" + _LOOP + "train(5)\n"
            "capture = client.capture(steps=5, with_stack=True)\n"
            "while capture.state not in ('complete', 'failed'):\n"
            "    train(1)\n"
            "path = capture.wait(30)\n"
            "print(path, *capture.step_range)\n"
            "print(capture.report())\n"
            "client.detach()\n"
        )
        with node.running(sys.executable, str(script)) as process:
            output, errors = process.communicate(timeout=90)
            assert process.returncode == 0, errors
        path, first, after = output.splitlines()[0].split()
        assert int(after) - int(first) == 5
        assert _steps(json.loads(Path(path).read_text())) == list(range(int(first), int(after)))
        assert "aten::addmm" in output
        (listed,) = node.json("captures", "list")["captures"]
        assert (listed["state"], listed["trigger"]) == ("complete", "script")
        assert listed["step_range"] == [int(first), int(after)]
        if with_daemon:
            series = 'torchperfd_capture_requests_total{result="complete",trigger="script"}'
            eventually(lambda: node.metric(series) == 1, 5, node.log)


def test_a_script_captures_itself_with_and_without_a_daemon() -> None:
    both = side_by_side({"with": partial(captures_itself, True), "without": partial(captures_itself, False)})
    both["with"].result()
    both["without"].result()


@pytest.fixture(scope="module")
def training() -> Iterator[Node]:
    """A node on which the digits example trains. Its tests come last, since it keeps a processor busy."""
    with new_node() as node:
        node.start_daemon()
        with node.train("--epochs", "20000", script=EXAMPLE, TORCHPERFD_RUN="digits") as process:
            eventually(lambda: (node.metric("torchperfd_train_steps_total{") or 0) > 50, 60, node.log)
            yield node
            assert process.poll() is None, "a capture ended the training"
            process.kill()
            process.communicate()


def test_capture_of_running_job_has_exactly_the_agreed_steps(training: Node) -> None:
    document = training.json("capture", "--steps", "5", "--record-shapes")
    assert document["state"] == "complete"
    first, after = document["step_range"]
    assert after - first == 5
    (rank,) = document["ranks"]
    trace = Path(rank["path"])
    content = trace.read_bytes()
    assert hashlib.sha256(content).hexdigest() == rank["sha256"]
    assert len(content) == rank["bytes"]
    assert _steps(json.loads(content)) == list(range(first, after))
    assert sorted(path.name for path in trace.parent.iterdir()) == [
        "manifest.json",
        "rank0.json",
        "rank0.manifest.json",
    ]
    manifest = json.loads((trace.parent / "manifest.json").read_text())
    assert manifest["state"] == "complete"
    assert manifest["step_range"] == [first, after]
    assert manifest["ranks"][0]["sha256"] == rank["sha256"]
    names = {event.get("name") for event in json.loads(content)["traceEvents"]}
    assert {"aten::convolution_backward", "Optimizer.step#AdamW.step"} <= names
    shapes = [event for event in json.loads(content)["traceEvents"] if "Input Dims" in event.get("args", {})]
    assert shapes


def test_captures_in_sequence_are_listed_fetched_and_removed(training: Node, tmp_path: Path) -> None:
    complete = 'torchperfd_capture_requests_total{result="complete",trigger="command"}'
    earlier, captured = listed(training), training.metric(complete) or 0
    ids = [training.json("capture", "--steps", "3", "--run", "digits")["capture_id"] for _ in range(3)]
    assert listed(training) - earlier == set(ids)
    fetched = training.command("captures", "get", ids[0], "--output", str(tmp_path))
    assert fetched.returncode == 0, fetched.stderr
    assert (tmp_path / ids[0] / "rank0.json").stat().st_size > 10_000
    assert training.command("captures", "rm", *ids).returncode == 0
    assert listed(training) == earlier
    assert training.metric(complete) == captured + 3


def listed(node: Node) -> set[str]:
    return {capture["capture_id"] for capture in node.json("captures", "list")["captures"]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--run", "absent"], "no run absent on this node"),
        (["--ranks", "3"], "run digits has no rank 3"),
    ],
)
def test_a_job_that_is_not_there_is_exit_3_and_one_line(
    training: Node, arguments: list[str], words: str
) -> None:
    done = training.command("capture", *arguments)
    assert done.returncode == 3
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


_LOOP = """
import time, torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(64, 32), torch.randint(0, 4, (64,)))
model = torch.nn.Linear(32, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(epochs):
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size=16):
            time.sleep(0.02)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
"""


def _steps(trace: dict[str, Any]) -> list[int]:
    return sorted(
        int(event["name"].removeprefix("ProfilerStep#"))
        for event in trace["traceEvents"]
        if event.get("ph") == "X"
        and event["cat"] == "user_annotation"
        and event["name"].startswith("ProfilerStep#")
    )


SCRIPT: Final = """
import json, threading, time, torch, torch.distributed as dist
import torchperfd
client = torchperfd.attach()
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
while not client.connected:
    time.sleep(0.01)
dist.barrier()
waiting = captured = None
ended = torch.zeros(1)
while not ended:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    ended = torch.tensor([float(waiting is not None and not waiting.is_alive())])
    dist.all_reduce(ended)
    optimizer.step()
    time.sleep(0.005)
    if rank == 0 and waiting is None:
        captured = client.capture(steps=3, ranks="all")
        waiting = threading.Thread(target=captured.wait, args=(120,))
        waiting.start()
if rank == 0:
    paths = {number: str(path) for number, path in captured.paths.items()}
    print(json.dumps([captured.step_range, paths, captured.report().splitlines()[0]]))
else:
    try:
        client.capture(ranks="all")
    except torchperfd.CaptureError as error:
        print(json.dumps(str(error)))
dist.destroy_process_group()
"""


def test_rank_0_captures_the_whole_job_at_the_same_steps(node: Node, tmp_path: Path) -> None:
    script = tmp_path / "ordered.py"
    script.write_text(SCRIPT)
    node.start_daemon()
    job = (
        *torchrun(2),
        str(script),
    )
    with node.running(*job, TORCHPERFD_RUN="ordered") as process:
        output, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
    said = [json.loads(line) for line in output.splitlines()]
    [refused] = [line for line in said if isinstance(line, str)]
    assert refused.startswith("this is rank 1, and only rank 0 captures other ranks; call it there")
    [[steps, paths, report]] = [line for line in said if not isinstance(line, str)]
    assert sorted(paths) == ["0", "1"]
    for path in paths.values():
        found = re.findall(r'"name": "ProfilerStep#(\d+)"', Path(path).read_text())
        assert sorted({int(step) for step in found}) == list(range(*steps))
    assert report
    [listed] = node.json("captures", "list")["captures"]
    assert (listed["state"], listed["trigger"], listed["step_range"]) == ("complete", "script", steps)
