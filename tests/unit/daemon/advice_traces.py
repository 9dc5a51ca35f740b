"""Traces that advice is given on."""

import json
from collections.abc import Sequence
from typing import Any

from tests.unit.daemon import traces

from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.advice.rules import Advice

US, MS = 1_000, 1_000_000


def annotation(name: str, start: int, end: int, **more: Any) -> str:
    return traces.event(name, start, end, cat="user_annotation", **more)


def kernel(name: str, start: int, end: int, *, cat: str = "kernel", **args: Any) -> str:
    return traces.event(name, start, end, cat=cat, thread=7, args=args)


def step(number: int, start: int, end: int) -> str:
    return annotation(f"ProfilerStep#{number}", start, end)


def advice_on(events: Sequence[str]) -> dict[str, Advice]:
    return {each.rule: each for each in analysis.summarise(traces.trace_of(events)).advice}


def alone(events: Sequence[str]) -> Advice:
    (advice,) = advice_on(events).values()
    return advice


def draw(iterator: str, start: int, end: int) -> str:
    return annotation(f"enumerate(DataLoader)#{iterator}.__next__", start, end)


def doubles(dtype: str, dims: str) -> list[str]:
    args = {"Input type": [dtype, "double"], "Input Dims": [json.loads(dims), []]}
    return [
        step(1, 0, 10 * MS),
        traces.event("aten::linear", 0, 9 * MS, args=args),
        traces.event("aten::addmm", 1 * MS, 8 * MS, args=args),
    ]


def adam(name: str, operators: int, length: int) -> list[str]:
    """One step of 1 ms, in which an optimizer runs operators, each followed by 5 µs of Python."""
    events = [step(1, 0, MS), annotation(f"Optimizer.step#{name}.step", 0, operators * (length + 5 * US))]
    return events + [
        traces.event(
            f"aten::{'addcdiv_' if at % 7 == 6 else at % 7}",
            at * (length + 5 * US),
            at * (length + 5 * US) + length,
        )
        for at in range(operators)
    ]


def launched(at: int, name: str, start: int, end: int, *, number: int, cat: str = "kernel") -> list[str]:
    """A launch from within an operator, and what it launched."""
    types = {"Input type": ["float", "float"], "Input Dims": [[8, 8], [8, 8]], "External id": number}
    return [
        traces.event("aten::mm", at, at + 4 * US, args=types),
        traces.event(
            "cudaLaunchKernel", at + US, at + 3 * US, cat="cuda_runtime", args={"correlation": number}
        ),
        kernel(name, start, end, cat=cat, correlation=number, **{"External id": number}),
    ]


def device_step(length: int, period: int, name: str = "gemm", cat: str = "kernel") -> list[str]:
    events = [step(1, 0, MS)]
    for number in range(1, MS // period):
        at = number * period
        events += launched(at, name, at + 3 * US, at + 3 * US + length, number=number, cat=cat)
    return events


def with_memory(events: list[str], reserved: int, total: int) -> analysis.Trace:
    instant = {"ph": "i", "name": "[memory]", "cat": "cpu_instant_event", "pid": 1, "tid": 1, "s": "t"}
    instant |= {"ts": float(traces.microseconds(traces.ORIGIN_NS)), "args": {"Bytes": 1, "Device Type": 1}}
    instant["args"] |= {"Total Reserved": reserved}  # type: ignore[operator]
    trace = traces.trace_of([*events, json.dumps(instant)])
    trace.device_memory = total
    return trace
