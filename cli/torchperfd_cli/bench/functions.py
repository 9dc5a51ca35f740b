"""Implementations of one thing side by side, and whether their difference is more than noise.

A process of its own times them with ``torch.utils.benchmark``. It is run by
:func:`torchperfd.model.own_commands.script_command`, with the arguments TARGETS SETUP REQUESTS ANSWERS.
"""

import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from torchperfd.document.blocks import Block, Code, Document, Sentences
from torchperfd.errors import TorchperfdError
from torchperfd_cli.bench.worker_process import (
    Answer,
    BadTargetError,
    WorkerFailedError,
    WorkerProcess,
    find_target,
    serve,
)

if TYPE_CHECKING:
    from torch.utils import benchmark


SCHEMA: Final = "torchperfd.bench_compare/1"
MIN_ROUNDS: Final = 3

# Two-sided 95 % quantiles of Student's t distribution, from 2 degrees of freedom on.
_T: Final = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_LAST_T: Final = 2.12
# A measurement may take so many times as long as asked for.
_MAX_FACTOR: Final = 10.0


class FunctionFailedError(TorchperfdError):
    """A function raised, or did not end in time."""


@dataclass(frozen=True, slots=True)
class Row:
    """What all functions are called with."""

    parameters: Mapping[str, Any]
    threads: int

    @property
    def name(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.parameters.items())


@dataclass(frozen=True, slots=True)
class Comparison:
    """A function beside the first one, in one row.

    Attributes:
        ratio: Its time as a part of the first one's: the geometric mean over the rounds.
        low: Lower end of the ratio's 95 % confidence interval.
    """

    ratio: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Whether the difference is more than noise."""
        return self.low > 1 or self.high < 1


@dataclass(slots=True)
class FunctionsBench:
    """What functions took.

    Attributes:
        names: Of the functions; the first one is what the others are compared with.
        seconds: By function and row, the median of each round.
        table: As ``torch.utils.benchmark.Compare`` shows it.
    """

    names: list[str]
    rows: list[Row]
    seconds: dict[tuple[int, int], list[float]]
    table: str

    def compare(self, function: int, row: int) -> Comparison:
        """Return how a function compares with the first one, of rounds that were measured in turn."""
        return compare_rounds(self.seconds[0, row], self.seconds[function, row])

    def slower_than(self, share: float) -> list[str]:
        """Return in words where a function is slower than the first by more than a share, beyond noise."""
        found = []
        for function, row in itertools.product(range(1, len(self.names)), range(len(self.rows))):
            compared = self.compare(function, row)
            if compared.low > 1 + share:
                found.append(
                    f"{self.names[function]} takes {compared.ratio:.2f} times as long as {self.names[0]}"
                )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the document of schema ``torchperfd.bench_compare/1``."""
        rows = []
        for number, row in enumerate(self.rows):
            functions = []
            for function, name in enumerate(self.names):
                rounds = self.seconds[function, number]
                compared = asdict(self.compare(function, number)) if function else None
                functions.append(
                    {
                        "name": name,
                        "seconds": statistics.median(rounds),
                        "rounds_seconds": rounds,
                        "beside_first": compared,
                    }
                )
            rows.append({"parameters": dict(row.parameters), "threads": row.threads, "functions": functions})
        return {"schema": SCHEMA, "rows": rows}


def compare_rounds(first: Sequence[float], other: Sequence[float]) -> Comparison:
    """Compare two functions that were timed in turn, from the ratio of each round: a paired t interval."""
    logs = [math.log(ours / theirs) for theirs, ours in zip(first, other, strict=True)]
    mean = statistics.fmean(logs)
    freedom = len(logs) - 1
    quantile = _T[freedom - 2] if freedom - 2 < len(_T) else _LAST_T
    error = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return Comparison(math.exp(mean), math.exp(mean - error), math.exp(mean + error))


