"""How a training process uses its loader, what a batch costs between processes, and advice on it. Pure."""

from dataclasses import dataclass, fields
from typing import Annotated, Final

from torchperfd.model.messages import Evidence, Wire
from torchperfd.model.source_lines import InputStages

MAX_WORKERS: Final = 16
"""More are never advised: what takes longer wants cheaper items."""

# No figure of a loader is larger: bytes of a batch.
_MAX_FIGURE: Final = float(1 << 50)
# Workers that wait for a CPU for a larger share of their time compete for CPUs.
CROWDED: Final = 0.1
# Workers that wait for work for a larger share of their time are no reason for a wait for data.
MOSTLY_IDLE: Final = 0.5
# Workers start anew in each pass once an iterator has started its own so often.
_MIN_STARTS: Final = 3


@dataclass(frozen=True, slots=True)
class WorkerCost:
    """What it costs to move one batch from a worker to the training process, in seconds.

    Attributes:
        receive: Wall time of the training thread for any batch, of one that is ready.
        receive_tensor: More for each tensor.
        receive_byte: More for each byte.
        send: CPU time of the worker for any batch.
        send_tensor: More for each tensor.
        send_byte: More for each byte.
    """

    receive: float
    receive_tensor: float
    receive_byte: float
    send: float
    send_tensor: float
    send_byte: float

    def receiving(self, tensors: int, size: int) -> float:
        """Return what the training thread needs for a batch of so many tensors and bytes."""
        return self.receive + tensors * self.receive_tensor + size * self.receive_byte

    def sending(self, tensors: int, size: int) -> float:
        return self.send + tensors * self.send_tensor + size * self.send_byte


UNMEASURED_COST: Final = WorkerCost(0.3e-3, 0.3e-3, 0.3e-9, 0.3e-3, 0.2e-3, 0.5e-9)
"""Default for a machine on which it was not measured: a high estimate."""


@dataclass(frozen=True, slots=True)
class LoaderFacts:
    """How a training process uses its loader: means of samples; None or 0 where unknown.

    The client samples them while it trains, ``bench`` while it measures; the wire and a trace carry them.

    Attributes:
        cpus: CPUs that the process may use: affinity, control group's quota, and its share of the node's.
        draw_cpu: The share of a draw in the training process that is CPU time, 0 to 1; without the time in
            which the thread was ready to run and had no CPU.
        rest_cpus: CPUs that the process uses on average between draws.
        batch_size: Samples that the loader puts into a batch; 0 where it does not choose them itself.
        receive_seconds: What a draw takes when the workers have a batch ready.
        worker_cpu_seconds: CPU time of the workers' main threads for each batch.
        worker_queued: The share of the workers' time in which they were ready to run without a CPU.
        indexable: The dataset is a plain ``TensorDataset``, collated and sampled in torch's usual ways.
        shuffles: Its sampler is torch's ``RandomSampler``.
        batches_per_step: Draws in a training step; 0 where unknown, which counts as one.
        queued: The share of the time in which the training thread was ready to run that it had no CPU.
        starts: How often an iterator has started workers of its own.
        start_seconds: What such a start takes to the first batch; without the first one.
        starts_per_step: How often in a training step.
        slow_worker: The worker for which finished batches of the others wait; None if none stands out.
    """

    workers: int = 0
    cpus: float | None = None
    draw_cpu: float | None = None
    rest_cpus: float | None = None
    batch_tensors: int = 0
    batch_bytes: int = 0
    batch_size: int = 0
    receive_seconds: float | None = None
    worker_cpu_seconds: float | None = None
    worker_queued: float | None = None
    indexable: bool = False
    shuffles: bool = False
    batches_per_step: float = 0.0
    queued: float | None = None
    stages: InputStages | None = None
    starts: int = 0
    start_seconds: float | None = None
    starts_per_step: float = 0.0
    slow_worker: int | None = None

    @property
    def idle(self) -> float:
        """The share of the workers' time in which they wait for indices; 0 if unknown."""
        return (self.stages.idle or 0.0) if self.stages is not None else 0.0

    @property
    def respawns_workers(self) -> bool:
        """Whether each pass over the loader starts workers of its own, once a few passes have."""
        return self.workers > 0 and self.starts >= _MIN_STARTS

    @property
    def handover_seconds(self) -> float:
        """What handing a batch over takes both sides: a ready batch's draw, and sending; 0 if unknown."""
        sending = (self.stages.send_seconds or 0.0) if self.stages is not None else 0.0
        return (self.receive_seconds or 0.0) + sending if self.workers else 0.0

    @property
    def costs_more_to_hand_over(self) -> bool:
        """Whether workers take longer to hand a batch over than to make it, and wait most of their time."""
        making = self.stages.making_seconds if self.stages is not None else 0.0
        return self.idle >= MOSTLY_IDLE and 0 < making < self.handover_seconds

    def is_sound(self) -> bool:
        """Return whether all figures are such as a loader can have; they come from a wire or from a file."""
        figures = [getattr(self, each.name) for each in fields(self) if each.name != "stages"]
        if self.stages is not None:
            figures += [getattr(self.stages, each.name) for each in fields(self.stages)]
        return all(0 <= each < _MAX_FIGURE for each in figures if each is not None)


@dataclass(frozen=True, slots=True)
class LoaderAdvice:
    """A setting of the loader that makes the step shorter.

    Attributes:
        rule: ``loader-workers``, ``persistent-workers`` or ``whole-batches``.
        workers: ``num_workers`` to set; 0 where batches are better made in the training process.
        saves_seconds: By how much that is less than now.
        change: What to do, one imperative sentence.
        assumes: The assumption that was not measured, or why there may be more workers than CPUs; empty for
            none.
    """

    rule: str
    workers: int
    step_seconds: Annotated[float, Wire("advised_step_seconds")]
    saves_seconds: float
    change: Evidence
    setting: Evidence
    assumes: Evidence = ""
