"""What the flusher reports, and when it is woken up."""

import pytest
import torch
from tests.unit.client.training import calls, loader, tiny_model, train

import torchperfd
from torchperfd.events import codes


def test_flusher_ring_buffer_half_full_is_woken(client: torchperfd.Client) -> None:
    flusher, buffer = client.parts.flusher, client.parts.instruments.buffer
    assert buffer.on_low == flusher.wake
    flusher.stop(5)
    flusher.flush()
    woken: list[int] = []
    buffer.on_low = lambda: woken.append(len(buffer))
    for _ in range(50_000):
        buffer.mark(codes.ENTER, 14)
        buffer.mark(codes.EXIT)
        if woken:
            break
    assert len(woken) == 1
    assert 50_000 < len(buffer) < 70_000
    flusher.flush()
    assert len(buffer) == 0


def test_flush_without_report_sends_no_steps(client: torchperfd.Client) -> None:
    client.parts.flusher.stop(5)
    while client.parts.outbox.take(0, 100):
        pass
    model = tiny_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(3))
    client.parts.flusher.flush()
    assert calls(client)["steps"] == 3
    assert [message.WhichOneof("body") for message in client.parts.outbox.take(0, 100)] == ["state"]
    client.parts.flusher.flush(report=True)
    steps, account = client.parts.outbox.take(0, 100)
    assert (steps.steps.count, account.account.recorded_steps) == (3, 3)
    client.parts.flusher.flush(report=True)
    assert client.parts.outbox.take(0, 100) == []


def test_flush_totals_unpackable_are_counted_as_fault(
    client: torchperfd.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.parts.flusher.stop(5)
    model = tiny_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(3))
    with monkeypatch.context() as patch:
        patch.setattr("torchperfd.link.wire.totals_message", lambda *_: 1 / 0)
        client.parts.outbox.take(0, 100)
        client.parts.flusher.flush(send=True)
        assert client.parts.instruments.faults.counts() == {"report": 1}
        assert [message.WhichOneof("body") for message in client.parts.outbox.take(0, 100)] == ["state"]
    # What was not reported is reported the next time.
    client.parts.flusher.flush(send=True)
    steps, account = client.parts.outbox.take(0, 100)
    assert (steps.steps.count, account.account.recorded_steps) == (3, 3)
