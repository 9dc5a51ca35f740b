"""Who comes late to a collective lets the others wait: seen on real ranks, and nothing else changes."""

import json
import os
import threading
import time
from datetime import timedelta
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.scenarios import collective_ranks
from tests.scenarios.collective_ranks import CULPRIT, KINDS, LATE_S, STEPS
from tests.support.node import Node, torchrun
from tests.unit.client.training import calls, loader, per_step, tiny_model, tiny_training, train
from torch import nn
from torch._C._distributed_c10d import ProcessGroup, Reducer, Work
from torch.nn.parallel import DistributedDataParallel

import torchperfd

pytestmark = [pytest.mark.slow, pytest.mark.serial]

Reported = dict[str, Any]

LATE_MS = LATE_S * 1e3
_TOLERANCE_MS = 12
_RANKS = 2

# Calls per step: the backward's reduction; that and the buffers; two layers of FSDP, each gathered twice
# and scattered once; four gradients. What Python itself asks for is issued, and waited for.
WAITS = {"buffers": 2, "fsdp2": 12, "all_reduce": 8, "async": 8}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Reported]:
    """The report of each rank."""
    directory = tmp_path_factory.mktemp("ranks")
    command = [
        *torchrun(_RANKS),
        *(collective_ranks.__file__, str(directory)),
    ]
    node = Node()
    try:
        with node.running(*command, PYTHONPATH=os.environ.get("PYTHONPATH", "")) as process:
            _, errors = process.communicate(timeout=300)
    finally:
        node.close()
    assert process.returncode == 0, errors
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(_RANKS)]


def lateness(kind: str, ranks: list[Reported]) -> float:
    """Return by how many milliseconds the culprit came late; on a busy machine it oversleeps."""
    late = [median(reported["measured"][kind]["late"]) for reported in ranks]
    assert late[CULPRIT] > LATE_MS > late[1 - CULPRIT]
    return float(late[CULPRIT] - late[1 - CULPRIT])


def about(milliseconds: float) -> Any:
    """Allow for what else the ranks are held up by, which is much where there are more ranks than cores."""
    return pytest.approx(milliseconds, abs=_TOLERANCE_MS, rel=0.4)


def test_nothing_of_ours_failed(ranks: list[Reported]) -> None:
    assert [reported["faults"] for reported in ranks] == [{}] * _RANKS


@pytest.mark.parametrize("kind", KINDS)
def test_other_ranks_wait_for_the_late_rank(kind: str, ranks: list[Reported]) -> None:
    waits = [median(reported["measured"][kind]["waits"]) for reported in ranks]
    assert waits[1 - CULPRIT] - waits[CULPRIT] == about(lateness(kind, ranks))


@pytest.mark.parametrize("kind", KINDS)
def test_waiting_is_exclusive(kind: str, ranks: list[Reported]) -> None:
    for reported in ranks:
        measured = reported["measured"][kind]
        assert measured["steps"] == STEPS
        assert measured["adds up"]
        assert measured["calls"]["collective_wait"] == WAITS.get(kind, 1) * STEPS
        assert measured["calls"]["backward"] == STEPS * (2 if kind == "accumulate" else 1)


@pytest.mark.parametrize("kind", ["ddp", "buckets", "static", "unused", "accumulate", "compiled"])
def test_arrivals_show_the_lateness(kind: str, ranks: list[Reported]) -> None:
    own, others = (
        reported["measured"][kind]["arrivals"] for reported in (ranks[CULPRIT], ranks[1 - CULPRIT])
    )
    assert own.keys() == others.keys()
    assert len(own) == STEPS
    for first, last in (*own.values(), *others.values()):
        assert first == last
    late = [(own[step][0] - others[step][0]) / 1e6 for step in own]
    assert median(late) == about(lateness(kind, ranks))


