"""When the pump turns and reports: on the wall clock's grid, as the pumps of all ranks do."""

from collections import deque
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.client.training import calls, loader, tiny_model, train

import torchperfd
from torchperfd import pump
from torchperfd.account import Account, KindAccount
from torchperfd.faults import Faults
from torchperfd.pump import Pump
from torchperfd.tape import events as on_tape


class WallClock:
    """The time, for the pump; and the queue it waits on, whose waits end a little late."""

    def __init__(self, now: float, late: float, turns: int, woken: frozenset[int] = frozenset()) -> None:
        self.now, self._late, self._turns, self._woken = now, late, turns, woken
        self.turns: list[tuple[float, bool]] = []

    def time(self) -> float:
        return self.now

    def get(self, timeout: float) -> None:
        assert 0 < timeout <= 16
        if len(self.turns) in self._woken:
            self.now += timeout / 2
            self._woken = self._woken - {len(self.turns)}
            return
        self.now += timeout + self._late
        raise Empty

    def turn(self, *, report: bool, again: bool) -> None:
        assert again
        self.turns.append((self.now, report))
        if len(self.turns) == self._turns:
            raise KeyboardInterrupt


def turns(
    clock: WallClock,
    *,
    measuring: bool = False,
    device: object = None,
    live: bool = False,
    steps: int = 0,
    step_ms: float = 0.0,
    seen: bool = False,
    beating: bool = False,
    reported: float = 0.0,
) -> list[tuple[float, bool]]:
    """Have a pump turn by that clock; return when it did, and whether it reported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pump, "time", clock)
        turning = object.__new__(Pump)
        turning._stopping = False
        turning._requests = deque()
        turning._wake = clock  # type: ignore[assignment]
        turning._faults = Faults()
        turning.account = Account(train=KindAccount(steps=steps))
        turning._pace = SimpleNamespace(step_ns=step_ms * 1e6)  # type: ignore[assignment]
        turning._pulse = SimpleNamespace(seen=seen)  # type: ignore[assignment]
        turning._beating = beating
        turning._reported = reported
        overhead = SimpleNamespace(measuring=measuring, turn=lambda _: None)
        recorder = SimpleNamespace(device=device)
        turning._replay = SimpleNamespace(  # type: ignore[assignment]
            overhead=overhead, recorder=recorder, live=live, make_room=lambda _: None
        )
        patch.setattr(turning, "turn", clock.turn)
        with pytest.raises(KeyboardInterrupt):
            turning._run()
    return clock.turns


_NOW = st.floats(1_700_000_000, 1_800_000_000)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"steps": 9_999, "step_ms": 1.0},  # somebody may wait for the first ones
        {"steps": 10_000, "step_ms": 0.4},  # of so many, few are touched
        {"steps": 10_000, "step_ms": 5.1},  # so long that a turn is little of them
        {"steps": 10_000, "step_ms": 1.0, "live": True},
        {"steps": 9_999, "step_ms": 1.0, "seen": True, "beating": True},
        {"steps": 10_000, "step_ms": 5.1, "seen": True, "beating": True},
        {"steps": 10_000, "step_ms": 1.0, "live": True, "seen": True, "beating": True},
    ],
)
@given(_NOW, st.floats(0, 0.2))
def test_it_turns_and_reports_on_whole_seconds(how: dict[str, Any], now: float, late: float) -> None:
    done = turns(WallClock(now, late, 5), **how)
    seconds = [moment - late for moment, _ in done]
    first = round(seconds[0])
    assert seconds == pytest.approx([*range(first, first + 5)], abs=1e-4, rel=0)
    assert all(report for _, report in done)


@pytest.mark.parametrize("busy", [{"measuring": True}, {"device": object()}])
@given(_NOW, st.floats(0, 0.2))
def test_while_there_is_more_to_look_at_it_turns_on_quarters_and_reports_on_whole_ones(
    busy: dict[str, Any], now: float, late: float
) -> None:
    done = turns(WallClock(now, late, 9), **busy)
    quarters = [(moment - late) * 4 for moment, _ in done]
    first = round(quarters[0])
    assert quarters == pytest.approx([*range(first, first + 9)], abs=1e-4, rel=0)
    assert [report for _, report in done] == [round(quarter) % 4 == 0 for quarter in quarters]


@pytest.mark.parametrize(
    ("how", "period"),
    [({}, 4), ({"seen": True}, 4), ({"beating": True}, 4), ({"seen": True, "beating": True}, 16)],
)
@pytest.mark.parametrize("step_ms", [0.5, 5.0])
@given(_NOW, st.floats(0, 0.2))
def test_beside_many_short_steps_it_turns_every_4_s_or_16_where_the_daemon_sees_them(
    how: dict[str, Any], period: int, step_ms: float, now: float, late: float
) -> None:
    done = turns(WallClock(now, late, 4), steps=10_000, step_ms=step_ms, **how)
    multiples = [(moment - late) / period for moment, _ in done]
    first = round(multiples[0])
    assert multiples == pytest.approx([*range(first, first + 4)], abs=1e-4, rel=0)
    assert all(report for _, report in done)


@pytest.mark.parametrize(("before", "skips"), [(1.0, True), (7.5, True), (8.5, False), (-3.0, False)])
def test_a_report_that_somebody_asked_for_just_before_stands_for_the_next(before: float, skips: bool) -> None:
    now, due = 1_700_000_003.0, 1_700_000_016.0
    assert due % 16 == 0
    how: dict[str, Any] = {"steps": 10_000, "step_ms": 1.0, "seen": True, "beating": True}
    done = turns(WallClock(now, 0.0, 1), reported=due - before, **how)
    assert done[0][0] == pytest.approx(due + 16 if skips else due)
    # Where turns are not so far from each other none is left out.
    assert turns(WallClock(now, 0.0, 1), reported=now)[0][0] == pytest.approx(now + 1)


@given(_NOW)
def test_who_is_woken_up_turns_at_once_and_reports_when_it_is_time(now: float) -> None:
    done = turns(WallClock(now, 0.0, 4, woken=frozenset({1, 2})))
    assert [report for _, report in done] == [True, False, False, True]
    assert done[3][0] - done[0][0] == pytest.approx(1, abs=1e-4)
    assert done[0][0] < done[1][0] < done[2][0] < done[3][0]


def test_a_tape_that_fills_up_wakes_the_pump(client: torchperfd.Client) -> None:
    client._pump.stop(5)
    while not client._pump._wake.empty():
        client._pump._wake.get()
    for _ in range(50_000):
        client._tape.mark(on_tape.ENTER, 14)
        client._tape.mark(on_tape.EXIT)
        if not client._pump._wake.empty():
            break
    assert client._pump._wake.qsize() == 1
    assert 50_000 < len(client._tape) < 70_000
    client._pump.turn()
    assert len(client._tape) == 0


def test_steps_are_reported_with_the_turn_that_reports_and_not_before(client: torchperfd.Client) -> None:
    client._pump.stop(5)
    while client._outbox.take(0, 100):
        pass
    model = tiny_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(3))
    client._pump.turn()
    assert calls(client)["steps"] == 3
    assert [message.WhichOneof("body") for message in client._outbox.take(0, 100)] == ["state"]
    client._pump.turn(report=True)
    steps, account = client._outbox.take(0, 100)
    assert (steps.steps.count, account.account.recorded_steps) == (3, 3)
    client._pump.turn(report=True)
    assert client._outbox.take(0, 100) == []


def test_an_account_that_cannot_be_packed_is_counted_and_reaches_no_script(
    client: torchperfd.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client._pump.stop(5)
    model = tiny_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(3))
    with monkeypatch.context() as patch:
        patch.setattr("torchperfd.wire.account_message", lambda *_: 1 / 0)
        client._outbox.take(0, 100)
        client._pump.turn(send=True)
        assert client._faults.counts() == {"report": 1}
        assert [message.WhichOneof("body") for message in client._outbox.take(0, 100)] == ["state"]
    # What was not reported is reported the next time.
    client._pump.turn(send=True)
    steps, account = client._outbox.take(0, 100)
    assert (steps.steps.count, account.account.recorded_steps) == (3, 3)
