"""Children: forked ones record nothing and end as they would have without us."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.client.training import calls, loader, per_step, tiny_model, train
from torch.utils.data import DataLoader, Dataset

import torchperfd

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
