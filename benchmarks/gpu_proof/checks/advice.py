"""Whether each rule of advice that one GPU can show predicts what its change saves.

Every slow loop and the same loop with the advice applied run alternately in this process. Afterwards the
client captures steps of the slow one, and the analyser gives its advice. All loops are timed before the first
capture, because CUPTI stays loaded after it and makes launches slower.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Final, TypeVar

import torch
from benchmarks.gpu_proof.analysed_capture import (
    WITHIN,
    attached,
    in_order,
    is_within,
    place_of,
    record,
    saving_ms,
)
from benchmarks.gpu_proof.loop_parts import Step
from benchmarks.gpu_proof.machine import Machine
from benchmarks.gpu_proof.outcome import Bound, Outcome
from benchmarks.gpu_proof.slow_loops import LOOPS, SlowLoop

from torchperfd_daemon.analysis import Advice

TITLE: Final = "The gain of each GPU advice, predicted and measured"
SECONDS: Final = 150

# No loop is begun later than this: the results so far must be returned before the limit.
_LAST_BEGIN_SECONDS: Final = 120
_TURNS: Final = 3
_TURN_SECONDS: Final = 0.25
_FEWEST_STEPS: Final = 8
_MAX_STEPS: Final = 400
# cuDNN tries its algorithms, a compiler compiles, and loader workers start.
_WARM_UP: Final = 8
# After a pause the batches that workers had ready meanwhile come first.
_AFTER_A_PAUSE: Final = 5
_CAPTURES: Final = 1
_CAPTURED_STEPS: Final = 8
# After each report the client samples a draw of the loader; the trace has the mean of the samples.
_REPORTS: Final = 4
_BETWEEN_REPORTS_SECONDS: Final = 0.3

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timed:
    """Mean times of unrecorded steps, in ms, for a batch of the slow loop's size."""

    before_ms: float
    after_ms: float

    @property
    def saved_ms(self) -> float:
        return self.before_ms - self.after_ms


def run(machine: Machine) -> Outcome:
    """Time all loops, then record and analyse the slow ones."""
    until = time.monotonic() + _LAST_BEGIN_SECONDS
    was_tuning, threads = torch.backends.cudnn.benchmark, torch.get_num_threads()
    torch.backends.cudnn.benchmark = True
    if machine.is_rehearsal:
        # Beside other work, threads that wait for each other make tiny operators a hundred times slower.
        torch.set_num_threads(1)
    try:
        timed = {loop.name: _attempt(partial(_timed, loop, machine), until) for loop in LOOPS}
        found = {loop.name: _attempt(partial(_advice, loop, machine), until) for loop in LOOPS}
    finally:
        torch.backends.cudnn.benchmark = was_tuning
        torch.set_num_threads(threads)
    outcome = Outcome(
        [
            *("rule", "place in the advice", "step before (ms)", "step after (ms)"),
            *("predicted saving (ms)", "measured saving (ms)", "predicted / measured"),
        ]
    )
    for loop in LOOPS:
        _add(outcome, loop, timed[loop.name], found[loop.name], machine)
    outcome.notes += [
        f"Each prediction is of {_CAPTURES} capture of {_CAPTURED_STEPS} steps. The step of a"
        " larger batch is given for a batch of the slow loop's size.",
        "Not shown: host-bound (the same idle time as batch-size, saved by compiling), memory-near-full (a"
        " risk without a saving), and the rules on several GPUs. No rule advises channels_last.",
    ]
    return outcome


def _attempt(work: Callable[[], T], until: float) -> T | str:
    """Return the result, or why there is none: a failing loop must not cost the results of the others."""
    try:
        if time.monotonic() > until:
            return "not run: no time was left"
        return work()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    finally:
        _free()


