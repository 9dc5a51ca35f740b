"""What a daemon and the commands make of series: answers kept for a while, and which source is asked."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.commands import Run, runner
from tests.support.node import free_port
from tests.unit.daemon.fleet_nodes import asking, may_all, start_node
from tests.unit.daemon.test_series_store import answering, vector

from torchperfd.v1 import control_pb2, fleet_pb2
from torchperfd_daemon.fleet.series_peers import SeriesPeers
from torchperfd_daemon.fleet.series_reader import MAX_AGE_S, SeriesReader
from torchperfd_daemon.fleet.series_store import SeriesStore, StoreSettings, Vector
from torchperfd_daemon.fleet.series_view import SeriesView

OF_RUN = {"run": "far", "instance": "n1:9407", "node": "n1", "job_name": "nightly"}


class Stored(SeriesStore):
    """A store that has one rank of a run, and counts the times that it is asked for it."""

    def __init__(self) -> None:
        super().__init__(StoreSettings("http://127.0.0.1:9"))
        self.asked = 0
        self.sees_waits = True

    def query_all(self, expressions: Sequence[str]) -> list[Vector]:
        return [*map(self.query, expressions)]

    def query(self, expression: str) -> Vector:
        of_rank = {"run": "far", "instance": "n1:9407", "rank": "0"}
        if expression.startswith("count by (cluster"):
            self.asked += 1
            return Vector([(OF_RUN, 1.0)])
        values: dict[str, tuple[dict[str, str], float]] = {
            "own_work_seconds{": (of_rank, 0.08),
            **({"peer_wait_seconds{": (of_rank, 0.02)} if self.sees_waits else {}),
            "world_size{": (of_rank, 2.0),
            "train_steps_total{": (of_rank, 70.0),
            "train_verdict{": ({**OF_RUN, "cause": "unknown"}, 1.0),
            "unseen_ranks{": (OF_RUN, 1.0),
        }
        return Vector([row for name, row in values.items() if name in expression])


@pytest.fixture
def kept() -> tuple[Stored, SeriesView, list[float]]:
    now = [0.0]
    stored = Stored()
    return stored, SeriesView(SeriesReader(stored, lambda: now[0])), now


def test_answers_serve_again_until_they_are_old(kept: tuple[Stored, SeriesView, list[float]]) -> None:
    stored, view, now = kept
    view.GetSteps(control_pb2.GetStepsRequest())
    view.Diagnose(control_pb2.DiagnoseRequest())
    assert stored.asked == 1
    view.Diagnose(control_pb2.DiagnoseRequest(run="far"))
    assert stored.asked == 2
    now[0] = MAX_AGE_S
    view.Diagnose(control_pb2.DiagnoseRequest())
    assert stored.asked == 3


def test_rank_has_its_mean_step_and_the_run_its_missing_rank(
    kept: tuple[Stored, SeriesView, list[float]],
) -> None:
    _, view, _ = kept
    [steps] = view.GetSteps(control_pb2.GetStepsRequest()).ranks
    assert (steps.status.identity.node, steps.status.steps, steps.count) == ("n1", 70, 1)
    assert steps.status.step_seconds == pytest.approx(0.1)
    [verdict] = view.Diagnose(control_pb2.DiagnoseRequest()).verdicts
    assert (verdict.cause, verdict.unseen_ranks) == ("unknown", 1)


def test_rank_without_seen_waits_has_no_wait(kept: tuple[Stored, SeriesView, list[float]]) -> None:
    stored, view, _ = kept
    stored.sees_waits = False
    [steps] = view.GetSteps(control_pb2.GetStepsRequest()).ranks
    assert [column.phase for column in steps.phases] == ["own work"]
    assert steps.status.step_seconds == pytest.approx(0.08)


def own(*runs: str) -> list[control_pb2.Run]:
    return [control_pb2.Run(run=run) for run in runs]


async def test_daemon_has_runs_of_series_and_its_own(
    tmp_path: Path, kept: tuple[Stored, SeriesView, list[float]]
) -> None:
    async with asking(tmp_path, []) as (live, _):
        answer = await SeriesPeers(live, kept[1]).runs(own("far", "young"), may_all)
    assert [(run.run, len(run.ranks)) for run in answer.runs] == [("far", 1), ("young", 0)]
    assert [node.node for node in answer.nodes] == ["n1"]


async def test_daemon_asks_peers_for_its_own_run_only(
    tmp_path: Path, kept: tuple[Stored, SeriesView, list[float]]
) -> None:
    node = await start_node(tmp_path, [0], 2)
    try:
        async with asking(tmp_path, [node.address]) as (live, _):
            peers = SeriesPeers(live, kept[1])
            mine = fleet_pb2.NodeSurvey(ranks=[control_pb2.RankSteps()])
            asked = fleet_pb2.NodeSurveyRequest(run="job")
            assert [each.node for each in (await peers.steps(asked, mine, may_all)).nodes][1:] == ["node0"]
            asked = fleet_pb2.NodeSurveyRequest(run="far", verdicts=True)
            bare = fleet_pb2.NodeSurvey()
            assert [each.node for each in (await peers.steps(asked, bare, may_all)).nodes] == ["n1"]
            found = await peers.diagnose(asked, bare, lambda *_: None, may_all)
            assert [each.run for each in found.verdicts] == ["far"]
            assert kept[0].asked
    finally:
        await node.server.stop(None)


async def test_daemon_asks_peers_while_the_store_is_unreachable(tmp_path: Path) -> None:
    gone = SeriesView(SeriesReader(SeriesStore(StoreSettings(f"http://127.0.0.1:{free_port()}"))))
    node = await start_node(tmp_path, [0], 1)
    try:
        async with asking(tmp_path, [node.address]) as (live, _):
            assert [run.run for run in (await SeriesPeers(live, gone).runs([], may_all)).runs] == ["job"]
    finally:
        await node.server.stop(None)


# Which source a command asks


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("TORCHPERFD_SOCKET", str(tmp_path / "no.sock"))
    return runner(capfd)


def test_command_without_fleet_asks_the_daemon(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHPERFD_PROMETHEUS", "http://127.0.0.1:9")
    code, _, err = run("diagnose")
    assert code == 4
    assert "no.sock" in err


def test_command_takes_the_store_of_its_configuration(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with answering(vector()) as (port, seen):
        config = tmp_path / "config.toml"
        config.write_text(f'prometheus = "http://127.0.0.1:{port}"\n')
        monkeypatch.setenv("TORCHPERFD_CONFIG", str(config))
        code, _, err = run("ranks", "--fleet")
    assert seen
    assert (code, f"127.0.0.1:{port}" in err) == (3, True)


def test_command_with_a_wrong_store_exits_with_its_code(run: Run) -> None:
    assert run("diagnose", "--prometheus", f"http://127.0.0.1:{free_port()}")[0] == 4
    assert run("top", "--prometheus", "prometheus:9090")[0] == 2
    assert run("goodput", "--fleet")[0] == 2
    with answering(b"<html>") as (port, _):
        assert run("ranks", "--prometheus", f"http://127.0.0.1:{port}")[0] == 1


def test_secret_for_the_service_only_leaves_it_to_the_daemon(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHPERFD_PROMETHEUS", "https://127.0.0.1:9")
    monkeypatch.setenv("TORCHPERFD_PROMETHEUS_SECRET_FILE", str(tmp_path / "none"))
    code, _, err = run("diagnose", "--fleet")
    assert (code, "no.sock" in err) == (4, True)
