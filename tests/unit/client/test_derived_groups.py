"""Process groups that a script derives in Python: what C++ asks of them ends as it does without us."""

import json
import subprocess
import sys
from typing import Any

import pytest

_SCRIPT = """
import json, sys
from datetime import timedelta
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

class Mixin:
    def reduce(self, *args):
        raise ZeroDivisionError

class Group(dist.ProcessGroup):
    called = 0

    def allreduce(self, tensors, options=None):
        Group.called += 1
        raise ZeroDivisionError

class Around(Mixin, Group):
    def broadcast(self, tensors, options=None):
        return super().broadcast(tensors, options)

class Direct(Mixin, dist.ProcessGroup):
    pass

def attach():
    import torchperfd
    return torchperfd.attach()

def outcome(action):
    try:
        action()
    except Exception as error:
        return type(error).__name__ + ": " + (str(error).splitlines() or [""])[0]
    return "none"

before = {{each: dict(vars(each)) for each in (Mixin, Group, Around, Direct)}}
client = attach() if "{when}" == "before" else None
groups = [Around(0, 1), Group(0, 1), Direct(0, 1)]
if "{when}" == "after":
    client = attach()
ones = torch.ones(2)
methods = vars(dist.ProcessGroup)
names = [name for name in methods if not name.startswith("__") and callable(methods[name])]
outcomes = {{}}
for number, group in enumerate(groups):
    dist.distributed_c10d._register_process_group(f"group {{number}}", group)
    operators = {{
        "all_reduce": (ones, "sum"),
        "all_gather_into_tensor": (ones, 1),
        "reduce_scatter_tensor": (ones, "sum", 1),
        "broadcast": (ones, 0),
        "all_to_all_single": (ones, [2], [2]),
    }}
    for name, arguments in operators.items():
        operator = getattr(torch.ops._c10d_functional, name)
        outcomes[f"{{number}} {{name}}"] = outcome(lambda: operator(*arguments, f"group {{number}}"))
    for name in names:
        outcomes[f"{{number}} .{{name}}"] = outcome(lambda: getattr(group, name)([ones]))
        outcomes[f"{{number}} .{{name}}(,)"] = outcome(lambda: getattr(group, name)(ones, ones))
if client is not None:
    client.detach()
after = {{each: dict(vars(each)) for each in before}}
for each in before.values(), after.values():
    for names in each:
        names.pop("called", None)
print(json.dumps([outcomes, before == after]))
"""


def outcomes(when: str) -> list[Any]:
    """Return what became of every call, and whether the classes are as before.

    Args:
        when: Whether we attach before the groups are made, after that, or never.
    """
    script = _SCRIPT.format(when=when)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stderr
    found: list[Any] = json.loads(run.stdout)
    return found


@pytest.fixture(scope="module")
def without_us() -> list[Any]:
    found = outcomes("never")
    assert found[0]["2 .reduce"] == "ZeroDivisionError: "
    assert found[0]["1 all_reduce"] == "ZeroDivisionError: "
    assert "No backend" in found[0]["0 all_gather_into_tensor"]
    assert found[1]
    return found


@pytest.mark.parametrize("when", ["before", "after"])
def test_calls_of_derived_groups_end_as_without_us(when: str, without_us: list[Any]) -> None:
    assert outcomes(when) == without_us