@pytest.mark.parametrize("kind", ["buffers", "fsdp2", "all_reduce", "async"])
def test_arrivals_at_several_collectives_are_first_and_last(kind: str, ranks: list[Reported]) -> None:
    for reported in ranks:
        arrivals = reported["measured"][kind]["arrivals"]
        assert len(arrivals) == STEPS
        assert all(first < last for first, last in arrivals.values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_outcome_is_the_same_bit_for_bit(kind: str, ranks: list[Reported]) -> None:
    for reported in ranks:
        assert reported["measured"][kind]["outcome"] == reported["without"][kind]


# One rank, in this process.


def places() -> dict[str, Any]:
    """Everything in torch that a collective's hook may stand in."""
    methods = {name: value for name, value in vars(ProcessGroup).items() if callable(value)}
    return {
        **methods,
        "wait": vars(Work)["wait"],
        "prepare": vars(Reducer)["prepare_for_backward"],
        "buffers": vars(dist)["_broadcast_coalesced"],
        "backward": vars(torch.autograd)["backward"],
    }


def test_detach_puts_everything_back(alone: None, group: None) -> None:
    before = places()
    client = torchperfd.attach()
    model = DistributedDataParallel(tiny_model())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    hooked = places()
    assert {name for name in before if before[name] is not hooked[name]} >= {
        *("wait", "prepare", "buffers", "backward", "allreduce", "barrier", "_allgather_base"),
    }
    client.detach()
    assert places() == before


def test_a_loop_without_collectives_has_a_plain_backward(client: torchperfd.Client) -> None:
    before = vars(torch.autograd)["backward"]
    train(tiny_model(), torch.optim.SGD(tiny_model().parameters(), lr=0.1), loader())
    assert vars(torch.autograd)["backward"] is before


def test_two_models_that_go_backward_one_after_the_other(client: torchperfd.Client, group: None) -> None:
    models = [DistributedDataParallel(tiny_model()) for _ in range(2)]
    optimizer = torch.optim.SGD([each for model in models for each in model.parameters()], lr=0.1)
    for inputs, targets in loader(3):
        optimizer.zero_grad()
        losses = [nn.functional.mse_loss(model(inputs), targets) for model in models]
        for loss in losses:
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert calls(client)["collective_wait"] == 6


def test_a_graph_that_goes_backward_twice_waits_once_each(client: torchperfd.Client, group: None) -> None:
    model = DistributedDataParallel(tiny_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, _ in loader(3):
        loss = model(inputs).sum()
        with model.no_sync():
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert calls(client) == per_step(3, backward=6, collective_wait=3)


def test_a_backward_that_fails_leaves_no_wait_open(client: torchperfd.Client, group: None) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    model = DistributedDataParallel(tiny_model())
    outputs = model(torch.ones(2, 4))
    outputs.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        outputs.sum().backward()
    client.report()
    assert client.parts.instruments.replay.recorder.depth == 0


def test_collectives_of_other_threads_are_not_the_loops(client: torchperfd.Client, group: None) -> None:
    model, optimizer = tiny_training()
    for inputs, _ in loader(3):
        model(inputs).sum().backward()
        thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(2),))
        thread.start()
        thread.join()
        optimizer.step()
        optimizer.zero_grad()
    assert calls(client) == per_step(3)


class _Derived(Work):
    """Work of one's own, which waits as its base does."""


def test_work_that_is_derived_in_python_goes_to_its_base(client: torchperfd.Client) -> None:
    # The base's wait() is C++ that asks Python for an override: ours must not be taken for one.
    with pytest.raises(RuntimeError, match="timed out"):
        _Derived().wait(timedelta(milliseconds=1))
    assert client.report().totals.train.steps == 0


class _Waited(Work):
    """Work that waits by itself, as that of a process group in Python does."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        time.sleep(0.002)
        return True


class _Group(ProcessGroup):
    """A process group of one rank, all of whose reductions take 3 ms."""

    def allreduce(self, tensors: Any, *options: Any) -> Work:
        time.sleep(0.003)
        return _Waited()


class _GroupAround(_Group):
    """One that does as another does."""


_UNTOUCHED = {each: dict(vars(each)) for each in (_Group, _GroupAround, _Waited)}


@pytest.mark.parametrize("kind", [_Group, _GroupAround])
def test_process_groups_in_python_are_timed_too(client: torchperfd.Client, kind: type[ProcessGroup]) -> None:
    groups = [kind(0, 1), kind(0, 1)]  # type: ignore[call-arg]
    model, optimizer = tiny_training()
    for inputs, _ in loader(3):
        model(inputs).sum().backward()
        for each in groups:
            assert each.allreduce([torch.ones(2)]).wait()
        optimizer.step()
        optimizer.zero_grad()
    assert calls(client) == per_step(3, collective_wait=3 * 2 * 2)
    waited = client.report().to_dict()["train"]["phases"]["collective_wait"]
    assert waited["seconds_total"] >= 3 * 2 * 0.005
    client.detach()
    assert {each: dict(vars(each)) for each in _UNTOUCHED} == _UNTOUCHED


@pytest.mark.parametrize("whole_step", [False, True])
def test_compiled_ddp_has_the_same_graphs(whole_step: bool, alone: None, group: None) -> None:
    without = _compile(whole_step)
    client = torchperfd.attach()
    assert _compile(whole_step) == without
    assert calls(client)["collective_wait"] == calls(client)["backward"]
    client.detach()


def _compile(whole_step: bool) -> tuple[dict[str, int], int, int, float]:
    dynamo = torch._dynamo
    dynamo.reset()
    dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called = model if whole_step else torch.compile(model, backend="aot_eager")

    def step(inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = called(inputs).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if whole_step:
        step = torch.compile(step, backend="aot_eager")
    last = 0.0
    for inputs, _ in loader(4):
        last = step(inputs).item()
    counted = dynamo.utils.counters
    return (
        dict(counted["stats"]),
        sum(counted["graph_break"].values()),
        len(counted["recompiles"]),
        last,
    )
