"""Questions about all nodes, answered from the series of a real Prometheus as the daemons answer them."""

import json
import logging
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.commands import Run, runner
from tests.support.fleet_series import CASES, SimulatedRun, healthy, one_slow_rank, scrape_config, serving
from tests.support.node import ROOT, Node, eventually, free_port
from tests.support.prometheus import Queried

from torchperfd_daemon.diagnosis.verdict import Cause, Verdict

pytestmark = [pytest.mark.slow, pytest.mark.needs("prometheus")]

RANKS = 64
FEW = 16


class Fleet:
    """The runs, and the Prometheus that has scraped all their nodes."""

    def __init__(self, runs: list[SimulatedRun], url: str, down: str) -> None:
        self.runs = {run.run: run for run in runs}
        self.verdicts: dict[str, Verdict] = {run.run: run.verdict() for run in runs}
        self.url = url
        self.down = down


def simulated() -> list[SimulatedRun]:
    """Return a run of 64 ranks on 8 nodes for the first cause, and smaller ones for the others."""
    sizes = {"slow-node": RANKS}
    runs = [SimulatedRun(name, sizes.get(name, FEW), change, seconds=25) for name, change in CASES.items()]
    runs.append(SimulatedRun("on-device", FEW, one_slow_rank, seconds=25, on_device=True))
    runs.append(SimulatedRun("hang", FEW, healthy, seconds=25))
    runs[-1].hang(14)
    # The run is larger than what the scraped nodes have of it.
    runs.append(SimulatedRun("half", FEW, healthy, world=2 * FEW, seconds=25))
    return runs


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("series")
    logging.getLogger("torchperfd.observer").setLevel(logging.ERROR)
    runs = simulated()
    port, down = free_port(), f"127.0.0.1:{free_port()}"
    with serving() as server:
        server.pages = pages(runs)
        scrape_config(directory / "prometheus.yml", server, 1.0, down)
        prometheus = Queried(
            directory / "prometheus.log",
            port,
            "prometheus",
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
        )
        try:
            count = "count(torchperfd_train_rank_info)"
            ranks = RANKS + (len(runs) - 1) * FEW
            eventually(lambda: prometheus.value(count) == ranks, 30, lambda: str(prometheus.value(count)))
            for run in runs:
                if run.run != "hang":
                    run.train(1)
            server.pages = pages(runs)
            since = time.time()
            steps = f"min(timestamp(torchperfd_train_own_work_seconds)) > {since}"
            eventually(lambda: prometheus.query(steps), 30, lambda: str(prometheus.query(steps)))
            yield Fleet(runs, f"http://127.0.0.1:{port}", down)
        finally:
            prometheus.stop()


def pages(runs: list[SimulatedRun]) -> dict[str, bytes]:
    return {f"/{run.run}-{node}": page for run in runs for node, page in enumerate(run.pages())}


