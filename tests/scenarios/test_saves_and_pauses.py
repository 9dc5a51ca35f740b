"""What is no step and accounted for all the same: checkpoints, garbage, waiting batches."""

import gc
import io
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.scenarios.accounts import calls
from tests.scenarios.spy import Events
from tests.unit.client.training import loader, per_step, tiny_model, tiny_training, train

import torchperfd
from torchperfd.hooks.pauses import GcPauses
from torchperfd.v1 import session_pb2

pytestmark = pytest.mark.slow


class Slow:
    """Takes its time to be pickled."""

    seconds = 0.05

    def __reduce__(self) -> Any:
        time.sleep(self.seconds)
        return (Slow, ())


def plain_step(model: Any, optimizer: Any, batch: Any) -> None:
    train(model, optimizer, [batch])


def test_checkpoint_between_epochs_is_in_totals_and_in_no_step(
    client: torchperfd.Client, events: Events, tmp_path: Path
) -> None:
    model, optimizer = tiny_training()
    for epoch in range(2):
        train(model, optimizer, loader(1))
        torch.save({"model": model.state_dict(), "slow": Slow()}, tmp_path / f"{epoch}.pt")
    epoch_events = "data() zero() forward() backward() optimizer() data(end) save()"
    assert events.take() == f"{epoch_events} {epoch_events}"
    assert calls(client) == per_step(2)
    account = client.report().totals
    assert account.checkpoint.calls == 2
    assert account.checkpoint.seconds >= 2 * Slow.seconds
    assert account.checkpoint.std_seconds < account.checkpoint.mean_seconds


def test_a_checkpoint_within_an_epoch_is_a_phase_of_its_step(client: torchperfd.Client) -> None:
    model, optimizer = tiny_training()
    for number, batch in enumerate(loader(3)):
        plain_step(model, optimizer, batch)
        if number == 1:
            torch.save(Slow(), io.BytesIO())
    assert calls(client) == per_step(3, checkpoint=1)
    account = client.report().totals
    assert account.train.phases[client.parts.instruments.names.slot("checkpoint")].seconds >= Slow.seconds
    assert account.checkpoint.calls == 0


def test_a_save_that_fails_has_ended(client: torchperfd.Client, tmp_path: Path) -> None:
    for _ in range(2):
        try:
            torch.save(1, tmp_path / "missing" / "directory.pt")
        except (RuntimeError, OSError):
            continue
    assert client.parts.instruments.replay.loop.saving == 0
    assert client.report().totals.checkpoint.calls == 2


_IMPORTED_LATE = """
import json, sys
import torch
import torchperfd
from tests.unit.client.training import loader, tiny_model

client = torchperfd.attach()
name = "torch.distributed.checkpoint"
assert name not in sys.modules
model = tiny_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, (inputs, targets) in enumerate(loader(3)):
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()
    if number == 1:
        from torch.distributed.checkpoint import async_save, save

        save({"model": model.state_dict()}, checkpoint_id=sys.argv[1] + "/one", no_dist=True)
        async_save({"model": model.state_dict()}, checkpoint_id=sys.argv[1] + "/two", no_dist=True).result()
totals = client.report().totals
saves = totals.train.phases[client.parts.instruments.names.slot("checkpoint")].calls
client.detach()
from torch.distributed.checkpoint import state_dict_saver as saver
restored = sys.modules[name].save is saver.save is save.__wrapped__
print(json.dumps([saves, totals.background_saves.calls, restored]))
"""


