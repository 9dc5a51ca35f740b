"""Times functions with ``torch.utils.benchmark`` in a process of its own.

    python -m torchperfd.bench.functions_worker TARGETS SETUP REQUESTS ANSWERS

TARGETS is a JSON list. SETUP is empty or the target of a function that gets the parameters and returns what
each function is called with.
"""

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

from torchperfd.bench.factories import BadTargetError, find_target
from torchperfd.bench.worker_pipe import Answer, serve


def main(targets: list[str], setup: str, requests: int, answers: int) -> None:
    """Answer requests until they end."""
    serve(requests, answers, lambda: _make(targets, setup))


def _make(targets: list[str], setup: str) -> tuple[Answer, Callable[[Answer], Answer]]:
    """Import the functions; return what times one of them, or gives the table of all that was timed."""
    from torch.utils import benchmark

    functions = [_function(target) for target in targets]
    prepare = _function(setup) if setup else None
    measured: list[benchmark.Measurement] = []
    prepared: dict[str, Any] = {}

    def answer(request: Answer) -> Answer:
        if request.get("table"):
            compare = benchmark.Compare(measured)
            compare.trim_significant_figures()
            return {"table": str(compare)}
        parameters = request["parameters"]
        key = json.dumps(parameters)
        if prepare is not None and key not in prepared:
            prepared.clear()  # one at a time, because a set of data may be large
            prepared[key] = prepare(**parameters)
        function = functions[request["function"]]
        call = (lambda: function(prepared[key])) if prepare is not None else (lambda: function(**parameters))
        timer = benchmark.Timer(
            stmt="call()",
            globals={"call": call},
            num_threads=request["threads"],
            label=request["label"],
            sub_label=request["row"],
            description=request["name"],
        )
        found = timer.blocked_autorange(min_run_time=request["seconds"])
        measured.append(found)
        return {"seconds": statistics.median(found.times), "runs": len(found.times) * found.number_per_run}

    return {"threads": _threads()}, answer


def _function(target: str) -> Callable[..., Any]:
    found = find_target(target)
    if not callable(found):
        raise BadTargetError(f"{target} is no function")
    function: Callable[..., Any] = found
    return function


def _threads() -> int:
    import torch

    return torch.get_num_threads()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
