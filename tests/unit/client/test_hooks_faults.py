"""Hooks that fail, and hooks in forked processes."""

import io
import multiprocessing.queues
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.node import eventually
from tests.unit.client.training import calls, loader, open_phases, per_step, tiny_model, train
from torch.utils.data import DataLoader, Dataset

import torchperfd
from torchperfd.hooks.models import RootModels
from torchperfd.link.outbox import NextFlush
from torchperfd.steps.loop import Loop

EPOCHS = 12
LIMIT = 10


Outcome = tuple[list[float], list[torch.Tensor]]


def outcome() -> Outcome:
    """Train twelve short epochs; return every loss and the final weights."""
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = [loss for _ in range(EPOCHS) for loss in train(model, optimizer, loader(2, shuffle=True))]
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


def assert_same(one: Outcome, other: Outcome) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(mine, yours) for mine, yours in zip(one[1], other[1], strict=True))


@pytest.fixture(scope="module")
def undisturbed() -> Outcome:
    """What training comes to without us."""
    return outcome()


def test_healthy_hooks_change_no_bit(undisturbed: Outcome, client: torchperfd.Client) -> None:
    assert_same(outcome(), undisturbed)
    assert calls(client)["steps"] == 2 * EPOCHS


@pytest.mark.parametrize(
    ("callback", "places"),
    [
        ("draw_begin", {"hook draw"}),
        ("draw_end", {"hook draw"}),
        ("draw_stop", {"hook draw"}),
        ("forward_begin", {"hook forward"}),
        ("forward_end", {"hook forward"}),
        ("backward_begin", {"hook backward"}),
        ("optimizer_begin", {"hook optimizer"}),
        ("optimizer_end", {"hook optimizer"}),
        ("zero_begin", {"hook zero_grad"}),
        ("enter", {"hook zero_grad"}),
        ("leave", {"hook zero_grad", "hook backward"}),
        ("backward_end", {"hook backward"}),
    ],
)
def test_callback_that_always_fails_is_switched_off(
    callback: str, places: set[str], undisturbed: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: Any, **_options: Any) -> None:
        raise ZeroDivisionError(f"injected into {callback}")

    monkeypatch.setattr(Loop, callback, fail)
    client = torchperfd.attach()
    assert_same(outcome(), undisturbed)
    client.report()
    counts = client.parts.instruments.faults.counts()
    assert set(counts) == places
    assert max(counts.values()) == LIMIT
    assert not client.parts.instruments.buffer.thread
    client.detach()


@pytest.mark.parametrize(
    ("callback", "places"),
    [
        ("save_begin", {"hook save"}),
        ("save_end", {"hook save"}),
        ("optimizer_begin", {"hook scaler", "hook optimizer"}),
        ("optimizer_end", {"hook scaler", "hook optimizer"}),
        ("leave", {"hook scaler", "hook backward", "hook save"}),
    ],
)
def test_scalers_and_saves_work_whatever_we_do(
    callback: str, places: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled() -> Outcome:
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        losses, files = [], []
        for number, (inputs, targets) in enumerate(loader(12)):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            scaler.scale(loss * (float("inf") if number % 3 == 0 else 1.0)).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
            torch.save(loss.detach(), file := io.BytesIO())
            files.append(torch.load(io.BytesIO(file.getvalue())))
        return losses, [*files, *(parameter.detach().clone() for parameter in model.parameters())]

    alone = scaled()
    monkeypatch.setattr(Loop, callback, lambda *_, **__: 1 / 0)
    client = torchperfd.attach()
    assert_same(scaled(), alone)
    client.report()
    counts = client.parts.instruments.faults.counts()
    assert counts
    assert set(counts) <= places
    assert max(counts.values()) == LIMIT
    assert not client.parts.instruments.buffer.thread
    client.detach()


def test_compiling_in_place_works_whatever_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    client = torchperfd.attach(model=model)
    monkeypatch.setattr(RootModels, "is_known", lambda *_: 1 / 0)
    model.compile(backend="eager")
    assert model._compiled_call_impl is not None
    assert client.parts.instruments.faults.counts() == {"hook compiled_models": 1}
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(2))
    assert calls(client)["steps"] == 2
    torch._dynamo.reset()