def _free() -> None:
    """Give back what a loop had: its workers end with their iterator, and its memory is another loop's."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _timed(loop: SlowLoop, machine: Machine) -> Timed:
    """Run both loops alternately; return the means of their steps."""
    torch.manual_seed(0)
    slow, tuned = loop.build(machine, False), loop.build(machine, True)
    counts = []
    for step in (slow, tuned):
        _steps_ms(step, machine.amount(_WARM_UP, 1), machine)
        estimate_ms = _steps_ms(step, machine.amount(_FEWEST_STEPS, 1), machine)
        count = min(max(round(1e3 * _TURN_SECONDS / estimate_ms), _FEWEST_STEPS), _MAX_STEPS)
        counts.append(machine.amount(count, 2))
    turns = []
    for _ in range(machine.amount(_TURNS, 1)):
        for step, count in zip((slow, tuned), counts, strict=True):
            _steps_ms(step, machine.amount(_AFTER_A_PAUSE, 1), machine)
            turns.append(_steps_ms(step, count, machine))
    return Timed(fmean(turns[0::2]), fmean(turns[1::2]) / loop.batches)


def _steps_ms(step: Step, count: int, machine: Machine) -> float:
    """Train for some steps; return their mean time, until the device is done with the last."""
    machine.wait()
    began = time.perf_counter()
    for _ in range(count):
        step()
    machine.wait()
    return 1e3 * (time.perf_counter() - began) / count


def _advice(loop: SlowLoop, machine: Machine) -> list[Sequence[Advice]]:
    """Capture the slow loop; return the advice on each trace."""
    torch.manual_seed(0)
    with attached() as client:
        train = loop.build(machine, False)

        def step() -> None:
            train()
            client.step()

        for _ in range(machine.amount(_REPORTS, 2)):
            _train_for(0 if machine.is_rehearsal else _BETWEEN_REPORTS_SECONDS, step)
            client.report()
        steps = machine.amount(_CAPTURED_STEPS, 3)
        return [
            record(client, step, steps, profile_memory=loop.profile_memory).advice
            for _ in range(machine.amount(_CAPTURES, 1))
        ]


def _train_for(seconds: float, step: Step) -> None:
    """Train for some time, and at least for a few steps."""
    until = time.monotonic() + seconds
    for _ in range(_AFTER_A_PAUSE):
        step()
    while time.monotonic() < until:
        step()


def _add(
    outcome: Outcome,
    loop: SlowLoop,
    timed: Timed | str,
    found: list[Sequence[Advice]] | str,
    machine: Machine,
) -> None:
    """Add a loop's row, its bounds, and a note if anything is unexpected."""
    times = predicted_ms = None
    place = "unknown"
    if isinstance(timed, str):
        outcome.notes.append(f"{loop.name}: the loops could not be timed. {timed}")
    else:
        times = timed
    if isinstance(found, str):
        outcome.notes.append(f"{loop.name}: the slow loop could not be analysed. {found}")
    else:
        places = [place_of(loop.rule, advice) for advice in found]
        predicted_ms = fmean(saving_ms(loop.rule, advice) for advice in found)
        place = " / ".join(str(each or "no") for each in places)
        if any(each != 1 for each in places):
            outcome.notes.append(f"{loop.name}: the advice was {' / '.join(map(in_order, found))}.")
        outcome.bounds.append(
            Bound(
                f"{loop.name}: given for the slow loop (place {place})",
                None if machine.is_rehearsal else all(places),
            )
        )
    ratio = predicted_ms / times.saved_ms if times and predicted_ms is not None and times.saved_ms else None
    figures = (
        times and times.before_ms,
        times and times.after_ms,
        predicted_ms,
        times and times.saved_ms,
        ratio,
    )
    cells = ["unknown" if each is None else f"{each:.2f}" for each in figures]
    outcome.rows.append([loop.name, place, *cells])
    is_close = times is not None and predicted_ms is not None and is_within(predicted_ms, times.saved_ms)
    outcome.bounds.append(
        Bound(
            f"{loop.name}: the predicted saving is within {WITHIN:.0%} of the measured one"
            f" ({cells[2]} ms of {cells[3]} ms)",
            None if machine.is_rehearsal else is_close,
        )
    )
