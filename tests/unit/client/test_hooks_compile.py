"""Compiled models: every forward is seen, and no graph breaks on our account."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.unit.client.training import calls, evaluate, loader, open_phases, per_step, tiny_model, train
from torch import _dynamo, nn

import torchperfd


@pytest.fixture(autouse=True)
def graph_breaks() -> Iterator["Counter[str]"]:
    """Reasons for which dynamo has broken a graph since the test began."""
    _dynamo.reset()
    _dynamo.utils.counters.clear()
    yield _dynamo.utils.counters["graph_break"]
    _dynamo.reset()
    # FLOPs are not counted in a process that has compiled code.
    _dynamo.utils.counters.clear()


class Frames:
    """A backend that compiles nothing and counts the graphs it is handed."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


class Perceptron(nn.Module):
    """A model of ones own: dynamo does not compile torch's own containers in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.layer(inputs).relu()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_model_wrapped_by_compile(client: torchperfd.Client, graph_breaks: "Counter[str]") -> None:
    frames = Frames()
    inner = tiny_model()
    model: Any = torch.compile(inner, backend=frames, fullgraph=True)
    train(model, sgd(model), loader(3))
    assert calls(client) == per_step(3)
    assert not graph_breaks
    assert frames.graphs == 1
    assert "_compiled_call_impl" not in vars(inner)  # the wrapper is the root


def test_a_model_wrapped_by_compile_and_named_from_the_start(graph_breaks: "Counter[str]") -> None:
    model: Any = torch.compile(tiny_model(), backend="eager", fullgraph=True)
    client = torchperfd.attach(model=model)
    train(model, sgd(model), loader(3))
    evaluate(model, loader(2))
    client.finish()
    assert calls(client) == per_step(3)
    assert calls(client, "validate")["forward"] == 2
    assert not graph_breaks


def test_a_model_compiled_in_place(client: torchperfd.Client, graph_breaks: "Counter[str]") -> None:
    frames = Frames()
    model = Perceptron()
    model.compile(backend=frames, fullgraph=True)
    train(model, sgd(model), loader(3))
    assert calls(client) == per_step(3)
    assert not graph_breaks
    assert frames.graphs == 1


def test_a_model_compiled_in_place_that_raises_leaves_its_phase(client: torchperfd.Client) -> None:
    model = Perceptron()
    model.compile(backend="eager")
    optimizer = sgd(model)
    train(model, optimizer, loader(1))
    with pytest.raises(RuntimeError):
        train(model, optimizer, client.wrap([(torch.ones(2, 3), None)]))
    assert open_phases(client) == 0
    train(model, optimizer, loader(1))
    assert calls(client)["steps"] == 2


def test_an_eager_model_with_a_compiled_part(client: torchperfd.Client, graph_breaks: "Counter[str]") -> None:
    part: Any = torch.compile(nn.Linear(4, 4), backend="eager", fullgraph=True)
    model = nn.Sequential(part, nn.Linear(4, 2))
    train(model, sgd(model), loader(3))
    assert calls(client) == per_step(3)
    assert not graph_breaks


def test_a_function_around_a_hooked_model_compiles_in_one_piece(graph_breaks: "Counter[str]") -> None:
    """Our hooks are traced into it, and must leave nothing behind there."""
    model = tiny_model()
    client = torchperfd.attach(model=model)
    frames = Frames()

    @torch.compile(backend=frames, fullgraph=True)
    def forward(inputs: torch.Tensor) -> Any:
        return model(inputs).sum()

    expected = model(torch.ones(2, 4)).sum()
    assert torch.equal(forward(torch.ones(2, 4)), expected)
    assert not graph_breaks
    assert frames.graphs == 1
    assert client.parts.instruments.faults.counts() == {}


def test_results_are_those_of_the_same_model_without_us() -> None:
    def outcome() -> list[float]:
        _dynamo.reset()
        model: Any = torch.compile(tiny_model(), backend="eager", fullgraph=True)
        return train(model, sgd(model), loader(3))

    alone = outcome()
    torchperfd.attach()
    assert outcome() == alone
