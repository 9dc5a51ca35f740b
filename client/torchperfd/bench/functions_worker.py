"""Times functions with ``torch.utils.benchmark`` in a process of its own.

Run by :func:`torchperfd.model.own_commands.script_command`, with the arguments
TARGETS SETUP REQUESTS ANSWERS.
TARGETS is a JSON list. SETUP is empty or the target of a function that gets the parameters and returns what
each function is called with.
"""

import json
import statistics
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchperfd.bench.factories import BadTargetError, find_target
from torchperfd.bench.worker_pipe import Answer, serve

if TYPE_CHECKING:
    from torch.utils import benchmark


def main() -> None:
    """Answer requests until they end."""
    targets, setup, requests, answers = sys.argv[1:]
    serve(int(requests), int(answers), lambda: _make(json.loads(targets), setup))


def _make(targets: list[str], setup: str) -> tuple[Answer, Callable[[Answer], Answer]]:
    """Import the functions; return what times one of them, or gives the table of all that was timed."""
    from torch.utils import benchmark

    functions = [_function(target) for target in targets]
    prepare = _function(setup) if setup else None
    prepared: dict[str, Any] = {}

    def answer(request: Answer) -> Answer:
        if "table" in request:
            compare = benchmark.Compare([measurement_of(each) for each in request["table"]])
            compare.trim_significant_figures()
            return {"table": str(compare)}
        parameters = request["parameters"]
        key = json.dumps(parameters)
        if prepare is not None and key not in prepared:
            prepared.clear()  # one at a time, because a set of data may be large
            prepared[key] = prepare(**parameters)
        function = functions[request["function"]]
        call: Callable[[], Any] = (
            (lambda: function(prepared[key])) if prepare is not None else (lambda: function(**parameters))
        )
        if "warm_up" in request:
            call()
            return {}
        timer = benchmark.Timer(
            stmt="call()",
            globals={"call": call},
            num_threads=request["threads"],
            label=request["label"],
            sub_label=request["row"],
            description=request["name"],
        )
        found = timer.blocked_autorange(min_run_time=request["seconds"])
        return {
            "seconds": statistics.median(found.times),
            "times": found.raw_times,
            "runs": found.number_per_run,
        }

    return {"threads": _threads()}, answer


def measurement_of(timed: Answer) -> "benchmark.Measurement":
    """Return what another process measured, from its request and its answer."""
    from torch.utils import benchmark

    task = benchmark.TaskSpec(
        stmt="call()",
        setup="",
        label=timed["label"],
        sub_label=timed["row"],
        description=timed["name"],
        num_threads=timed["threads"],
    )
    return benchmark.Measurement(number_per_run=timed["runs"], raw_times=timed["times"], task_spec=task)


def _function(target: str) -> Callable[..., Any]:
    found = find_target(target)
    if not callable(found):
        raise BadTargetError(f"{target} is no function")
    function: Callable[..., Any] = found
    return function


def _threads() -> int:
    import torch

    return torch.get_num_threads()
