"""Compiled training: the same graphs, breaks and recompilations as without us, and all events."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from tests.scenarios.accounts import calls
from tests.unit.client.training import evaluate, loader, per_step
from torch import _dynamo, nn

import torchperfd
from torchperfd.events import Forward

pytestmark = pytest.mark.slow

BACKENDS = ("eager", "aot_eager")


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, inputs: Any) -> Any:
        return self.layer(inputs).relu()


class Model(nn.Module):
    """Two blocks of ones own: dynamo does not compile torch's own containers in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Block(4, 4), Block(4, 2)

    def forward(self, inputs: Any) -> Any:
        return self.second(self.first(inputs))


class Outcome(NamedTuple):
    """What dynamo did, and what came out of the training."""

    graphs: int
    frames: int
    breaks: int
    recompilations: int
    losses: list[float]


Step = Callable[[Any, Any], Any]
Prepare = Callable[[nn.Module, torch.optim.Optimizer, dict[str, Any]], Step]


def step_of(model: Any, optimizer: torch.optim.Optimizer) -> Step:
    def step(inputs: Any, targets: Any) -> Any:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def whole_model(model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> Step:
    return step_of(torch.compile(model, fullgraph=True, **options), optimizer)


def in_place(model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> Step:
    model.compile(fullgraph=True, **options)
    return step_of(model, optimizer)


def per_block(model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> Step:
    for name, block in list(model.named_children()):
        setattr(model, name, torch.compile(block, fullgraph=True, **options))
    return step_of(model, optimizer)


def per_block_in_place(model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> Step:
    for block in model.children():
        block.compile(fullgraph=True, **options)
    return step_of(model, optimizer)


def forward_and_loss(model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> Step:
    @torch.compile(fullgraph=True, **options)
    def loss_of(inputs: Any, targets: Any) -> Any:
        return nn.functional.mse_loss(model(inputs), targets)

    def step(inputs: Any, targets: Any) -> Any:
        optimizer.zero_grad()
        loss = loss_of(inputs, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def whole_step(model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> Step:
    """Torch breaks the graph of its own accord where gradients are zeroed and computed."""
    return torch.compile(step_of(model, optimizer), **options)


def step_but_the_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]
) -> Step:
    @torch.compile(**options)
    def gradients(inputs: Any, targets: Any) -> Any:
        model.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(inputs: Any, targets: Any) -> Any:
        loss = gradients(inputs, targets)
        optimizer.step()
        return loss

    return step


def compiled_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> Step:
    optimizer.step = torch.compile(optimizer.step, **options)  # type: ignore[method-assign,assignment]
    return step_of(model, optimizer)


def outcome(prepare: Prepare, backend: str) -> Outcome:
    _dynamo.reset()
    _dynamo.utils.counters.clear()
    model = Model()
    step = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), {"backend": backend})
    losses = [step(inputs, targets).item() for inputs, targets in loader(5)]
    counters = _dynamo.utils.counters
    found = Outcome(
        graphs=counters["stats"]["unique_graphs"],
        frames=counters["frames"]["total"],
        breaks=sum(counters["graph_break"].values()),
        recompilations=sum(counters["recompiles"].values()),
        losses=losses,
    )
    _dynamo.reset()
    return found


# What is counted: all, where only the model is compiled; what lies within a graph has no events.
ALL = per_step(5)


def all_but(*names: str) -> dict[str, int]:
    return {name: count for name, count in ALL.items() if name not in names}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (whole_model, ALL),
        (in_place, ALL),
        (per_block, ALL),
        (per_block_in_place, ALL),
        (forward_and_loss, all_but("forward", "loss")),
        (step_but_the_optimizer, all_but("forward", "loss", "zero_grad")),
        (whole_step, all_but("forward", "loss", "optimizer")),
        (compiled_optimizer, all_but("optimizer")),
    ],
)
def test_compiling(prepare: Prepare, expected: dict[str, int], backend: str, alone: None) -> None:
    without = outcome(prepare, backend)
    client = torchperfd.attach()
    within = outcome(prepare, backend)
    # A compiled optimizer step comes out with one frame less.
    assert within._replace(frames=without.frames) == without
    assert within.frames <= without.frames
    client.finish()
    assert calls(client) == expected
    assert client.parts.instruments.faults.counts() == {}
    assert client.report().totals.train.skipped == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_named_model_that_is_compiled_in_place_afterwards(backend: str) -> None:
    _dynamo.reset()
    model = Model()
    client = torchperfd.attach(model=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # the second time anew, with our wrapper in place
        model.compile(backend=backend, fullgraph=True)
        step = step_of(model, optimizer)
        for inputs, targets in loader(3):
            step(inputs, targets)
    evaluate(model, loader(2))
    assert calls(client) == per_step(6)
    assert calls(client, "validate")["forward"] == 2
    assert isinstance(vars(model)["_compiled_call_impl"], Forward)
    client.detach()
    assert "torchperfd" not in vars(model)["_compiled_call_impl"].__code__.co_filename
    _dynamo.reset()


def test_a_named_model_that_is_wrapped_afterwards(alone: None) -> None:
    _dynamo.reset()
    model = Model()
    client = torchperfd.attach(model=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = step_of(torch.compile(model, backend="eager", fullgraph=True), optimizer)
    for inputs, targets in loader(4):
        step(inputs, targets)
    assert calls(client) == per_step(4)
    _dynamo.reset()


def test_step_without_torch_events_needs_client_step(alone: None) -> None:
    """The optimizer in the graph as well: draws are all there is, so `client.step()` it must be."""
    client = torchperfd.attach()
    for _ in loader(4):
        client.step()
    assert calls(client) == {"steps": 4, "data": 4, "other": 4}
