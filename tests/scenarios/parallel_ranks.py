"""One rank of four: two pipeline stages, each of two tensor-parallel ranks; the second stage works longer.

torchrun … -m torchperfd run tests/scenarios/parallel_ranks.py SECONDS STEPS
"""

import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 32
BATCH = 16
MICRO_BATCHES = 4


class Pause(nn.Module):
    """Waits in the forward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the inputs, later."""
        time.sleep(self._seconds)
        return inputs


def main(seconds: float, steps: int) -> None:
    """Train; the second stage waits so long in each of the four micro-batches of a step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage = mesh["pp"].get_local_rank()
    torch.manual_seed(0)
    block = nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH), Pause(seconds * stage)
    )
    parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    schedule = ScheduleGPipe(
        PipelineStage(block, stage, 2, torch.device("cpu"), group=mesh["pp"].get_group()),
        n_microbatches=MICRO_BATCHES,
        loss_fn=nn.functional.mse_loss,
    )
    optimizer = torch.optim.SGD(block.parameters(), lr=0.01, foreach=False)
    data = TensorDataset(torch.randn(BATCH * steps, WIDTH), torch.randn(BATCH * steps, WIDTH))
    for inputs, targets in DataLoader(data, batch_size=BATCH):
        optimizer.zero_grad()
        if stage == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
