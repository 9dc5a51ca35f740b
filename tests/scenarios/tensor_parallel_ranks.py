"""One rank of a tensor-parallel job in which the last rank is slow.

torchrun … -m torchperfd run tests/scenarios/tensor_parallel_ranks.py SECONDS STEPS
"""

import sys

import torch
import torch.distributed as dist
from tests.scenarios.parallel_ranks import BATCH, WIDTH, Pause
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

USUAL_S = 0.02


def main(seconds: float, steps: int) -> None:
    """Train; the last rank's forward takes so much longer."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    block = nn.Sequential(
        Pause(USUAL_S + seconds * (rank == world - 1)),
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.ReLU(),
        nn.Linear(2 * WIDTH, WIDTH),
    )
    parallelize_module(block, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    optimizer = torch.optim.SGD(block.parameters(), lr=0.01, foreach=False)
    data = TensorDataset(torch.randn(BATCH * steps, WIDTH), torch.randn(BATCH * steps, WIDTH))
    for inputs, targets in DataLoader(data, batch_size=BATCH):
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(block(inputs), targets))
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
