"""DataLoader workers and other children under a live stream: silent, harmless, gone on time."""

import sys
from pathlib import Path

import pytest
from tests.node import Node, eventually

SCRIPT = """
import os, sys, torch, torchperfd
from torch.utils.data import DataLoader, Dataset
class Squares(Dataset):
    def __len__(self): return 32
    def __getitem__(self, index):
        import torchperfd.client
        assert not torchperfd.client.attach().attached, "a worker has attached"
        return torch.tensor([float(index)] * 8)
client = torchperfd.attach()  # at the top, where spawned workers come by too
if __name__ == "__main__":
    assert client._stream.wait_connected(20)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for repetition in range(20):
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
    assert report.account.train.steps == 80, report
    assert not client._faults.counts()
    client.detach()
"""


@pytest.mark.timeout(400)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_record_nothing_print_nothing_and_exit(node: Node, tmp_path: Path, method: str) -> None:
    script = tmp_path / "workers.py"
    script.write_text(SCRIPT)
    node.start_daemon()
    with node.running(sys.executable, str(script), method) as process:
        output, errors = process.communicate(timeout=380)
    assert process.returncode == 0, errors
    assert output + errors == ""
    assert node.metric("torchperfd_train_steps_total{") == 80
    (run,) = node.json("ps")["runs"]
    assert len(run["ranks"]) == 1
    eventually(lambda: node.metric("torchperfd_clients") == 0, 5, node.log)
