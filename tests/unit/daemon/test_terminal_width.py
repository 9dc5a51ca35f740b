"""Every list and table fits a terminal of 80 columns with long names; in a pipe, nothing is cut."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.run_documents import run_file
from tests.support.terminal import Stdout
from tests.unit.daemon.live_runs import train

from torchperfd.document import terminal
from torchperfd.document.blocks import Block, Document, Sentences
from torchperfd.document.tables import Table
from torchperfd.report.store import RunStore
from torchperfd.v1 import control_pb2
from torchperfd_cli import main
from torchperfd_cli.commands._output import fitted_phases
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.destination import write_upload_marker
from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState, RankTrace
from torchperfd_daemon.doctor import Finding
from torchperfd_daemon.goodput.totals import Bucket, RankGoodput, RunGoodput
from torchperfd_daemon.service import node_survey, translate_diagnosis
from torchperfd_daemon.stacks.model import Frame, Outcome, RankStacks, Thread
from torchperfd_daemon.store.store import Store

RUN = "train_remote_digits_of_everyone-5f1bf50a-7c1e"
OTHER = "train_remote_digits_of_everyone-77aa03b2-1d9f"
HOSTS = "gpu-cluster-eu-west-1-node-00{}.internal.example.com"
SCRIPT = "train_remote_digits_of_everyone_with_every_augmentation_there_is.py"
CAPTURES = ("20261127-165610-645ff7", "20261127-165810-0a5ff7")
COLUMNS = 80


class FakeDaemon:
    """A daemon with prepared answers, of a node or of a fleet."""

    def __init__(self) -> None:
        store = Store()
        for run in (RUN, OTHER):
            train(store, "one straggler", run, node=HOSTS)
        self._ranks = list(node_survey.newest_steps(store, control_pb2.GetStepsRequest()).ranks)

    def _nodes(self, request: Any) -> list[control_pb2.FleetNode]:
        names = "ab" if request.fleet else ""
        return [control_pb2.FleetNode(node=HOSTS.format(name)) for name in names]

    def GetInfo(self, request: Any, timeout: float) -> control_pb2.GetInfoResponse:  # noqa: N802
        return control_pb2.GetInfoResponse(node=HOSTS.format("a"))

    def ListRuns(self, request: Any, timeout: float) -> control_pb2.ListRunsResponse:  # noqa: N802
        runs = [
            control_pb2.Run(
                run=run,
                world_size=4,
                ranks=[each.status for each in self._ranks if each.status.identity.run == run],
            )
            for run in (RUN, OTHER)
        ]
        return control_pb2.ListRunsResponse(runs=runs, nodes=self._nodes(request))

    def GetSteps(self, request: Any, timeout: float) -> control_pb2.GetStepsResponse:  # noqa: N802
        ranks = [
            each
            for each in self._ranks
            if request.run in ("", each.status.identity.run)
            and (not request.ranks or each.status.identity.rank in request.ranks)
        ]
        return control_pb2.GetStepsResponse(ranks=ranks, nodes=self._nodes(request))

    def Diagnose(self, request: Any, timeout: float) -> control_pb2.DiagnoseResponse:  # noqa: N802
        verdict = control_pb2.Verdict(
            cause="slow rank",
            run=RUN,
            rank=2,
            node=HOSTS.format("b"),
            summary=f"slow rank · rank 2 on {HOSTS.format('b')} · 20 ms of each 64 ms step",
            evidence="own work of rank 2 is 62 ms, that of its peers 42 ms",
            cost_seconds_per_step=0.02,
            step_seconds=0.064,
            fix=f"give the rank as much work as its peers, in {SCRIPT}",
            next_command=f"torchperfd capture --run {RUN} --steps 5",
        )
        return control_pb2.DiagnoseResponse(verdicts=[verdict], nodes=self._nodes(request))

    def GetGoodput(self, request: Any, timeout: float) -> control_pb2.GetGoodputResponse:  # noqa: N802
        seconds = {bucket: 1000.0 * number for number, bucket in enumerate(Bucket)}
        ranks = [RankGoodput(rank, 1e9, 1e9 + 9e4, 2, 1, True, seconds) for rank in range(2)]
        return control_pb2.GetGoodputResponse(
            runs=[translate_diagnosis.run_goodput_to_message(RunGoodput(RUN, ranks))]
        )

    def Stacks(self, request: Any, timeout: float) -> Iterator[control_pb2.RankStacks]:  # noqa: N802
        for rank in range(4):
            code = Frame(f"/home/everyone/{SCRIPT[-20:]}", 41 + rank, f"forward_of_a_long_name_{rank}")
            stacks = RankStacks(
                rank,
                node=HOSTS.format("ab"[rank // 2]),
                pid=400 + rank,
                outcome=Outcome.ANSWERED,
                world_size=4,
                phase="forward",
                step=100 + rank,
                threads=(Thread(1, "MainThread", True, False, (code,)),),
            )
            yield translate_diagnosis.rank_stacks_to_message(RUN, None, stacks)


def keep_runs(directory: Path) -> None:
    store = RunStore(str(directory))
    outcome = {"run": RUN, "state": "changed", "fix": "n" * 60, "ratio": -0.41, "promised_ratio": -0.46}
    for run, promise in ((RUN, None), (OTHER, outcome)):
        document = run_file(run, steps=600, seconds={"data": 0.1, "forward": 1.0})
        store.keep(document | {"script": SCRIPT, "host": HOSTS.format("a"), "promise": promise})


def keep_captures(directory: Path, *, uploads: bool) -> None:
    catalog = Catalog(directory)
    for capture_id, run in zip(CAPTURES, (RUN, OTHER), strict=True):
        catalog.create(capture_id)
        ranks = [RankTrace(n, CaptureState.COMPLETE, "", f"rank{n}.json", 700_000_000, "ab") for n in (0, 1)]
        catalog.save(
            CaptureRecord(
                capture_id=capture_id,
                run=run,
                trigger="command",
                state=CaptureState.COMPLETE,
                requested_at=1_790_000_000.0,
                step_range=(120_000, 120_005),
                ranks=ranks,
            )
        )
        catalog.pin(capture_id)
    if uploads:
        write_upload_marker(directory, (directory.parent / "share").as_uri())


Render = Callable[..., str]


@pytest.fixture
def render(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Render:
    """Run a command with stdout on a terminal of 80 columns, or in a pipe; return what it prints."""
    keep_runs(tmp_path / "runs")
    monkeypatch.setenv("TORCHPERFD_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("TORCHPERFD_CAPTURES_DIR", str(tmp_path / "captures"))
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("NO_COLOR", "1")
    # The commands' modules are imported before the one that they import from is changed.
    for name in ("diagnose", "goodput", "ps", "steps", "whatif", "_daemon"):
        monkeypatch.setattr(
            f"torchperfd_cli.commands.{name}.connect", lambda _: contextlib.nullcontext(FakeDaemon())
        )
    finding = Finding("ranks", f"rank 2 of {RUN}", f"has 2 CPUs on {HOSTS}", "its loader waits", "taskset -a")
    monkeypatch.setattr("torchperfd_cli.commands.doctor.doctor.examine", lambda _: [finding])

    def call(arguments: Sequence[str], *, is_terminal: bool) -> str:
        if arguments[0] == "captures":
            captures = tmp_path / f"captures{is_terminal}{arguments[-1]}"
            keep_captures(captures, uploads="uploads" in arguments)
            arguments = ["captures", "--captures-dir", str(captures), "list"]
        out = Stdout(is_terminal)
        with monkeypatch.context() as context:
            context.setattr(sys, "stdout", out)
            assert main.run_command(list(arguments)) in (0, 1)
        return out.getvalue()

    return call


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["ps"], [RUN, OTHER]),
        (["ps", "--fleet"], [RUN, OTHER, HOSTS.format("a"), HOSTS.format("b")]),
        (["ranks"], [RUN, OTHER, HOSTS.format("a")]),
        (["ranks", "--fleet"], [RUN, HOSTS.format("a"), HOSTS.format("b")]),
        (["steps", "--rank", "2", "--run", RUN], []),
        (["diagnose"], [RUN, HOSTS.format("b")]),
        (["diagnose", "--fleet"], [RUN, HOSTS.format("b")]),
        (["whatif"], [RUN, OTHER]),
        (["goodput"], [RUN]),
        (["stacks"], [RUN]),
        (["stacks", "--fleet"], [RUN]),
        (["captures", "list"], [RUN, OTHER, *CAPTURES]),
        (["captures", "list", "uploads"], [RUN, OTHER, *CAPTURES]),
        (["runs"], [RUN, OTHER]),
        (["runs", "show", RUN], [RUN, SCRIPT]),
        (["doctor"], [RUN]),
        (["explain"], ["input-bound"]),
    ],
    ids=" ".join,
)
def test_tables_fit_80_columns_and_keep_names_whole(
    render: Render, arguments: list[str], names: list[str]
) -> None:
    shown, piped = (render(arguments, is_terminal=is_terminal) for is_terminal in (True, False))
    assert [line for line in shown.splitlines() if len(line) > COLUMNS] == []
    for name in names:
        assert name in shown, shown
        assert name in piped, piped
    assert "…" not in piped
    if arguments == ["runs"]:
        assert SCRIPT in piped
    # What is folded on a terminal has the words of the pipe.
    if arguments[0] in ("doctor", "goodput", "stacks"):
        assert shown.split() == piped.split()


@pytest.mark.parametrize("name", ["ps", "ranks", "diagnose", "whatif", "goodput", "stacks", "runs", "doctor"])
def test_json_is_never_folded(render: Render, name: str) -> None:
    [line] = render([name, "--json"], is_terminal=True).splitlines()
    assert json.loads(line)["schema"].startswith("torchperfd.")


def drawn(block: Block, columns: int | None = 24) -> list[str]:
    return terminal.render(Document([[block]]), terminal.Page(columns)).splitlines()


def test_table_lifts_names_to_where_they_change() -> None:
    rows = [["a-long-name", "0", "training"], ["a-long-name", "1", "stalled"], ["b", "0", "training"]]
    assert drawn(Table(["RUN", "RANK", "STATE"], rows, left=("STATE",), lift=("RUN",))) == [
        *("RANK  STATE", "run a-long-name", "   0  training", "   1  stalled"),
        *("run b", "   0  training"),
    ]


def test_table_shortens_before_it_lifts() -> None:
    rows = [["1", "scripts/of/everyone/train.py"]]
    assert drawn(Table(["ID", "SCRIPT"], rows, left=("SCRIPT",), shorten="SCRIPT", lift=("ID",))) == [
        "ID  SCRIPT",
        " 1  scripts/of…/train.py",
    ]


def test_table_folds_at_words() -> None:
    rows = [["  of it, waiting for data", "2 ms"], ["saving", "1 ms"]]
    assert drawn(Table(["WITHOUT", "GAIN"], rows, left=("WITHOUT",), fold="WITHOUT")) == [
        *("WITHOUT           GAIN", "  of it, waiting  2 ms", "    for data", "saving            1 ms"),
    ]


def test_fitted_phases_returns_phases_once_names_are_lifted() -> None:
    def make(own: Sequence[str], summed: Sequence[str]) -> Table:
        heads = ["NODE", *own, *(["REST"] if summed else [])]
        rows = [["a.long.name.of.a.node", *["1"] * (len(heads) - 1)]]
        return Table(heads, rows, left=("NODE",), lift=("NODE",))

    table = drawn(fitted_phases(["data", "forward"], {}, make))
    assert table == ["data  forward", "node a.long.name.of.a.node", "   1        1"]


def test_sentences_keep_a_long_word_whole() -> None:
    assert drawn(Sentences(["run a-name-of-more-than-24-columns: it is slow"])) == [
        *("run", "  a-name-of-more-than-24-columns:", "  it is slow"),
    ]


def test_fitted_phases_sums_up_the_smallest_in_a_pipe() -> None:
    names = [f"phase_number_{number}" for number in range(9)]

    def make(own: Sequence[str], summed: Sequence[str]) -> Table:
        heads = [*own, *(["REST"] if summed else [])]
        return Table(heads, [["1"] * len(heads)])

    sizes = {name: float(number) for number, name in enumerate(names)}
    table = drawn(fitted_phases(names, sizes, make), None)
    assert table[0].split() == [*names[5:], "REST"]
    assert len(table[0]) <= COLUMNS
    assert drawn(fitted_phases(names[:2], {}, make), None)[0].split() == names[:2]
