"""Models, optimizers and functions are copied, pickled and scripted as if we were not there."""

import ast
import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.scenarios.accounts import calls
from tests.unit.client.training import loader, per_step, tiny_model, train
from torch import nn
from torch.optim.swa_utils import AveragedModel

import torchperfd


@pytest.fixture
def trained(client: torchperfd.Client) -> nn.Module:
    """A model that is being timed."""
    model = tiny_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(3))
    assert calls(client)["forward"] == 3
    return model


def by_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]


def by_save(model: nn.Module) -> nn.Module:
    torch.save(model, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)  # type: ignore[no-any-return]


def by_averaging(model: nn.Module) -> nn.Module:
    return AveragedModel(model).module


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, copy.copy, by_pickle, by_save, by_averaging, torch.jit.script],
    ids=lambda way: way.__name__,
)
def test_a_copy_is_a_model_of_its_own(copied: Callable[[Any], Any], trained: nn.Module) -> None:
    inputs = torch.ones(2, 4)
    expected = trained(inputs)
    twin = copied(trained)
    assert torch.equal(twin(inputs), expected)
    timer = vars(twin).get("_compiled_call_impl")
    if copied is by_save:  # a model that is loaded is known from then on, by a timer of its own
        assert timer is not vars(trained)["_compiled_call_impl"]
    else:
        assert timer is None
    if copied not in (copy.copy, torch.jit.script):  # these share the parameters
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert not torch.equal(twin(inputs), expected)
        assert torch.equal(trained(inputs), expected)


def test_a_compiled_model_is_copied_with_its_wrapper(client: torchperfd.Client) -> None:
    model: Any = torch.compile(tiny_model(), backend="eager")
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(3))
    twin = copy.deepcopy(model)
    inputs = torch.ones(2, 4)
    expected = model(inputs)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(model(inputs), expected)
    assert not torch.equal(twin(inputs), expected)
    torch._dynamo.reset()


def test_a_replica_calls_itself(trained: nn.Module) -> None:
    """DataParallel's replicas share the attributes of their original."""
    replica = trained._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    replica.forward = lambda inputs: inputs + 1
    assert torch.equal(replica(torch.ones(1)), torch.ones(1) + 1)


def test_what_is_timed_is_pickled_by_name(client: torchperfd.Client) -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    for thing in (torch.save, torch.autograd.backward, torch.optim.Optimizer.zero_grad, nn.Module.zero_grad):
        assert pickle.loads(pickle.dumps(thing)) is thing
    pickle.loads(pickle.dumps(optimizer)).zero_grad()
    pickle.loads(pickle.dumps(loader(2)))


PORTABLE = """
import sys
sys.modules["torchperfd.events._native"] = None
import torch
import torchperfd
from torchperfd.events import NATIVE
from tests.unit.client.training import calls, evaluate, loader, tiny_model, train

assert not NATIVE
client = torchperfd.attach()
model = tiny_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    train(model, optimizer, loader(3))
    evaluate(model, loader(2))
train(model, optimizer, loader(2, num_workers=1, multiprocessing_context="fork"))
client.finish()
print(calls(client))
print(calls(client, "validate"))
print(client.parts.instruments.faults.counts())
client.detach()
"""


def test_without_a_compiler_everything_is_seen_as_well() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PORTABLE],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == ""
    train_calls, validate_calls, faults = done.stdout.splitlines()
    assert ast.literal_eval(train_calls) == per_step(8)
    assert "'forward': 4" in validate_calls
    assert faults == "{}"