def test_workers_that_cannot_be_counted_serve_all_the_same(
    client: torchperfd.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS, where queues have no size."""
    monkeypatch.setattr(multiprocessing.queues.Queue, "qsize", lambda _: 1 / 0)
    model = tiny_model()
    batches = loader(4, num_workers=1, multiprocessing_context="fork")
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)
    counts = client.parts.instruments.faults.counts()
    assert counts == {"hook worker_queue": 5, "hook loader_use": 5}
    assert calls(client) == per_step(4)
    monkeypatch.setattr(multiprocessing.queues.Queue, "qsize", unsupported)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)
    assert calls(client)["steps"] == 8
    assert client.parts.instruments.faults.counts() == counts, "it is no failure of ours"
    assert client.report().totals.loader_ready is None


def unsupported(_queue: object) -> int:
    raise NotImplementedError


def test_a_failure_costs_the_step_in_progress_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, failures = Loop.backward_begin, iter([False, True, False, False])

    def fail_once(loop: Loop) -> None:
        if next(failures):
            raise ZeroDivisionError
        honest(loop)

    monkeypatch.setattr(Loop, "backward_begin", fail_once)
    client = torchperfd.attach()
    model = tiny_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(4))
    counted = calls(client)
    assert (counted["data"], counted["forward"], counted["backward"]) == (3, 3, 3)
    assert client.parts.instruments.faults.counts() == {"hook backward": 1}
    assert client.parts.instruments.buffer.thread
    totals = client.report().totals.train
    assert sum(phase.ns for phase in totals.phases) == totals.ns


def test_a_watcher_that_fails_disturbs_nothing(undisturbed: Outcome, client: torchperfd.Client) -> None:
    class Broken:
        def train_edge(self, next_index: int) -> None:
            raise ZeroDivisionError

        def validate_edge(self) -> None:
            raise ZeroDivisionError

    client.parts.instruments.replay.watch(Broken())
    assert_same(outcome(), undisturbed)
    client.report()
    assert client.parts.instruments.faults.counts()["hook draw"] == LIMIT
    assert not client.parts.instruments.buffer.thread
    client.parts.instruments.replay.loop.watcher = None
    client.parts.instruments.replay.leave()


def test_an_explicit_step_that_fails_is_counted_not_raised(
    client: torchperfd.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loop, "client_step", lambda *_: 1 / 0)
    client.step(samples=3)
    client.report()
    assert client.parts.instruments.faults.counts() == {"hook step": 1}


@pytest.mark.parametrize("callback", ["draw_begin", "draw_end", "draw_stop"])
def test_wrapping_an_iterable_hands_on_its_items_whatever_we_do(
    monkeypatch: pytest.MonkeyPatch, callback: str
) -> None:
    monkeypatch.setattr(Loop, callback, lambda *_: 1 / 0)
    client = torchperfd.attach()
    for _ in range(12):
        assert list(client.wrap(range(5))) == [0, 1, 2, 3, 4]
    client.report()
    assert client.parts.instruments.faults.counts() == {"hook draw": LIMIT}


def test_wrapping_an_iterable_hands_on_its_errors(client: torchperfd.Client) -> None:
    def broken() -> Any:
        yield 1
        raise OSError("disk")

    items = client.wrap(broken())
    assert next(items) == 1
    with pytest.raises(OSError, match="disk"):
        next(items)
    assert open_phases(client) == 0


def test_wrapping_survives_batches_that_cannot_even_be_looked_at(client: torchperfd.Client) -> None:
    class Hostile:
        @property
        def shape(self) -> Any:
            raise RuntimeError("look away")

    batch = Hostile()
    assert list(client.wrap([batch])) == [batch]
    assert open_phases(client) == 0


def test_flusher_ten_failures_gives_up_and_training_goes_on(
    undisturbed: Outcome, client: torchperfd.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchperfd.link.flusher.next_flush", lambda _: NextFlush(1e-6))
    monkeypatch.setattr(client.parts.flusher, "flush", lambda **_: 1 / 0)
    client.parts.flusher.wake()
    eventually(lambda: "torchperfd-flusher" not in {each.name for each in threading.enumerate()}, 20)
    assert client.parts.instruments.faults.counts() == {"flusher": LIMIT}
    monkeypatch.undo()
    assert_same(outcome(), undisturbed)
    assert calls(client)["steps"] == 2 * EPOCHS


def test_client_that_cannot_be_made_is_replaced_by_a_no_op(
    undisturbed: Outcome, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no threads left")

    monkeypatch.setattr("torchperfd.link.flusher.Flusher.start", fail)
    client = torchperfd.attach()
    assert not client.attached
    assert "torchperfd cannot attach; training goes on without it" in caplog.text
    assert_same(outcome(), undisturbed)
    with client.phase("augment"):
        client.step()
    assert list(client.wrap([1])) == [1]
    assert str(client.report()) == "rank 0: no step was seen"
    with pytest.raises(torchperfd.CaptureError, match="detached"):
        client.capture()
    client.finish()
    client.detach()


FORK = """
import os, sys
import torch
import torchperfd
from tests.unit.client.training import calls, loader, tiny_model, train

model = tiny_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
client = torchperfd.attach(run="mine")
train(model, optimizer, loader(2))
client.report()  # all that is on the ring buffer has been read
recorder = client.parts.instruments.replay.recorder
before = recorder.recorded

def fork(leave):
    child = os.fork()
    if child == 0:
        train(model, optimizer, loader(3))
        with client.phase("augment"):
            client.step()
        list(client.wrap([1, 2]))
        client.finish()
        client.detach()
        assert not client.attached
        assert recorder.recorded == before, "a child has recorded"
        leave()
    _, status = os.waitpid(child, 0)
    print("child", os.waitstatus_to_exitcode(status), flush=True)

fork(lambda: sys.exit(0))
fork(lambda: os._exit(0))
fork(lambda: sys.exit(7))
train(model, optimizer, loader(3))
print("parent", calls(client)["steps"], client.attached)
"""


def test_a_forked_child_records_nothing_and_leaves_as_it_likes() -> None:
    # From 3.12 on Python warns of any fork beside another thread, such as the one that reports.
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK],
        cwd=Path(__file__).parents[3],  # where the package `tests` is found
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["child 0", "child 0", "child 7", "parent 5 True"]
    assert done.returncode == 0


class Spy(Dataset[Any]):
    """Tells from inside a worker whether anything is recorded there; draws from a loader of its own."""

    def __init__(self, client: torchperfd.Client) -> None:
        self._client = client

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        recorder = self._client.parts.instruments.replay.recorder
        before = recorder.recorded, recorder.is_open, recorder.last
        for _ in loader(2):
            pass
        touched = (recorder.recorded, recorder.is_open, recorder.last) != before
        return torch.ones(4), torch.tensor([float(touched), float(self._client.attached)])


def test_forked_workers_record_no_draws_of_their_own(client: torchperfd.Client) -> None:
    model = tiny_model()
    workers = DataLoader(Spy(client), batch_size=2, num_workers=2, multiprocessing_context="fork")
    reported: list[Any] = []

    def batches() -> Any:
        for inputs, spied in workers:
            reported.append(spied)
            yield inputs, spied

    train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches())
    assert torch.equal(torch.cat(reported), torch.zeros(8, 2))
    assert calls(client) == per_step(4)
    assert client.report().totals.train.samples == 8


def test_nested_loaders_without_workers_are_one_draw(client: torchperfd.Client) -> None:
    model = tiny_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Spy(client), batch_size=2))
    assert calls(client) == per_step(4)


def test_attaching_inside_a_worker_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data.get_worker_info", lambda: object())
    client = torchperfd.attach()
    assert not client.attached
    # One client per worker: they shall not pay for a ring.
    assert client.parts.instruments.replay.recorder.ring.capacity == 16
    client.step()
    assert str(client.report()) == "rank 0: no step was seen"
