"""One rank of a DDP job that is late in every other block of steps: ``torchrun … whatif_ranks.py``."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torchperfd

STEPS = 192
CULPRIT = 1
WORK_S = 0.06
LATE_S = 0.02
_BLOCK = 8


def is_late(step: int) -> bool:
    """Return whether the culprit is late in a step, by its index."""
    return step // _BLOCK % 2 == 1


def main() -> None:
    torch.set_num_threads(1)
    client = torchperfd.attach()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(STEPS * 4, 32)
    data = DataLoader(TensorDataset(inputs, inputs[:, 0].abs().long().clamp(max=3)), batch_size=4)
    for step, (batch, targets) in enumerate(data):
        loss = nn.functional.cross_entropy(model(batch), targets)
        # Work that needs no processor, so that what else runs on the machine matters less.
        time.sleep(WORK_S + (LATE_S if dist.get_rank() == CULPRIT and is_late(step) else 0.0))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    client.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
