"""DataLoader workers and other children under a live stream: silent, harmless, gone on time."""

import sys
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import pytest
from tests.support.node import Node, eventually, new_node, side_by_side

pytestmark = [pytest.mark.slow, pytest.mark.serial]

SCRIPT = """
import os, sys, time, torch, torchperfd
from torch.utils.data import DataLoader, Dataset
class Squares(Dataset):
    def __len__(self): return 32
    def __getitem__(self, index):
        import torchperfd.attachment
        assert not torchperfd.attachment.attach().attached, "a worker has attached"
        return torch.tensor([float(index)] * 8)
client = torchperfd.attach()  # at the top, where spawned workers come by too
if __name__ == "__main__":
    deadline = time.monotonic() + 20
    while not client.connected:
        assert time.monotonic() < deadline, "no daemon"
        time.sleep(0.05)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for repetition in range(int(sys.argv[2])):
        loader = DataLoader(Squares(), batch_size=8, num_workers=1, multiprocessing_context=sys.argv[1])
        batches = iter(loader)
        workers = batches._workers
        for x in batches:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        del batches
        for worker in workers:
            worker.join(20)
            assert worker.exitcode == 0, worker.exitcode
        assert client.connected
    if sys.argv[1] == "fork":
        child = os.fork()
        if child == 0:
            sys.exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    report = client.report()
    assert report.totals.train.steps == 4 * int(sys.argv[2]), report
    assert not client.parts.instruments.faults.counts()
    client.detach()
"""


METHODS = {"fork": 20, "spawn": 8, "forkserver": 8}
"""How many loaders are made, by start method: a worker that is no fork of a live stream imports torch."""


class Outcome(NamedTuple):
    """How the script ended, and the daemon's report of its run at that moment."""

    code: int
    words: str
    steps: float | None
    ranks: int


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, dict[str, Future[Outcome]]]]:
    """A node, and how the script ended on it; all start methods at once, each its own run."""
    script = tmp_path_factory.mktemp("workers") / "workers.py"
    script.write_text(SCRIPT)
    with new_node() as node:
        node.start_daemon()

        def play(method: str) -> Outcome:
            command = (sys.executable, str(script), method, str(METHODS[method]))
            with node.running(*command, TORCHPERFD_RUN=method) as process:
                output, errors = process.communicate(timeout=380)
            steps = node.metric(f'torchperfd_train_steps_total{{rank="0",run="{method}"}}')
            ranks = [rank for run in node.json("ps")["runs"] if run["run"] == method for rank in run["ranks"]]
            return Outcome(process.returncode, output + errors, steps, len(ranks))

        yield node, side_by_side({method: partial(play, method) for method in METHODS})


@pytest.mark.timeout(400)
@pytest.mark.parametrize("method", METHODS)
def test_workers_record_nothing_print_nothing_and_exit(
    ended: tuple[Node, dict[str, Future[Outcome]]], method: str
) -> None:
    node, reported = ended
    assert reported[method].result() == Outcome(code=0, words="", steps=4 * METHODS[method], ranks=1)
    eventually(lambda: node.metric("torchperfd_clients") == 0, 5, node.log)
