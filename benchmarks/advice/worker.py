"""One rank of one training loop, in a process of its own: another loop's memory would change its time.

    python -m benchmarks.advice.worker NAME slow|tuned [RANK WORLD_SIZE STORE]

Reads commands from stdin, ``steps N`` or ``capture FILE``, and answers each with one line of JSON on stdout:
the steps' times in ns. Before the first it says that it is ready, with a line that has none.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Final

import torch
from benchmarks.advice import scripts
from torch.profiler import ProfilerActivity, profile, schedule

from torchperfd.pace import usual_ns

# Steps after a pause find nothing of theirs in the caches, and batches that workers had time to make.
WARM_UP: Final = 5
CAPTURED: Final = 8
# The first recordings need memory that nobody has touched yet.
REHEARSALS: Final = 2


def main() -> int:
    """Serve until stdin ends."""
    name, variant, *place = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    answers = _own_stdout()
    if place:
        rank, world_size, store = place
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world_size)
        )
    step = (
        scripts.SCRIPTS[name].build(variant == "tuned")
        if name in scripts.SCRIPTS
        else scripts.WELL_TUNED[name]()
    )
    _timed(step, WARM_UP)
    for _ in range(REHEARSALS):
        _recorded(step, 0)
    unrecorded_ns = 0
    _answer(answers, [])
    for command, argument in map(str.split, sys.stdin):
        if command == "steps":
            _timed(step, WARM_UP)
            times = _timed(step, int(argument))
            unrecorded_ns = round(usual_ns(times))
        else:
            times = _captured(step, argument, unrecorded_ns)
        _answer(answers, times)
    if place:
        torch.distributed.destroy_process_group()
    return 0


def _own_stdout() -> int:
    """Return a copy of stdout, and let what libraries print go to stderr."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


def _answer(answers: int, times: list[int]) -> None:
    os.write(answers, f"{json.dumps(times)}\n".encode())


def _timed(step: scripts.Step, count: int) -> list[int]:
    times = []
    for _ in range(count):
        began = time.perf_counter_ns()
        step()
        times.append(time.perf_counter_ns() - began)
    return times


def _captured(step: scripts.Step, file: str, unrecorded_ns: int) -> list[int]:
    """Record steps into ``file``; their times include the profiler's."""
    _timed(step, WARM_UP)
    profiler, times = _recorded(step, unrecorded_ns)
    profiler.export_chrome_trace(file)
    return times


def _recorded(step: scripts.Step, unrecorded_ns: int) -> tuple[profile, list[int]]:
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=CAPTURED, repeat=1),
        record_shapes=True,
    ) as profiler:
        times = list(_stepping(step, profiler, unrecorded_ns))
    return profiler, times[1:]


def _stepping(step: scripts.Step, profiler: profile, unrecorded_ns: int) -> Iterator[int]:
    for number in range(1 + CAPTURED):
        yield from _timed(step, 1)
        profiler.step()
        if number == 0:
            # As torchperfd's client does; not before the recording, which would forget it, nor after.
            profiler.add_metadata_json("torchperfd", json.dumps({"unrecorded_step_ns": unrecorded_ns}))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
