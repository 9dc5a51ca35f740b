"""One rank of a real job that comes late to its collectives; the script of ``test_collectives.py``.

Trains every kind of model with the client, and again without it, and writes down what was measured
and what came out: ``collective_ranks.py DIRECTORY``.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torchperfd
from torchperfd.steps.phases import COLLECTIVE_WAIT, LOSS, StepBatch
from torchperfd.steps.recorder import Recorder
from torchperfd.steps.step_series import ArrivalRecorder, Arrivals

LATE_S = 0.03
STEPS = 8
WARM_UP = 3
CULPRIT = 1

Model = Any


class Branches(nn.Module):
    """Alternates between two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(32, 4), nn.Linear(32, 4)])
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        answer: torch.Tensor = self.branches[self.calls % 2](inputs)
        return answer


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))


def with_buffers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


def sharded() -> nn.Sequential:
    model = plain()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


KINDS: dict[str, Callable[[], Model]] = {
    "ddp": lambda: DistributedDataParallel(plain()),
    "buckets": lambda: DistributedDataParallel(plain(), bucket_cap_mb=1e-4),
    "static": lambda: DistributedDataParallel(plain(), static_graph=True),
    "unused": lambda: DistributedDataParallel(Branches(), find_unused_parameters=True),
    "buffers": lambda: DistributedDataParallel(with_buffers()),
    "accumulate": lambda: DistributedDataParallel(plain()),
    "compiled": lambda: torch.compile(DistributedDataParallel(plain()), backend="aot_eager"),
    "fsdp2": sharded,
    "all_reduce": plain,
    "async": plain,
}


def reduce_gradients(kind: str, model: Model) -> None:
    works = [dist.all_reduce(each.grad, async_op=kind == "async") for each in model.parameters()]
    for work in works:
        if work is not None:
            work.wait()


def train(kind: str, model: Model, optimizer: torch.optim.Optimizer, steps: int) -> None:
    micro_batches = 2 if kind == "accumulate" else 1
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(steps * micro_batches * 4, 32, generator=generator)
    data = DataLoader(TensorDataset(inputs, inputs[:, 0].abs().long()), batch_size=4)
    for number, (batch, targets) in enumerate(data, start=1):
        last = number % micro_batches == 0
        with nullcontext() if last else model.no_sync():
            loss = nn.functional.cross_entropy(model(batch), targets.clamp(max=3))
            if last and dist.get_rank() == CULPRIT:
                time.sleep(LATE_S)
            loss.backward()  # type: ignore[no-untyped-call]
        if not last:
            continue
        if kind in ("all_reduce", "async"):
            reduce_gradients(kind, model)
        optimizer.step()
        optimizer.zero_grad()


def kinds() -> Iterator[tuple[str, Model, torch.optim.Optimizer]]:
    for kind, make in KINDS.items():
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(kind, model, optimizer, WARM_UP)
        dist.barrier()
        yield kind, model, optimizer


def outcome(model: Model) -> list[float]:
    weights = []
    for parameter in model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        weights += whole.detach().flatten().tolist()
    return weights


class Drained:
    """All that the flusher has taken from the recorder, step by step."""

    def __init__(self) -> None:
        self.batches: list[StepBatch] = []
        self.arrivals: list[Arrivals] = []
        drain_steps, drain_arrivals = Recorder.drain, ArrivalRecorder.drain

        def steps(recorder: Recorder) -> list[StepBatch]:
            drained = drain_steps(recorder)
            self.batches += drained
            return drained

        def arrivals(recorder: ArrivalRecorder) -> Arrivals:
            self.arrivals.append(drain_arrivals(recorder))
            return self.arrivals[-1]

        Recorder.drain = steps  # type: ignore[method-assign,assignment]
        ArrivalRecorder.drain = arrivals  # type: ignore[method-assign,assignment]

    def clear(self) -> None:
        """Forget all so far."""
        self.batches.clear()
        self.arrivals.clear()

    def milliseconds(self, phase: int) -> list[float]:
        """Return what each step has spent in a phase."""
        columns = ((each, each.phases.get(phase)) for each in self.batches)
        return [ns / 1e6 for each, column in columns for ns in (column.ns if column else [0] * each.count)]


def measure(client: torchperfd.Client, drained: Drained) -> Iterator[tuple[str, dict[str, Any]]]:
    names = [client.parts.instruments.names.name(slot) for slot in range(len(client.parts.instruments.names))]
    for kind, model, optimizer in kinds():
        before = client.report().totals.train
        client.parts.flusher.flush(send=True)
        drained.clear()
        train(kind, model, optimizer, STEPS)
        account = client.report().totals.train.minus(before)
        client.parts.flusher.flush(send=True)
        yield (
            kind,
            {
                "steps": account.steps,
                "adds up": sum(phase.ns for phase in account.phases) == account.ns,
                "calls": {name: account.phases[slot].calls for slot, name in enumerate(names)},
                "waits": drained.milliseconds(COLLECTIVE_WAIT),
                "late": drained.milliseconds(LOSS),
                "arrivals": {
                    step: times
                    for each in drained.arrivals
                    for step, *times in zip(each.step, each.first_ns, each.last_ns, strict=True)
                },
                "outcome": outcome(model),
            },
        )


def main() -> None:
    torch.set_num_threads(1)
    drained = Drained()
    client = torchperfd.attach()
    dist.init_process_group("gloo")
    measured = dict(measure(client, drained))
    faults = client.parts.instruments.faults.counts()
    client.detach()
    without = {}
    for kind, model, optimizer in kinds():
        train(kind, model, optimizer, STEPS)
        without[kind] = outcome(model)
    reported = {"measured": measured, "without": without, "faults": faults}
    (Path(sys.argv[1]) / f"rank{dist.get_rank()}.json").write_text(json.dumps(reported))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
