"""A model in two pipeline stages, each of half of the ranks, on the simulated device."""

from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist
from benchmarks.faults.catalog import STAGES
from benchmarks.faults.models import Kernels, blocks_of
from benchmarks.simulated_device import Device
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

MICRO_BATCHES: Final = 4
_BLOCKS_OF_FIRST: Final = 2


class Pipeline:
    """One rank's stage. The ranks of a stage average their gradients.

    Args:
        kind: What the model is made of, such as ``mlp``.
        device: What kernels run on.
        seconds: What the kernels of a step take in the mean.
        seed: Of their scatter.
        extra: Called in the first forward of every step.

    Attributes:
        model: The stage's part of the model.
    """

    def __init__(
        self, kind: str, device: Device, seconds: float, seed: int, extra: Callable[[], None]
    ) -> None:
        mesh = init_device_mesh("cpu", (STAGES, dist.get_world_size() // STAGES), mesh_dim_names=("pp", "dp"))
        stage = mesh["pp"].get_local_rank()
        self._is_last = stage == STAGES - 1
        self._replicas = mesh["dp"].get_group()
        self._extra = extra
        self._has_begun = False
        torch.manual_seed(0)
        blocks = blocks_of(kind)
        own = blocks[_BLOCKS_OF_FIRST:] if self._is_last else blocks[:_BLOCKS_OF_FIRST]
        self.model = nn.Sequential(*own, Kernels(device, seconds / MICRO_BATCHES, seed, self._in_forward))
        self._schedule = ScheduleGPipe(
            PipelineStage(self.model, stage, STAGES, torch.device("cpu"), group=mesh["pp"].get_group()),
            n_microbatches=MICRO_BATCHES,
            loss_fn=nn.CrossEntropyLoss(),
        )

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward of one batch; return its loss, which only the last stage knows."""
        self._has_begun = False
        losses: list[Tensor] = []
        if self._is_last:
            self._schedule.step(target=targets, losses=losses)
        else:
            self._schedule.step(inputs)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self._replicas)
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    def _in_forward(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._extra()