@pytest.fixture
def run(fleet: Fleet, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("TORCHPERFD_SOCKET", "/nonexistent/socket")
    monkeypatch.setenv("TORCHPERFD_PROMETHEUS", fleet.url)
    return runner(capfd)


def documents(run: Run, name: str, key: str, *arguments: str) -> dict[str, Any]:
    code, out, _ = run(name, "--fleet", "--json", *arguments)
    # One target is down, so that every answer is partial.
    assert code == 5
    return {each["run"]: each for each in json.loads(out)[key]}


def place(cause: str, node: str | None, rank: int | None) -> tuple[str, str, int | None]:
    """Return a cause, and where it is: a rank's node follows from the rank."""
    return cause, (node or "") if rank is not None else "", rank


def test_verdicts_from_series_equal_those_of_daemons(fleet: Fleet, run: Run) -> None:
    found = documents(run, "diagnose", "verdicts")
    found_places = {name: place(each["cause"], each["node"], each["rank"]) for name, each in found.items()}
    assert found_places == {
        name: place(verdict.cause.value, verdict.node, verdict.rank)
        for name, verdict in fleet.verdicts.items()
    }
    expected = {
        "healthy": "none",
        "slow-rank": "slow rank",
        "slow-node": "slow rank",
        "input-bound": "input-bound",
        "starved-rank": "input-bound",
        "on-device": "slow rank",
        "hang": "hang",
        "half": "unknown",
    }
    assert {name: each["cause"] for name, each in found.items()} == expected
    for name, verdict in fleet.verdicts.items():
        assert found[name]["cost_seconds_per_step"] == pytest.approx(
            verdict.cost_seconds_per_step, rel=0.1, abs=1e-4
        )
        if verdict.cause not in (Cause.NONE, Cause.UNKNOWN):
            assert (found[name]["phase"] or "") == verdict.phase


def test_a_target_that_is_down_is_named(fleet: Fleet, run: Run) -> None:
    code, out, err = run("diagnose", "--fleet")
    assert code == 5
    assert fleet.down in err
    assert "run slow-node" in out


def test_ranks_from_series_name_the_slow_one(fleet: Fleet, run: Run) -> None:
    found = documents(run, "ranks", "runs")
    assert {name: len(each["ranks"]) for name, each in found.items()} == {
        name: RANKS if name == "slow-node" else FEW for name in fleet.runs
    }
    slow = [rank for rank in found["slow-rank"]["ranks"] if rank["slow"]]
    assert [(rank["rank"], rank["node"], rank["slow"]["phase"]) for rank in slow] == [
        (5, "slow-rank-0", "forward")
    ]
    assert slow[0]["step_seconds"] == pytest.approx(0.13, rel=0.1)
    assert slow[0]["phase_seconds"]["forward"] == pytest.approx(0.06, rel=0.1)
    assert found["on-device"]["timed_on"] == "device"
    # The daemon of the other node leaves the verdict to that of the rank that is waited for.
    states = [rank["state"] for rank in found["hang"]["ranks"] if rank["node"] == "hang-0"]
    assert set(states) == {"stalled"}


def test_top_from_series_shows_verdict_and_ranks(run: Run) -> None:
    found = documents(run, "top", "runs")
    assert found["slow-node"]["verdict"]["cause"] == "slow rank"
    assert len(found["slow-node"]["ranks"]) == RANKS
    code, out, _ = run("top", "--run", "slow-node", "--fleet")
    assert code == 5
    assert "64 of 64 ranks" in out


def test_goodput_from_series_sums_the_nodes(run: Run, fleet: Fleet) -> None:
    code, out, _ = run("goodput", "--run", "slow-node", "--fleet", "--json")
    assert code == 0
    [found] = json.loads(out)["runs"]
    assert found["goodput_ratio"] == pytest.approx(0.9)
    assert len(found["nodes"]) == RANKS // 8
    code, out, _ = run("goodput", "--prometheus", fleet.url)
    assert code == 0
    assert "slow-node: goodput 90.0%" in out


def test_one_run_or_job_is_selected_by_its_series(run: Run) -> None:
    assert list(documents(run, "diagnose", "verdicts", "--run", "slow-r")) == ["slow-rank"]
    assert list(documents(run, "ranks", "runs", "--job", "job-half")) == ["half"]
    code, _, err = run("ranks", "--fleet", "--run", "nothing-like-it")
    assert code == 3
    assert "nothing-like-it" in err


def test_commands_of_the_docs_answer(fleet: Fleet, run: Run) -> None:
    section = (ROOT / "docs" / "fleet.md").read_text().partition("\n## From Prometheus\n")[2]
    lines = section.split("```")[1].strip().splitlines()
    assert lines[0].startswith("export TORCHPERFD_PROMETHEUS=http://")
    for line in lines[1:]:
        program, *arguments = line.replace("--run bert", "--run slow-rank").split()
        code, out, _ = run(*arguments)
        # The goodput is that of all series; the others name the target that is down.
        assert (program, code) == ("torchperfd", 0 if arguments[0] == "goodput" else 5)
        assert "slow-rank" in out


def test_the_page_of_a_daemon_has_all_nodes_from_series(fleet: Fleet) -> None:
    node = Node()
    try:
        node.start_daemon("--prometheus", fleet.url)
        url = f"http://127.0.0.1:{node.metrics_port}/api/v1/runs"
        with urllib.request.urlopen(f"{url}?fleet=1", timeout=30) as answer:
            found = {run["run"]: run for run in json.load(answer)["runs"]}
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert json.load(answer)["runs"] == []
    finally:
        node.close()
    assert found.keys() == fleet.runs.keys()
    assert len(found["slow-node"]["ranks"]) == RANKS
    assert found["slow-node"]["verdict"]["cause"] == "slow rank"
