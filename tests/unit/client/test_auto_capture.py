"""The capture that ``torchperfd run`` makes by itself: when, of which rank, and what its analysis advises."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchperfd.errors import CaptureError
from torchperfd.launch import additions
from torchperfd.launch.additions import STABLE_LOOKS, AutoCapture, StableVerdict, first_advice
from torchperfd.v1 import control_pb2, session_pb2


def verdict(cause: str = "input-bound", share: float = 0.5, rank: int = -1) -> control_pb2.Verdict:
    return control_pb2.Verdict(cause=cause, rank=rank, cost_seconds_per_step=0.1 * share, step_seconds=0.1)


class FakeClient:
    """A client whose daemon has one verdict."""

    def __init__(self, found: control_pb2.Verdict | None, rank: int = 0) -> None:
        self.found, self.rank = found, rank
        self.ordered: list[tuple[int, int]] = []
        self.refusal = ""
        self.kept: dict[tuple[str, str], bytes] = {}
        self.parts = SimpleNamespace(daemon_session=SimpleNamespace(read_capture=self.read_capture))

    def read_capture(self, capture_id: str, name: str, most_bytes: int) -> bytes:
        return self.kept.get((capture_id, name), b"")

    def whole_run(self, timeout: float) -> control_pb2.GetRunResponse | None:
        if self.found is None:
            return None
        ranks = [control_pb2.RankAccount(identity=session_pb2.RankIdentity(rank=rank)) for rank in (0, 1)]
        return control_pb2.GetRunResponse(ranks=ranks, verdict=self.found)

    def order_automatic_capture(self, steps: int, rank: int) -> Any:
        if self.refusal:
            raise CaptureError(self.refusal)
        self.ordered.append((steps, rank))
        return SimpleNamespace(id="20261128-000000-abcdef", has_trace=True, step_range=(40, 43))


def looked(client: FakeClient, times: int) -> tuple[AutoCapture, list[bool]]:
    auto = AutoCapture(client, 5.0)  # type: ignore[arg-type]
    return auto, [auto.look() for _ in range(times)]


def test_stable_verdict_needs_the_same_cause_and_rank_in_a_row() -> None:
    stable = StableVerdict()
    looks = [verdict(), verdict(), verdict(rank=3), verdict(rank=3), None, verdict(), verdict(), verdict()]
    assert [stable.update(each) for each in looks] == [False] * 7 + [True]


@pytest.mark.parametrize("cause", ["none", "unknown", "hang"])
def test_stable_verdict_without_a_cause_is_never_worth_it(cause: str) -> None:
    stable = StableVerdict()
    assert not any(stable.update(verdict(cause)) for _ in range(9))


def test_stable_verdict_below_a_tenth_is_never_worth_it() -> None:
    stable = StableVerdict()
    assert not any(stable.update(verdict(share=0.09)) for _ in range(9))
    assert not any(
        stable.update(control_pb2.Verdict(cause="checkpoint", cost_seconds_per_step=1)) for _ in range(9)
    )


def test_capture_is_ordered_once_of_the_named_rank() -> None:
    client = FakeClient(verdict(rank=1))
    auto, ended = looked(client, STABLE_LOOKS)
    assert ended == [False] * (STABLE_LOOKS - 1) + [True]
    assert client.ordered == [(5, 1)]
    assert auto.capture_id == "20261128-000000-abcdef"


@pytest.mark.parametrize("rank", [-1, 7])
def test_capture_is_of_rank_0_where_the_named_one_is_not_here(rank: int) -> None:
    client = FakeClient(verdict(rank=rank))
    looked(client, STABLE_LOOKS)
    assert client.ordered == [(5, 0)]


def test_capture_that_is_refused_is_not_tried_again() -> None:
    client = FakeClient(verdict())
    client.refusal = "another capture is in progress"
    auto, ended = looked(client, STABLE_LOOKS)
    assert ended[-1]
    assert (auto.capture_id, auto.trace_words()) == ("", "")


def test_trace_words_have_advice_or_are_empty() -> None:
    client = FakeClient(verdict())
    auto, _ = looked(client, STABLE_LOOKS)
    assert auto.trace_words() == ""
    analysis = (auto.capture_id, "analysis.json")
    client.kept[analysis] = json.dumps({"advice": []}).encode()
    assert auto.trace_words() == ""
    advice = {"change": "use workers", "setting": "num_workers=2", "saves_us_per_step": 5000}
    client.kept[analysis] = json.dumps({"advice": [advice]}).encode()
    assert auto.trace_words() == (
        "three steps that the run captured by itself: use workers: num_workers=2, saves about 5 ms a step"
    )


def test_capture_needs_a_daemon_and_a_run_that_goes_on() -> None:
    assert not any(looked(FakeClient(None), 9)[1])
    client = FakeClient(verdict())
    auto = AutoCapture(client, 5.0)  # type: ignore[arg-type]
    auto.stop()
    assert not any(auto.look() for _ in range(9))
    assert client.ordered == []


def test_capture_is_never_made_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    )
    client = FakeClient(verdict())
    assert looked(client, 1)[1] == [True]
    assert client.ordered == []


def test_thread_ends_at_the_first_capture_and_keeps_errors(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient(verdict())
    AutoCapture(client, 0.0).run()  # type: ignore[arg-type]
    assert len(client.ordered) == 1
    with caplog.at_level("INFO"):
        AutoCapture(SimpleNamespace(), 0.0).run()  # type: ignore[arg-type]
    assert "no capture is made by itself" in caplog.text


@pytest.mark.parametrize(
    ("options", "environment", "rank"),
    [
        ({"quiet": True, "switched_off": False}, {}, 0),
        ({"quiet": False, "switched_off": True}, {}, 0),
        ({"quiet": False, "switched_off": False}, {"TORCHPERFD_NO_ADVISE": "1"}, 0),
        ({"quiet": False, "switched_off": False}, {}, 1),
    ],
)
def test_begin_is_none_where_no_capture_is_wanted(
    options: dict[str, bool], environment: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHPERFD_NO_ADVISE", raising=False)
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert additions.begin(FakeClient(verdict(), rank), **options) is None  # type: ignore[arg-type]


def test_begin_is_none_beside_a_cuda_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCHPERFD_NO_ADVISE", raising=False)
    monkeypatch.setattr(additions, "_CUDA_DRIVER", str(tmp_path))
    client: Any = FakeClient(verdict())
    assert additions.begin(client, quiet=False, switched_off=False) is None


def test_first_advice_is_one_line_with_its_saving() -> None:
    advice = {
        "change": "let workers make batches",
        "setting": "DataLoader(num_workers=2)",
        "saves_us_per_step": 8827,
    }
    assert (
        first_advice(json.dumps({"advice": [advice, {"change": "no"}]}).encode())
        == "let workers make batches: DataLoader(num_workers=2), saves about 8.83 ms a step"
    )


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"advice": []}', '{"advice": [{}]}', '{"advice": 3}', "[" * 9000]
)
def test_first_advice_of_a_damaged_analysis_is_empty(text: str) -> None:
    assert first_advice(text.encode()) == ""


def test_first_advice_never_drives_a_terminal() -> None:
    advice = {"change": "\x1b[2J", "setting": "", "saves_us_per_step": 0}
    assert first_advice(json.dumps({"advice": [advice]}).encode()) == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_begin_keeps_kineto_quiet_on_every_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHPERFD_NO_ADVISE", raising=False)
    monkeypatch.setenv("KINETO_LOG_LEVEL", "")
    monkeypatch.delenv("KINETO_LOG_LEVEL")
    monkeypatch.setattr(additions, "_CUDA_DRIVER", "/nowhere")
    monkeypatch.setattr(AutoCapture, "start", lambda _: None)
    client: Any = FakeClient(verdict(), rank)
    assert (additions.begin(client, quiet=False, switched_off=False) is not None) == (rank == 0)
    assert os.environ["KINETO_LOG_LEVEL"] == "6"
    monkeypatch.setenv("KINETO_LOG_LEVEL", "1")
    additions.begin(client, quiet=False, switched_off=False)
    assert os.environ["KINETO_LOG_LEVEL"] == "1"
