"""Times, memory and FLOPs of the device."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.torches import needs_flops
from tests.unit.client.training import calls, evaluate, loader, per_step, tiny_model, tiny_training, train

import torchperfd
from torchperfd.hooks.accelerator import read_cuda_memory
from torchperfd.hooks.cuda import record_without_stream
from torchperfd.hooks.device_clock import MARKS, DeviceTimes
from torchperfd.link.outbox import NextFlush
from torchperfd.model.totals import CudaMemory
from torchperfd.steps.phases import FORWARD

MS = 1_000_000


class Event:
    """Every event comes a millisecond after the one before."""

    made = 0

    def record(self) -> None:
        type(self).made += 1
        self.at = type(self).made

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any, /) -> float:
        return float(end_event.at - self.at)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "torchperfd.hooks.accelerator.cuda_device_times", lambda: DeviceTimes(Event, record_without_stream)
    )


@pytest.fixture
def rare_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only reports allow for more events: a flush by the clock comes anywhere."""
    monkeypatch.setattr("torchperfd.link.flusher.next_flush", lambda _: NextFlush(3600.0))


def timed() -> tuple[torchperfd.Client, Callable[[int], object], torch.nn.Module]:
    """Return a client after two steps, what trains on so many batches more, and its model."""
    model = tiny_model()
    client = torchperfd.attach(model=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, loader(2))
    client.report()  # from here on there is a device to time, that knows no step before
    return client, lambda batches: train(model, optimizer, loader(batches)), model


def test_every_phase_has_its_time_on_the_device(device: None) -> None:
    client, train_on, model = timed()
    train_on(5)
    evaluate(model, loader(3))
    client.finish()
    totals = client.report().totals
    assert calls(client) == per_step(7)

    def on_device(kind: str) -> dict[str, tuple[float, int]]:
        phases = getattr(totals, kind).phases
        return {
            client.parts.instruments.names.name(slot): (
                phases[slot].device_ns / MS,
                phases[slot].device_calls,
            )
            for slot in range(len(client.parts.instruments.names))
            if phases[slot].device_calls
        }

    within = dict.fromkeys(("data", "zero_grad", "forward", "loss", "backward", "optimizer"), (5.0, 5))
    # Between the others: after the draw, before the forward, before the optimizer and after it.
    assert on_device("train") == {**within, "other": (20.0, 5)}
    assert on_device("validate")["forward"] == (3.0, 3)
    assert "backward" not in on_device("validate")
    assert client.parts.instruments.faults.counts() == {}


def test_steps_of_which_no_event_was_marked_are_stood_for(device: None, rare_flushes: None) -> None:
    client, train_on, _ = timed()
    before, buffer = Event.made, client.parts.instruments.buffer
    for _ in range(5):
        train_on(200)
        assert buffer.cuda_event_id is None  # it was enough
        client.report()
        assert buffer.cuda_event_id is not None
    client.finish()
    totals = client.report().totals
    assert calls(client) == per_step(1002)
    assert Event.made - before <= 6 * MARKS
    forward = totals.train.phases[FORWARD]
    assert forward.device_calls == 1000
    # Between events of steps that are whole there is always a millisecond.
    assert forward.device_ns == pytest.approx(1000 * MS, rel=1e-3)
    assert client.parts.instruments.faults.counts() == {}


def test_overhead_above_its_limit_leaves_events_unmarked(device: None, rare_flushes: None) -> None:
    client, train_on, _ = timed()
    client.parts.instruments.replay.overhead.degradation_level = 1
    train_on(200)
    client.report()
    assert client.parts.instruments.buffer.cuda_event_id is None


def test_client_without_device_reports_none(client: torchperfd.Client) -> None:
    model = tiny_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(3))
    totals = client.report().totals
    assert totals.cuda is None
    assert totals.flops_per_step is None
    assert all(phase.device_calls == 0 for phase in totals.train.phases)
    assert client.parts.instruments.buffer.cuda_event_id is None


