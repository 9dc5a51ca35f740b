"""The number of workers that a real run is advised: in card, trace line, analysis, page, record and tune."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.steady_advice import SCRIPT
from benchmarks.steady_advice import advised as advised_in
from tests.support.node import Node, eventually, import_path, new_node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WITHIN_S = 240
LAUNCHER = """
import sys
from torchperfd.launch import additions, runner
additions.LOOK_EVERY_S, additions._CUDA_DRIVER = 2.0, "/nowhere"
runner.main(sys.argv[1:])
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with new_node() as node:
        del node.env["TORCHPERFD_NO_ADVISE"]
        node.env["PYTHONPATH"] = import_path()
        node.env["TORCHPERFD_RUNS_DIR"] = str(tmp_path / "runs")
        (tmp_path / "launcher.py").write_text(LAUNCHER)
        (tmp_path / "train.py").write_text(SCRIPT)
        yield node


def test_real_run_is_advised_one_number_everywhere(node: Node, tmp_path: Path) -> None:
    script, stop = str(tmp_path / "train.py"), tmp_path / "stop"
    # A run's name makes its report a kept one.
    words = [sys.executable, str(tmp_path / "launcher.py"), "--run", "one", script, str(stop)]
    shown: list[str] = []
    with node.running(*words) as process:
        eventually(lambda: [*node.captures.glob("2*/analysis.json")], WITHIN_S)
        for _ in range(5):
            shown.append(node.command("diagnose").stdout)
        stop.touch()
        _, errors = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, errors
    [advised] = advised_in(" ".join(errors.split())) or ["none"]
    for live in shown:
        assert advised_in(live) <= {advised}
    trace = " ".join(errors.split()).partition("that the run captured by itself: ")[2]
    assert f"num_workers={advised}," in trace

    [capture] = [path.parent.name for path in node.captures.glob("2*/analysis.json")]
    page = tmp_path / "page.html"
    assert advised_in(node.command("analyze", capture).stdout) == {advised}
    node.command("analyze", capture, "--html", str(page))
    assert advised_in(page.read_text()) == {advised}

    kept = json.loads(node.command("runs", "show", "one", "--json").stdout)
    assert advised_in(kept["verdict"]["fix"]) == {advised}
    assert kept["loader_advice"]["advice"]["workers"] == int(advised)

    stop.unlink()
    options = ("--only", "loader", "--seconds", "0.3", "--limit", "25", "--json")
    tuned = node.command("tune", *options, script, str(stop), timeout=WITHIN_S)
    found = json.loads(tuned.stdout)
    assert (found["advised_by"], found["advised_workers"]) == ("one", int(advised))