def bench_functions(
    targets: Sequence[str],
    *,
    setup: str,
    parameters: Mapping[str, Sequence[Any]],
    threads: Sequence[int],
    seconds: float,
    rounds: int,
    timeout: float,
    progress: Callable[[str], None],
) -> FunctionsBench:
    """Time functions in turn, in processes of their own: a new one for each round.

    Args:
        targets: As ``module:name``, two or more.
        setup: Target of what makes the argument, given the parameters; empty for none.
        parameters: Values by name; every combination is a row.
        threads: Of torch's operators; empty for as many as torch takes by itself.
        seconds: To time each function for in each round.
        rounds: Three or more.
        timeout: Seconds for the imports, and for each measurement beyond its own.

    Raises:
        FactoryError: The functions could not be found.
        FunctionFailedError: One of them raised, or did not end in time.
    """
    names = _short_names(targets)
    combinations = [
        dict(zip(parameters, values, strict=True)) for values in itertools.product(*parameters.values())
    ]
    rows: list[Row] = []
    found: dict[tuple[int, int], list[float]] = {}
    timed: list[dict[str, Any]] = []
    table = ""
    for number in range(rounds):
        # Where a process has its memory makes functions slower or faster for as long as it lives.
        process = WorkerProcess("torchperfd_cli.bench.functions", [json.dumps(list(targets)), setup])
        try:
            first = process.start(timeout, "the functions could not be imported")
            rows = rows or [
                Row(each, count) for count in (threads or [first["threads"]]) for each in combinations
            ]
            for index, row in enumerate(rows):
                # What was called before in a process decides how its allocator serves a function: up to twice
                # as fast in the first one as in the last one.
                for function, name in enumerate(names):
                    request = {"function": function, "parameters": dict(row.parameters), "warm_up": True}
                    _ask(process, request, timeout, f"{name}({row.name})")
                # In turn, because a machine's speed changes within seconds, and in alternating order, so
                # that a machine that becomes slower favours none.
                order = list(enumerate(names))
                for function, name in order[:: -1 if number % 2 else 1]:
                    progress(f"{name} {row.name}".strip())
                    request = {
                        "function": function,
                        "name": name,
                        "label": "time of one call",
                        "row": row.name or "call",
                        "parameters": dict(row.parameters),
                        "threads": row.threads,
                        "seconds": seconds,
                    }
                    answer = _ask(process, request, timeout + _MAX_FACTOR * seconds, f"{name}({row.name})")
                    found.setdefault((function, index), []).append(answer["seconds"])
                    timed.append({**request, "times": answer["times"], "runs": answer["runs"]})
            if number == rounds - 1:
                table = _ask(process, {"table": timed}, timeout, "the table")["table"]
        finally:
            process.close()
    return FunctionsBench(names, rows, found, table)


def _ask(process: WorkerProcess, request: dict[str, Any], timeout: float, what: str) -> dict[str, Any]:
    try:
        answer = process.ask(request, timeout)
    except WorkerFailedError as error:
        raise FunctionFailedError(f"{what} could not be timed: {error}") from error
    if "failed" in answer:
        raise FunctionFailedError(f"{what} failed: {answer['failed']}")
    return answer


def _short_names(targets: Sequence[str]) -> list[str]:
    """Return the functions' own names where these differ, else the whole targets."""
    short = [target.rpartition(":")[2] for target in targets]
    return short if len(set(short)) == len(short) else list(targets)


def functions_document(bench: FunctionsBench) -> Document:
    """Return the result for people: torch's table, and how the functions differ from the first."""
    lines: list[Block] = []
    has_threads = len({row.threads for row in bench.rows}) > 1
    for number, row in enumerate(bench.rows):
        title = row.name
        if has_threads:
            title = f"{title}, threads={row.threads}" if title else f"threads={row.threads}"
        if title:
            lines.append(Sentences([title]))
        compared = [(name, bench.compare(at, number)) for at, name in enumerate(bench.names) if at]
        words = [f"{name}: {_in_words(each, bench.names[0])}" for name, each in compared]
        lines.append(Sentences(words, indent=2))
    return Document([[Code(bench.table.rstrip().split("\n"))], lines])


def _in_words(compared: Comparison, first: str) -> str:
    # What is faster reads better as how many times as fast.
    if not compared.differs:
        return (
            f"no difference from {first} beyond noise ({compared.low:.2f} to {compared.high:.2f} of its time)"
        )
    if compared.ratio < 1:
        interval = f"{1 / compared.high:.2f} to {1 / compared.low:.2f}"
        return f"{1 / compared.ratio:.2f} times as fast as {first} (95 %: {interval})"
    interval = f"{compared.low:.2f} to {compared.high:.2f}"
    return f"takes {compared.ratio:.2f} times as long as {first} (95 %: {interval})"


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