def test_memory_is_reported_unchanged(client: torchperfd.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = CudaMemory(allocated_bytes=1, reserved_bytes=2, peak_bytes=3)
    monkeypatch.setattr("torchperfd.hooks.instruments.read_cuda_memory", lambda: memory)
    assert client.report().totals.cuda == memory


@needs_flops
def test_flops_of_one_step_are_counted_and_the_listener_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchperfd.hooks.flops._compiles", lambda: False)  # other tests have
    client = torchperfd.attach(flops=True, peak_flops=1e12)
    model = tiny_model(width=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = train(model, optimizer, loader(6, batch_size=4))
    client.report()
    totals = client.report().totals
    # Of 4 samples: 4 to 8 and 8 to 2 forward, backward both by weight, and the second by input.
    assert totals.flops_per_step == 2 * 4 * (4 * 8 + 8 * 2) * 2 + 2 * 4 * 8 * 2
    assert totals.peak_flops == 1e12
    assert not client.parts.instruments.replay.live
    assert calls(client)["steps"] == 6
    client.detach()
    again = tiny_model(width=8)
    assert train(again, torch.optim.SGD(again.parameters(), lr=0.1), loader(6, batch_size=4)) == losses


def test_tokens_are_counted_where_the_script_reports_them(client: torchperfd.Client) -> None:
    model, optimizer = tiny_training()
    for batch in loader(3):
        client.count_tokens(100)
        client.count_tokens(28)
        train(model, optimizer, [batch])
    client.finish()
    train_account = client.report().totals
    assert train_account.train.tokens == 3 * 128
    assert train_account.warmup.tokens == 128
    assert train_account.steady().tokens == 2 * 128


class Cuda:
    """``torch.cuda`` of a process with devices; everything else about it is missing."""

    def __init__(self, *devices: dict[str, Any], initialized: bool = True, tells_uuids: bool = True) -> None:
        self._devices = devices
        self._tells_uuids = tells_uuids
        self._initialized = initialized

    def is_initialized(self) -> bool:
        return self._initialized

    def device_count(self) -> int:
        assert self._initialized, "counting devices may load the driver"
        return len(self._devices)

    def get_device_properties(self, device: int) -> SimpleNamespace:
        assert self._initialized
        return SimpleNamespace(**{"uuid": f"GPU-uuid-{device}"} if self._tells_uuids else {})

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        assert self._initialized
        return self._devices[device]


def holds(allocated: int, reserved: int, peak: int) -> dict[str, Any]:
    return {
        "allocated_bytes": {"all": {"current": allocated, "peak": peak, "freed": 7}},
        "reserved_bytes": {"all": {"current": reserved, "peak": 2 * reserved, "freed": 7}},
    }


def use(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)


@pytest.mark.parametrize(
    ("cuda", "memory"),
    [
        (Cuda(holds(100, 4096, 900)), CudaMemory(100, 4096, 900, "uuid-0")),
        # A rank may use any of the devices; the one that holds most names it.
        (
            Cuda(holds(0, 0, 0), holds(100, 4096, 900), holds(1, 2, 3)),
            CudaMemory(101, 4098, 903, "uuid-1"),
        ),
        # An older torch has no UUIDs; a process that holds no memory has no device yet.
        (Cuda(holds(1, 2, 3), tells_uuids=False), CudaMemory(1, 2, 3)),
        (Cuda(holds(0, 0, 0)), CudaMemory(0, 0, 0)),
    ],
)
def test_memory_is_what_the_allocator_holds(
    monkeypatch: pytest.MonkeyPatch, cuda: Cuda, memory: CudaMemory
) -> None:
    use(monkeypatch, SimpleNamespace(cuda=cuda))
    assert read_cuda_memory() == memory


@pytest.mark.parametrize(
    "torch",
    [
        pytest.param(None, id="torch is not imported"),
        pytest.param(SimpleNamespace(), id="torch is being imported"),
        pytest.param(SimpleNamespace(cuda=Cuda(initialized=False)), id="CUDA is not initialised"),
        pytest.param(SimpleNamespace(cuda=Cuda({})), id="the allocator does not count"),
    ],
)
def test_there_is_none(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    use(monkeypatch, torch)
    assert read_cuda_memory() is None


def test_an_error_of_cuda_is_the_scripts_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: int) -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cuda = Cuda(holds(1, 1, 1))
    monkeypatch.setattr(cuda, "memory_stats_as_nested_dict", broken)
    use(monkeypatch, SimpleNamespace(cuda=cuda))
    assert read_cuda_memory() is None


def test_the_installed_torch_has_what_is_asked_of_it() -> None:
    import torch

    assert callable(torch.cuda.memory_stats_as_nested_dict)
    if not torch.cuda.is_available():
        assert read_cuda_memory() is None
