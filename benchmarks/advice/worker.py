"""One rank of one training loop, in a process of its own: another loop's memory would change its time.

    python -m benchmarks.advice.worker NAME slow|tuned|CHANGE [RANK WORLD_SIZE STORE]

CHANGE is JSON: what is done to a control (`controls.Change`).

Reads commands from stdin, ``steps N`` or ``capture FILE``, and answers each with one line of JSON on stdout:
the steps' times in ns. Before the first it reports that it is ready, with a line that has none.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import torch
from benchmarks.advice import controls, scripts
from torch.profiler import ProfilerActivity, profile, schedule

from torchperfd import attach
from torchperfd.client import Client
from torchperfd.steps.step_series import usual_ns

# Steps after a pause find nothing of theirs in the caches, and batches that workers had time to make.
WARM_UP: Final = 5
CAPTURED: Final = 8
# The first recordings need memory that was never touched.
REHEARSALS: Final = 2


def main() -> int:
    name, variant, *place = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if name in controls.CONTROLS:
        _restrict(controls.CONTROLS[name])
    # What the client knows of a loop it writes into captures. Most slow loops are as traces from elsewhere.
    is_attached = name in controls.CONTROLS or (name in scripts.SCRIPTS and scripts.SCRIPTS[name].attached)
    client = attach() if is_attached else None
    answers = _own_stdout()
    if place:
        rank, world_size, store = place
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world_size)
        )
    step = _built(name, variant)
    _timed(step, WARM_UP)
    for _ in range(REHEARSALS):
        _recorded(step, {"unrecorded_step_ns": 0})
    unrecorded_ns = 0
    _answer(answers, [])
    for command, argument in map(str.split, sys.stdin):
        if command == "steps":
            _timed(step, WARM_UP)
            times = _timed(step, int(argument))
            unrecorded_ns = round(usual_ns(times))
        else:
            times = _captured(step, argument, unrecorded_ns, client)
        _answer(answers, times)
    if place:
        torch.distributed.destroy_process_group()
    return 0


def _restrict(control: controls.Control) -> None:
    """Give this process the CPUs and the threads that a control has."""
    torch.set_num_threads(control.threads)
    if control.cpus is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: control.cpus])


def _built(name: str, variant: str) -> scripts.Step:
    if name in controls.CONTROLS:
        change = json.loads(variant)
        made = controls.Change(change.get("workers"), frozenset(change.get("rules", ())))
        return controls.CONTROLS[name].build(made)
    if name in scripts.SCRIPTS:
        return scripts.SCRIPTS[name].build(variant == "tuned")
    return scripts.WELL_TUNED[name]()


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


def _captured(step: scripts.Step, file: str, unrecorded_ns: int, client: Client | None) -> list[int]:
    """Record steps into ``file``; their times include the profiler's."""
    _timed(step, WARM_UP)
    facts: dict[str, Any] = {"unrecorded_step_ns": unrecorded_ns}
    if client is not None:
        client.report()
        facts = {
            "unrecorded_step_ns": round(1e9 * client.parts.flusher.step_seconds()),
            **client.parts.flusher.unrecorded(),
        }
    profiler, times = _recorded(step, facts)
    profiler.export_chrome_trace(file)
    return times


def _recorded(step: scripts.Step, facts: dict[str, Any]) -> tuple[profile, list[int]]:
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=CAPTURED, repeat=1),
        record_shapes=True,
    ) as profiler:
        times = list(_stepping(step, profiler, facts))
    return profiler, times[1:]


def _stepping(step: scripts.Step, profiler: profile, facts: dict[str, Any]) -> Iterator[int]:
    for number in range(1 + CAPTURED):
        yield from _timed(step, 1)
        profiler.step()
        if number == 0:
            # As torchperfd's client does; not before the recording, which would forget it, nor after.
            profiler.add_metadata_json("torchperfd", json.dumps(facts))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
