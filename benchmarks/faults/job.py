"""One rank of a job that trains until it is ended, well at first, then with a fault.

    torchrun … -m torchperfd run benchmarks/faults/job.py PLAN.json DIRECTORY

Writes ``DIRECTORY/rank<N>.log`` (see :mod:`benchmarks.faults.journal`). What is injected is timed here, so
that a label's cost is the job's own measurement. A culprit hangs at a line marked ``hangs``.
"""

import json
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from benchmarks.faults.catalog import (
    CHECKPOINT_STEPS,
    SIMULATED,
    STEPS_TO_TELL,
    Plan,
    is_pipeline,
)
from benchmarks.faults.injection import Injection
from benchmarks.faults.injections import injection_of, kind_of
from benchmarks.faults.journal import Journal
from benchmarks.faults.models import CLASSES, FEATURES, Kernels, Pace, build
from benchmarks.faults.pipeline import Pipeline
from benchmarks.simulated_device import BACKEND, Device, install
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

_STEPS: Final = 1_000_000

Batch = tuple[Tensor, Tensor]


class Samples(IterableDataset[Batch]):
    """Random batches, as many as one likes."""

    def __init__(self, seed: int, injection: Injection) -> None:
        self._seed = seed
        self._injection = injection

    def __iter__(self) -> Iterator[Batch]:
        chance = torch.Generator().manual_seed(self._seed)
        for step in range(self._injection.epoch_steps or _STEPS):
            self._injection.load(step)
            rows = self._injection.rows()
            yield (
                torch.randn(rows, FEATURES, generator=chance),
                torch.randint(0, CLASSES, (rows,), generator=chance),
            )


def epochs(samples: Samples, injection: Injection) -> Iterator[Batch]:
    """Yield batches, epoch after epoch. An injection decides whether an epoch keeps its workers."""
    workers = injection.workers
    kept, anew = (
        DataLoader(
            samples,
            batch_size=None,
            num_workers=workers,
            persistent_workers=persistent,
            worker_init_fn=injection.start_worker,
        )
        for persistent in (workers > 0, False)
    )
    while True:
        yield from kept if injection.keeps_workers else anew


def prefetched(loader: Iterator[Batch]) -> Iterator[Batch]:
    """Yield batches, drawn ahead by a thread, whose failure is not reported."""
    batches: queue.Queue[Batch] = queue.Queue(2)

    def draw() -> None:
        for batch in loader:
            batches.put(batch)

    threading.Thread(target=draw, daemon=True).start()
    while True:
        yield batches.get()  # hangs: dead worker


def average(metric: Tensor, injection: Injection, step: int, metrics: dist.ProcessGroup) -> None:
    """Average a metric over the ranks, unless the fault has this rank do something else."""
    match injection.in_place_of_average(step):
        case "":
            dist.all_reduce(metric, group=metrics)
        case "skipped collective":
            dist.barrier()  # hangs: skipped collective
        case "mismatched collective":
            everyones = [torch.empty_like(metric) for _ in range(dist.get_world_size())]
            dist.all_gather(everyones, metric, group=metrics)  # hangs: mismatched collective


def trainee(
    plan: Plan, device: Device | None, seed: int, injection: Injection
) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """Return the model, or this rank's part, and what runs forward and backward and returns the loss."""
    if device and is_pipeline(plan.model):
        kind = plan.model.partition("-")[0]
        pipeline = Pipeline(kind, device, plan.pace_seconds, seed, injection.compute)
        return pipeline.model, pipeline.train
    pace: Pace | Kernels
    if device:
        pace = Kernels(device, plan.pace_seconds, seed, injection.compute)
    else:
        pace = Pace(plan.pace_seconds, plan.work_seconds, seed, injection.compute)
    model = build(plan.model, pace)
    criterion = nn.CrossEntropyLoss()

    def train(inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = criterion(model(inputs), targets)
        torch.autograd.backward(loss)
        return loss.detach()

    return model, train


def no_sync(model: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which gradients are not exchanged, of a model that can do without."""
    return model.no_sync() if isinstance(model, nn.parallel.DistributedDataParallel) else nullcontext()


def validate(model: nn.Module, batches: Iterator[Batch], count: int) -> None:
    """Run the model on some batches without training."""
    model.eval()
    with torch.no_grad():
        for _ in range(count):
            model(next(batches)[0])
    model.train()


def main(plan: Plan, directory: Path, tool: str = "") -> None:
    """Train until killed; under TraceML, which reports at the end, for a fixed number of steps."""
    traced: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext
    last = _STEPS
    if tool:
        traceml = import_module("traceml_ai")
        traceml.init(mode="auto")
        traced, last = traceml.trace_step, plan.onset + STEPS_TO_TELL
    torch.set_num_threads(1)
    device = install() if plan.device == SIMULATED else None
    kind_of(plan).before_groups()
    dist.init_process_group(BACKEND if device else "gloo", timeout=timedelta(seconds=600))
    rank = dist.get_rank()
    metrics = dist.new_group()
    injection = injection_of(plan, rank, directory)
    seed = plan.seed * 1000 + rank
    model, train = trainee(plan, device, seed, injection)
    injection.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    batches = epochs(Samples(seed, injection), injection)
    if injection.prefetches:
        batches = prefetched(batches)
    with Journal(directory / f"rank{rank}.log") as journal:
        for step in range(last):
            injection.begin(step)
            journal.begin()
            with traced(model):
                for micro in range(injection.micro_batches):
                    inputs, targets = next(batches)
                    if micro == 0:
                        optimizer.zero_grad()
                    is_last = micro == injection.micro_batches - 1
                    with nullcontext() if is_last else no_sync(model):
                        loss = train(inputs, targets)
                optimizer.step()
                average(loss, injection, step, metrics)
                if step % CHECKPOINT_STEPS == CHECKPOINT_STEPS - 1 and rank == 0:
                    injection.save({"step": step, "weights": torch.zeros(1024)})
                if device:
                    injection.wait_for(device)
                injection.finish()
            injection.learn(journal.end(step, injection.take_spent_ns()))
            if count := injection.validation_batches(step):
                validate(model, batches, count)


if __name__ == "__main__":
    main(Plan.from_dict(json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2]), *sys.argv[3:])
