"""Every kind of loader draws once per batch, whatever serves it."""

import json
import os
import subprocess
import sys
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.node import side_by_side
from tests.unit.client.training import per_step

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

# Two epochs of three batches each; worker processes of spawn and forkserver import this file anew.
SCRIPT = """
import itertools, json, sys, torch, torchperfd
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from tests.unit.client.training import tiny_model, train

class Map(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return torch.full((4,), float(index)), torch.ones(2)

class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        own = range(6) if info is None else range(info.id, 6, info.num_workers)
        return iter([(torch.full((4,), float(index)), torch.ones(2)) for index in own])

def main():
    client = torchperfd.attach()
    Loader = DataLoader
    if sys.argv[1] == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader as Loader
    data, size = (Stream(), 1) if sys.argv[1] == "stream" else (Map(), 2)
    runs = []
    for workers, start, persistent in json.loads(sys.argv[2]):
        options = {"num_workers": workers}
        if workers:
            options.update(persistent_workers=persistent, multiprocessing_context=start)
        batches = Loader(data, batch_size=size, **options)
        model = tiny_model()
        torchperfd.attach(model=model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = client.report().totals.train
        for _ in range(2):
            train(model, optimizer, batches)
        account = client.report().totals
        run = account.train.minus(before)
        names = client.parts.instruments.names
        calls = {names.name(slot): run.phases[slot].calls for slot in range(len(names))}
        runs.append({
            "steps": run.steps, **{name: count for name, count in calls.items() if count},
            "samples": run.samples, "adds up": sum(phase.ns for phase in run.phases) == run.ns,
            "workers seen": account.loader_ready is not None,
        })
        del batches
    print(json.dumps({"runs": runs, "faults": client.parts.instruments.faults.counts()}))

if __name__ == "__main__":
    main()
"""

WORKERS: list[list[Any]] = [
    [0, None, False],
    *([2, start, persistent] for start in ("fork", "spawn", "forkserver") for persistent in (False, True)),
]


# Starting a worker anew takes a second and more: of the other kinds, one start method each.
FEWER = [WORKERS[0], WORKERS[1], WORKERS[4]]
KINDS = {"map": WORKERS, "stream": FEWER, "stateful": FEWER}
Reported = dict[str, Future[dict[str, Any]]]


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Reported:
    """The script's report on each kind; all at once, since it mostly waits for one worker to start."""
    script = tmp_path_factory.mktemp("loaders") / "script.py"
    script.write_text(SCRIPT)

    def play(kind: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, str(script), kind, json.dumps(KINDS[kind])],
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))},
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    return side_by_side({kind: partial(play, kind) for kind in KINDS})


@pytest.mark.parametrize("kind", KINDS)
def test_loaders(kind: str, reported: Reported) -> None:
    if kind == "stateful":
        pytest.importorskip("torchdata")
    document = reported[kind].result()
    assert document["faults"] == {}
    steps = 2 * 6 if kind == "stream" else 2 * 3
    expected = {**per_step(steps), "samples": 12, "adds up": True}
    for (count, *_), run in zip(KINDS[kind], document["runs"], strict=True):
        workers_seen = run.pop("workers seen")
        assert workers_seen or not count
        assert run == expected
