"""When the pump turns and reports: on the wall clock's grid, as the pumps of all ranks do."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.client.training import calls, loader, tiny_model, train

import torchperfd
from torchperfd import pump
from torchperfd.faults import Faults
from torchperfd.pump import Pump


class WallClock:
    """The time, for the pump; and the event it waits on, whose waits end a little late."""

    def __init__(self, now: float, late: float, turns: int) -> None:
        self.now, self._late, self._turns = now, late, turns
        self.reports: list[tuple[float, bool]] = []

    def time(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        assert 0 < seconds <= 0.25
        self.now += seconds + self._late

    def turn(self, *, report: bool) -> None:
        self.reports.append((self.now - self._late, report))
        if len(self.reports) == self._turns:
            raise KeyboardInterrupt


@given(st.floats(1_700_000_000, 1_800_000_000), st.floats(0, 0.2))
def test_turns_lie_on_quarters_of_a_second_and_whole_ones_report(now: float, late: float) -> None:
    clock = WallClock(now, late, 9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pump, "time", clock)
        turning = object.__new__(Pump)
        turning._stopping = False
        turning._wake = clock  # type: ignore[assignment]
        turning._faults = Faults()
        patch.setattr(turning, "turn", clock.turn)
        with pytest.raises(KeyboardInterrupt):
            turning._run()
    quarters = [moment * 4 for moment, _ in clock.reports]
    first = round(quarters[0])
    assert quarters == pytest.approx([*range(first, first + 9)], abs=1e-4, rel=0)
    assert [report for _, report in clock.reports] == [round(quarter) % 4 == 0 for quarter in quarters]


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
