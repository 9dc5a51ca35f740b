"""``torchperfd ps`` and ``torchperfd capture`` against a daemon with ranks that give prepared answers."""

import asyncio
import io
import json
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.support.commands import Run
from tests.support.served import Served

from torchperfd._version import __version__
from torchperfd.v1 import control_pb2
from torchperfd_cli import main
from torchperfd_cli.commands._capture_progress import Lines, Table
from torchperfd_cli.commands._output import NO_RUNS
from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.captures.manifest import CaptureOptions, CaptureState
from torchperfd_daemon.captures.rank_attempts import Ack, Result
from torchperfd_daemon.errors import UsageError
from torchperfd_daemon.service.rank_session import Session
from torchperfd_daemon.store.model import KindTotal, RankIdentity, State, StepColumns, Totals
from torchperfd_daemon.store.store import Rank
from torchperfd_daemon.views.model import parse_ranks


class Trained(Session):
    """A rank that takes part in captures without a process: it answers the daemon itself."""

    def __init__(
        self,
        rank: Rank,
        coordinator: Coordinator,
        reason: str,
        asked: list[CaptureOptions],
        pause_seconds: tuple[float, float] = (0.0, 0.0),
        kernels: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__(rank)
        self._launches, self._kernels = kernels
        self._coordinator, self._reason, self._asked = coordinator, reason, asked
        self._pause_per_step, self._pause = pause_seconds

    def prepare(self, capture_id: str, options: CaptureOptions, directory: Path, max_bytes: int) -> None:
        self._asked.append(options)
        ack = Ack(True, "", 118, 0.0, self._pause_per_step)
        asyncio.get_running_loop().call_soon(self._coordinator.on_ack, capture_id, self.rank, ack)

    def commit(self, capture_id: str, start_step: int, steps: int) -> None:
        if self._reason == "silent":
            return
        result = Result(
            *(not self._reason, self._reason, False, start_step, f"rank{self.rank}.json", 9, "ab" * 32),
            pause_seconds=self._pause,
            launches=self._launches,
            kernels=self._kernels,
        )
        if self._reason:
            result = Result(False, self._reason, False, start_step, "", 0, "")
        asyncio.get_running_loop().call_soon(self._coordinator.on_result, capture_id, self.rank, result)

    def cancel(self, capture_id: str, reason: str) -> None:
        pass


def add_rank(
    served: Served,
    rank: int,
    run: str = "bert-17",
    reason: str = "",
    world_size: int = 2,
    job_name: str = "",
    pause_seconds: tuple[float, float] = (0.0, 0.0),
    kernels: tuple[int, int] = (0, 0),
) -> list[CaptureOptions]:
    """Connect a rank; return where it notes what it is asked for.

    ``pause_seconds`` has what it estimates per step, and measures in all; ``kernels`` has the launches and
    the kernels in its trace.
    """
    asked: list[CaptureOptions] = []
    identity = RankIdentity(
        run,
        rank,
        world_size=world_size,
        job_name=job_name,
        local_rank=rank,
        node="node-a",
        pid=4000 + rank,
        script="t.py",
    )
    record = served.store.join(identity)
    served.sessions.add(Trained(record, served.coordinator, reason, asked, pause_seconds, kernels))
    return asked


def test_no_runs_is_said_on_stderr(served: Served, command: Run) -> None:
    assert command("ps") == (0, "", f"{NO_RUNS}\n")
    assert json.loads(command("ps", "--json")[1]) == {
        "schema": "torchperfd.ps/1",
        "node": "node-a",
        "metrics_url": "http://127.0.0.1:9407/metrics",
        "captures_dir": str(served.catalog.directory),
        "runs": [],
    }


def train(served: Served) -> None:
    add_rank(served, 0)
    add_rank(served, 1)
    first, second = served.store.ranks()
    ends = array("q", [1_700_000_000_000_000_000] * 2)
    durations = array("q", [200_000_000] * 2)
    served.store.add_steps(first, StepColumns(ends, durations, {"data": array("q", [50_000_000] * 2)}))
    first.totals = Totals(train=KindTotal(steps=1234), dropped={"ring": 3})
    first.state = State.TRAINING
    served.store.leave(second)


def test_ps_is_a_table(served: Served, command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchperfd_cli.commands.ps.time", SimpleNamespace(time=lambda: 1_700_000_007.0))
    train(served)
    code, out, err = command("ps")
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()] == [
        ["RUN", "RANK", "PID", "STATE", "STEPS", "STEP", "DATA", "LAST", "STEP"],
        ["bert-17", "0", "4000", "training", "1234", "200.00", "ms", "25.0%", "7", "s", "ago"],
        ["bert-17", "1", "4001", "gone", "0", "-", "-", "never"],
    ]


def test_ps_as_json(served: Served, command: Run) -> None:
    train(served)
    code, out, err = command("ps", "--json")
    assert (code, err) == (0, "")
    [run] = json.loads(out)["runs"]
    assert (run["run"], run["job_name"], run["world_size"]) == ("bert-17", "", 2)
    first, second = run["ranks"]
    assert first == {
        "rank": 0,
        "local_rank": 0,
        "node": "node-a",
        "pid": 4000,
        "script": "t.py",
        "state": "training",
        "stalled_seconds": None,
        "connected": True,
        "steps": 1234,
        "step_seconds": 0.2,
        "phase_seconds": {"data": 0.05},
        "last_step_unix_seconds": 1.7e9,
        "dropped_steps": 3,
    }
    assert (second["connected"], second["last_step_unix_seconds"]) == (False, None)


def test_capture_behind_the_automatic_one_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    queued = control_pb2.CaptureProgress(
        capture_id="one",
        run="bert-17",
        state=control_pb2.CAPTURE_STATE_QUEUED,
        reason="begins when the run's automatic capture has ended",
    )
    lines = Lines()
    lines.show(queued)
    lines.show(queued)
    line = "capture one: begins when the run's automatic capture has ended"
    assert capfd.readouterr().err == f"{line}\n"
    table = Table()
    table.show(queued)
    console = Console(width=120, file=io.StringIO())
    with console.capture() as shown:
        console.print(table.render())
    assert shown.get().rstrip() == line.replace("one:", "one of run bert-17: queued,")


def test_capture_prints_its_files_and_progress(served: Served, command: Run) -> None:
    asked = [add_rank(served, 0), add_rank(served, 1)]
    code, out, err = command("capture", "--steps", "7", "--with-stack")
    assert code == 0
    [record] = [found.record for found in served.catalog.list().captures]
    folder = served.catalog.folder(record.capture_id)
    assert out.splitlines() == [f"{folder}/rank0.json", f"{folder}/rank1.json"]
    assert err.splitlines() == [
        f"capture {record.capture_id}: preparing 2 rank(s)",
        "agreed on steps 121 to 127",
        f"complete: steps 121 to 127; next: torchperfd analyze {folder}",
    ]
    assert asked == [[CaptureOptions(steps=7, with_stack=True)]] * 2


def test_a_capture_as_json(served: Served, command: Run) -> None:
    add_rank(served, 0)
    asked = add_rank(served, 1)
    code, out, err = command("capture", "--json", "--ranks", "1", "--record-shapes", "--profile-memory")
    assert (code, err) == (0, "")
    [record] = [found.record for found in served.catalog.list().captures]
    folder = served.catalog.folder(record.capture_id)
    assert json.loads(out) == {
        "schema": "torchperfd.capture_result/1",
        "capture_id": record.capture_id,
        "run": "bert-17",
        "state": "complete",
        "reason": "",
        "directory": str(folder),
        "step_range": [121, 126],
        "ranks": [
            {
                "rank": 1,
                "state": "complete",
                "reason": "",
                "path": f"{folder}/rank1.json",
                "bytes": 9,
                "sha256": "ab" * 32,
                "pause_seconds": 0.0,
                "launches": 0,
                "kernels": 0,
            }
        ],
    }
    assert asked == [CaptureOptions(5, record_shapes=True, profile_memory=True)]


def test_capture_with_long_pause_warns_twice(served: Served, command: Run) -> None:
    add_rank(served, 0)
    add_rank(served, 1, pause_seconds=(0.3, 1.6))
    code, _, err = command("capture", "--steps", "5")
    assert code == 0
    assert [line for line in err.splitlines() if line.startswith("warning")] == [
        "warning: training will pause for about 1.5 s at the capture's end (rank 1);"
        " fewer steps, or no shapes, stacks and memory, make that shorter",
        "warning: training paused for 1.6 s at the capture's end (rank 1);"
        " fewer steps, or no shapes, stacks and memory, make that shorter",
    ]
    [record] = [found.record for found in served.catalog.list().captures]
    assert [rank.pause_seconds for rank in record.ranks] == [0.0, 1.6]


def test_capture_without_kernels_warns(served: Served, command: Run) -> None:
    add_rank(served, 0, kernels=(12_000, 11_000))
    add_rank(served, 1, kernels=(12_000, 0))
    code, _, err = command("capture")
    assert code == 0
    assert [line for line in err.splitlines() if line.startswith("warning")] == [
        "warning: the trace of rank 1 has 12,000 launches and only 0 kernels: does another profiler (nsys,"
        " ncu, DCGM) use CUPTI, or was a CUDA graph captured meanwhile?"
    ]
    [record] = [found.record for found in served.catalog.list().captures]
    assert [(rank.launches, rank.kernels) for rank in record.ranks] == [(12_000, 11_000), (12_000, 0)]


def test_a_partial_capture_names_the_rank_and_keeps_the_rest(served: Served, command: Run) -> None:
    add_rank(served, 0)
    add_rank(served, 1, reason="disk full")
    code, out, err = command("capture")
    [record] = [found.record for found in served.catalog.list().captures]
    assert code == 5
    assert out == f"{served.catalog.folder(record.capture_id)}/rank0.json\n"
    assert err.splitlines()[-1] == f"torchperfd: capture {record.capture_id} is partial: rank 1: disk full"
    code, out, _ = command("capture", "--json")
    document = json.loads(out)
    assert (code, document["state"], document["ranks"][1]["path"]) == (5, "partial", None)


@pytest.mark.parametrize("of", [(), ("--run", "bert-17"), ("--job", "bert"), ("--all",)])
def test_capture_of_half_a_job_is_partial(served: Served, command: Run, of: tuple[str, ...]) -> None:
    for rank in (0, 1):
        add_rank(served, rank, world_size=4, job_name="bert")
    code, out, err = command("capture", *of)
    [record] = [found.record for found in served.catalog.list().captures]
    assert (code, record.state, out.count(".json")) == (5, CaptureState.PARTIAL, 2)
    assert err.splitlines()[-1] == (
        f"torchperfd: capture {record.capture_id} is partial: rank 2: is not connected to this daemon;"
        " ranks on other nodes need --job and --fleet-peers (and 1 more)"
    )


def test_capture_of_chosen_ranks_does_not_miss_the_others(served: Served, command: Run) -> None:
    for rank in (0, 1):
        add_rank(served, rank, world_size=4)
    assert command("capture", "--ranks", "0-1")[0] == 0


def test_a_failed_capture_says_why(served: Served, command: Run) -> None:
    add_rank(served, 0, reason="disk full", world_size=1)
    code, out, err = command("capture")
    [record] = [found.record for found in served.catalog.list().captures]
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == f"torchperfd: capture {record.capture_id} failed: rank 0: disk full"


def test_a_job_that_does_not_train_is_a_timeout(served: Served, command: Run) -> None:
    add_rank(served, 0, reason="silent", world_size=1)
    code, out, err = command("capture", "--timeout", "1")
    [record] = [found.record for found in served.catalog.list().captures]
    assert (code, out) == (124, "")
    assert err.splitlines()[-1] == (
        f"torchperfd: capture {record.capture_id} failed: rank 0: makes no training steps, so there is"
        " nothing to capture; is the job training? see `torchperfd ps`"
    )


def test_a_capture_of_nothing_is_no_such_target(served: Served, command: Run) -> None:
    assert command("capture") == (
        3,
        "",
        "torchperfd: this node has no run; start one with `torchperfd run`\n",
    )
    add_rank(served, 0)
    code, _, err = command("capture", "--ranks", "0,7-8")
    assert (code, err) == (3, "torchperfd: run bert-17 has no rank 7, 8 on this node; it has 0\n")


def test_a_daemon_of_another_protocol_is_refused(
    served: Served, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = SimpleNamespace(API_MIN=7, API_MAX=9)
    monkeypatch.setattr("torchperfd_daemon.service.control.contract", newer)
    monkeypatch.setattr("torchperfd_daemon.service.control.__version__", "9.8.7")
    code, out, err = command("ps")
    assert (code, out) == (6, "")
    assert err == (
        f"torchperfd: this command (torchperfd {__version__}) speaks protocol 1 to 1, the daemon (torchperfd"
        " 9.8.7) speaks 7 to 9; install the same version on both sides\n"
    )


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("", []),
        ("0", [0]),
        ("0,8-15", [0, *range(8, 16)]),
        (" 3 , 1 ,, 2-2,", [1, 2, 3]),
        ("5,1-5,3", [1, 2, 3, 4, 5]),
        ("0-99999,5", list(range(100_000))),
        ("999999999", [999_999_999]),
    ],
)
def test_ranks_are_read(text: str, ranks: list[int]) -> None:
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize(
    "text",
    [
        *("x", "-", "-1", "1-", "1--2", "2-1", "1.5", "0x1", "²", "1-²", "1\n2", "1" * 5000),
        *("0-100000", "0-99999,200000", "0-999999999", "5000000000", "1-5000000000"),
    ],
)
def test_what_are_no_ranks_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_ranks(text)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200


@given(st.sets(st.integers(0, 300)))
def test_any_set_of_ranks_can_be_written_as_ranges(ranks: set[int]) -> None:
    parts = []
    for first in sorted(rank for rank in ranks if rank - 1 not in ranks):
        final = first
        while final + 1 in ranks:
            final += 1
        parts.append(f"{first}-{final}" if final > first else str(first))
    assert parse_ranks(",".join(parts)) == sorted(ranks)


@given(st.text(alphabet="0123456789-, x²\n", max_size=30))
def test_no_text_breaks_the_reading_of_ranks(text: str) -> None:
    try:
        ranks = parse_ranks(text)
    except UsageError:
        return
    assert ranks == sorted(set(ranks))
    assert len(ranks) <= 100_000


def test_invalid_ranks_are_refused_without_a_daemon(capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run_command(["capture", "--socket", "/no/such", "--ranks", "a"]) == 2
    assert capfd.readouterr().err == (
        "torchperfd: 'a' is no rank or range of ranks; write them like 0,8-15\n"
    )
