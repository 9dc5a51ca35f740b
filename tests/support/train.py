"""A small model that trains as its options say: the script of tests that need some job, not a particular one.

Run it with :meth:`tests.support.node.Node.train`. Arguments that it doesn't know are ignored.
"""

import argparse
import itertools
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def batches(in_epoch: int, workers: int) -> Iterator[torch.Tensor]:
    """Yield batches of a loader, epoch after epoch; without one if no number of batches is given."""
    if not in_epoch:
        yield from itertools.repeat(torch.randn(16, 32))
    data = TensorDataset(torch.randn(16 * in_epoch, 32))
    while True:
        for (inputs,) in DataLoader(data, batch_size=16, num_workers=workers):
            yield inputs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, help="how many; without it, until killed")
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--epoch", type=int, default=0, help="batches in an epoch of a loader")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    options, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    model: nn.Module = nn.Linear(32, 4)
    if options.ddp:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs in itertools.islice(batches(options.epoch, options.workers), options.steps):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
        time.sleep(options.pause)
    if options.ddp:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
