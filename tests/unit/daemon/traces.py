"""Traces made up event by event, read as any other trace is."""

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchperfd_daemon import analysis

# Where Kineto's clocks stand: three months after its last base.
ORIGIN_NS = 7_000_000_000_000_000


def microseconds(ns: int) -> str:
    """Write a time as Kineto does, with three decimals."""
    return f"{ns // 1000}.{ns % 1000:03}"


def event(name: str, start: int, end: int, *, cat: str = "cpu_op", thread: Any = 1, args: Any = None) -> str:
    """Return one complete event's JSON; times in ns after the clock's start."""
    fields = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": thread, "args": args or {}}
    times = f', "ts": {microseconds(ORIGIN_NS + start)}, "dur": {microseconds(end - start)}}}'
    return json.dumps(fields)[:-1] + times


def document(events: Iterable[str], **facts: Any) -> str:
    """Return a whole trace's JSON; ``facts`` stand before the events."""
    before = "".join(f"{json.dumps(key)}: {json.dumps(value)}, " for key, value in facts.items())
    return f'{{"schemaVersion": 1, {before}"traceEvents": [\n' + ",\n".join(events) + '\n], "traceName": "t"}'


def trace_of(events: Iterable[str], **facts: Any) -> analysis.Trace:
    """Return the trace that has these events, and ``facts`` around them."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "t.json"
        file.write_text(document(events, **facts))
        return analysis.load(file)