def test_checkpoints_imported_in_the_loop_are_timed(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _IMPORTED_LATE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    # It writes with torch.save inside: one save all the same.
    assert json.loads(run.stdout) == [2, 1, True]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_another_thread_saves_is_beside_the_steps(client: torchperfd.Client) -> None:
    model = tiny_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(2))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(torch.save, Slow(), io.BytesIO()).result()
    account = client.report().totals
    assert (account.background_saves.calls, account.checkpoint.calls) == (1, 0)
    assert account.background_saves.seconds >= Slow.seconds
    assert "checkpoints in the background: 1" in str(client.report())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_async_save_is_beside_the_steps_until_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as distributed
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    held, go_on = threading.Event(), threading.Event()

    class Writer(FileSystemWriter):
        def finish(self, *args: Any, **kwargs: Any) -> None:
            held.set()
            assert go_on.wait(30)
            super().finish(*args, **kwargs)

    original = vars(distributed)["async_save"]
    client = torchperfd.attach()
    model = tiny_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(1))
    future = vars(distributed)["async_save"](
        {"model": model.state_dict()}, storage_writer=Writer(tmp_path / "sharded"), no_dist=True
    )
    assert held.wait(30)
    time.sleep(Slow.seconds)
    under_way = client.report().totals
    go_on.set()
    future.result()
    over = client.report().totals
    time.sleep(Slow.seconds)
    later = client.report().totals
    # Staging is what the training thread waits for.
    assert (under_way.checkpoint.calls, under_way.background_saves.calls) == (1, 1)
    assert Slow.seconds <= under_way.background_saves.seconds <= over.background_saves.seconds
    assert later.background_saves.ns == over.background_saves.ns
    client.detach()
    assert vars(distributed)["async_save"] is original


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_threads_that_write_for_a_waiting_loop_are_not_beside_it(
    client: torchperfd.Client, tmp_path: Path
) -> None:
    import torch.distributed.checkpoint as distributed
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    model = tiny_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(1))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(1))
    writer = FileSystemWriter(tmp_path / "sharded", single_file_per_rank=False, thread_count=2)
    vars(distributed)["save"]({"model": model.state_dict()}, storage_writer=writer)
    account = client.report().totals
    assert (account.checkpoint.calls, account.background_saves.calls) == (1, 0)


def test_the_run_is_checkpointing_while_it_saves(client: torchperfd.Client) -> None:
    said: list[int] = []
    client.parts.flusher.announce = said.append  # type: ignore[method-assign,assignment]

    class Looks:
        def __reduce__(self) -> Any:
            client.report()
            return (int, ())

    model = tiny_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(2))
    torch.save(Looks(), io.BytesIO())
    client.report()
    assert said[-3:] == [
        session_pb2.RUN_STATE_TRAINING,
        session_pb2.RUN_STATE_CHECKPOINTING,
        session_pb2.RUN_STATE_TRAINING,
    ] or said[-2:] == [session_pb2.RUN_STATE_CHECKPOINTING, session_pb2.RUN_STATE_TRAINING]


def test_collections_are_counted_by_generation(client: torchperfd.Client) -> None:
    def oldest() -> tuple[int, int]:
        account = client.report().totals.gc[2]
        return account.calls, account.ns

    gc.disable()
    try:
        model, optimizer = tiny_training()
        for _ in range(5):
            gc.collect()  # before training: none of it is training's
        assert oldest() == (0, 0)
        train(model, optimizer, loader(2))
        assert oldest() == (0, 0)
        for _ in range(3):
            gc.collect()
        train(model, optimizer, loader(2))
        calls, ns = oldest()
        assert calls == 3
        assert ns > 0
        for _ in range(2):
            gc.collect()  # after it
        assert oldest() == (3, ns)
    finally:
        gc.enable()
    client.detach()
    assert not any("torchperfd" in each.__module__ for each in gc.callbacks)


def test_pauses_are_counted_from_a_start_only() -> None:
    now = [0]
    pauses = GcPauses(clock=lambda: now[0])
    for phase, time_ns in (
        ("stop", 5),
        ("start", 10),
        ("stop", 17),
        ("stop", 30),
        ("start", 40),
        ("stop", 41),
    ):
        now[0] = time_ns
        for callback in pauses.callbacks:
            callback(phase, {"generation": 1})
    assert [(each.generation, each.ns) for each in pauses.take()] == [(1, 7), (1, 1)]
    pauses.install()
    pauses.install()
    assert [gc.callbacks.count(callback) for callback in pauses.callbacks] == [1, 1, 1]
    pauses.uninstall()
    pauses.uninstall()
    assert not any(callback in gc.callbacks for callback in pauses.callbacks)


def test_ready_batches_are_reported_only_with_workers(client: torchperfd.Client) -> None:
    model, optimizer = tiny_training()
    train(model, optimizer, loader(2))
    assert client.report().totals.loader_ready is None
    batches = loader(8, num_workers=1, prefetch_factor=4, multiprocessing_context="fork")
    seen = []
    for batch in batches:
        plain_step(model, optimizer, batch)
        time.sleep(0.1)
        seen.append(client.report().totals.loader_ready)
    assert max(each for each in seen if each is not None) >= 1
