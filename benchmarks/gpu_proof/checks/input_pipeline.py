"""A ResNet-18 that waits for its images, and what it gains as the advice is followed.

The script is the one that tutorials on torch's profiler begin with: CIFAR-10 images, indexed and transformed
one by one in the training process, batches of 32. The client is attached all the time. Each configuration is
timed, then captured, and the advice on it is shown.
"""

import gc
import re
import time
from dataclasses import dataclass, replace
from typing import Final

import torch
from benchmarks.gpu_proof.analysed_capture import WITHIN, attached, in_order, is_within, record, saving_ms
from benchmarks.gpu_proof.cifar_script import Configuration, Images, Script
from benchmarks.gpu_proof.machine import Machine
from benchmarks.gpu_proof.outcome import Bound, Outcome

from torchperfd.client import Client
from torchperfd.steps.totals import KindTotals
from torchperfd.v1.contract import PHASES
from torchperfd_daemon.analysis import Advice, Summary

TITLE: Final = "ResNet-18 on CIFAR-10: from a slow input pipeline to a busy GPU"
SECONDS: Final = 90
FASTER_BY: Final = 5.0
"""The last configuration must train on so many times the images per second of the first."""
MIN_DATA_SHARE: Final = 0.30
"""The first configuration must wait for its data for at least this share of the step."""

_SECONDS_OF_STEPS: Final = 3.0
_WARM_UP_SECONDS: Final = 1.0
# The first steps of a configuration start workers and choose kernels.
_FIRST_STEPS: Final = 10
_CAPTURED_STEPS: Final = 8
_WORKERS: Final = re.compile(r"num_workers=(\d+)")


@dataclass(frozen=True, slots=True)
class Measured:
    """One configuration's figures.

    Attributes:
        step_ms: Mean step by the wall clock.
        steps: The client's totals of the same steps.
        capture: The analysis of a few steps after them.
    """

    configuration: Configuration
    step_ms: float
    steps: KindTotals
    capture: Summary

    @property
    def images_per_second(self) -> float:
        return 1e3 * self.configuration.batch / self.step_ms

    @property
    def data_share(self) -> float:
        """The share of the step in which the loop waits for its data, by the client."""
        return self.steps.phases[PHASES.index("data")].ns / max(self.steps.ns, 1)

    @property
    def device_share(self) -> float | None:
        """The share of the step that the client charges the device for phases other than data.

        None without a device.
        """
        phases = [phase for slot, phase in enumerate(self.steps.phases) if slot != PHASES.index("data")]
        device_ns = sum(phase.device_ns for phase in phases)
        return device_ns / self.steps.ns if device_ns and self.steps.ns else None

    @property
    def busy_share(self) -> float | None:
        """The share of the captured steps in which the device ran anything; None without a device."""
        found = self.capture.step_breakdowns
        window_ns = sum(each.window_ns for each in found)
        is_shown = window_ns and any(each.n_gpu_events for each in found)
        return sum(each.busy_ns for each in found) / window_ns if is_shown else None

    @property
    def advice(self) -> tuple[Advice, ...]:
        """The advice on the captured steps, most time saved first."""
        return self.capture.advice


def run(machine: Machine) -> Outcome:
    """Follow the advice step by step."""
    outcome = Outcome(
        [
            *("configuration", "images/s", "step (ms)", "data share (client)", "device share (client)"),
            *("device busy (trace)", "first advice, predicted saving"),
        ]
    )
    images = Images(machine.amount(50_000, 64))
    threads = torch.get_num_threads()
    if machine.is_rehearsal:
        # Beside other work, threads that wait for each other make tiny operators a hundred times slower.
        torch.set_num_threads(1)
    try:
        first, *others = _configurations(machine)
        written = _measure(machine, first, images)
        outcome.rows.append(_row(written))
        workers = workers_advised(written.advice)
        followed = None
        if workers is not None:
            exact = replace(first, name="the first advice, exactly", workers=workers)
            followed = _attempt(machine, exact, images, outcome)
        tuned = [_attempt(machine, each, images, outcome) for each in others]
    finally:
        torch.set_num_threads(threads)
    outcome.bounds = _bounds(machine, written, tuned[-1], followed)
    outcome.notes += [
        "Every step reads the loss and the accuracy back, as the script's progress bar does.",
        "The device share is the part of the step that the client charges the device for other phases than"
        " data, gaps between kernels included. Busy is the time in which anything ran, in captured steps.",
        f"All advice on the first configuration: {in_order(written.advice)}.",
    ]
    if tuned[-1] is not None:
        outcome.notes.append(f"All advice on the last configuration: {in_order(tuned[-1].advice)}.")
    return outcome


def workers_advised(advice: tuple[Advice, ...]) -> int | None:
    """Return ``num_workers`` of the first advice; None if that is about something else."""
    if not advice or advice[0].rule != "loader-workers":
        return None
    match = _WORKERS.search(advice[0].setting)
    return int(match[1]) if match else None


def _configurations(machine: Machine) -> list[Configuration]:
    """Return the steps of the story; smaller in a rehearsal."""
    workers, small, large = machine.amount(8, 2), machine.amount(32, 2), machine.amount(256, 4)
    return [
        Configuration(f"as written: batch {small}, no workers", batch=small),
        Configuration(f"{workers} workers, pinned memory", workers, small),
        Configuration(f"and batch {large}", workers, large),
        Configuration("and bfloat16, channels_last", workers, large, is_bf16=True),
    ]


def _attempt(
    machine: Machine, configuration: Configuration, images: Images, outcome: Outcome
) -> Measured | None:
    """Measure and add a row, or a note if that fails: the other configurations count without it."""
    try:
        measured = _measure(machine, configuration, images)
    except Exception as error:  # noqa: BLE001
        outcome.notes.append(f"{configuration.name}: not measured. {type(error).__name__}: {error}")
        return None
    outcome.rows.append(_row(measured))
    return measured


def _measure(machine: Machine, configuration: Configuration, images: Images) -> Measured:
    """Train for a while with the client attached, then capture."""
    # The workers of the configuration before end with their iterator.
    gc.collect()
    torch.manual_seed(0)
    script = Script(machine, configuration, images)
    with attached(script.model) as client:
        _train(script, machine, machine.amount(_FIRST_STEPS, 1), _WARM_UP_SECONDS)
        before = _totals(client)
        began = time.perf_counter()
        count = _train(script, machine, machine.amount(_FIRST_STEPS, 3), _SECONDS_OF_STEPS)
        step_ms = 1e3 * (time.perf_counter() - began) / count
        steps = _totals(client).minus(before)
        capture = record(client, script.step, machine.amount(_CAPTURED_STEPS, 2), profile_memory=True)
    return Measured(configuration, step_ms, steps, capture)


def _train(script: Script, machine: Machine, least: int, seconds: float) -> int:
    """Train for at least so many steps, and so long unless it is a rehearsal; return the number of steps."""
    until = time.perf_counter() + (0.0 if machine.is_rehearsal else seconds)
    count = 0
    while count < least or time.perf_counter() < until:
        script.step()
        count += 1
    machine.wait()
    return count


def _totals(client: Client) -> KindTotals:
    return client.report().totals.train.copy()


def _row(measured: Measured) -> list[str]:
    advice = measured.advice[0] if measured.advice else None
    shares = (measured.data_share, measured.device_share, measured.busy_share)
    return [
        measured.configuration.name,
        f"{measured.images_per_second:,.0f}",
        f"{measured.step_ms:.2f}",
        *("unknown" if each is None else f"{each:.0%}" for each in shares),
        f"{advice.rule}: {saving_ms(advice.rule, measured.advice):.2f} ms ({advice.share_of_step:.0%})"
        if advice
        else "none",
    ]


def _bounds(
    machine: Machine, first: Measured, last: Measured | None, followed: Measured | None
) -> list[Bound]:
    """Return what must hold; a rehearsal shows none of it."""
    faster = last.images_per_second / first.images_per_second if last is not None else 0.0
    predicted_ms = saving_ms("loader-workers", first.advice[:1])
    saved_ms = first.step_ms - followed.step_ms if followed is not None else 0.0
    held = {
        f"the last configuration trains on {FASTER_BY:g} times as many images/s as the first, or more:"
        f" {faster:.1f} times": faster >= FASTER_BY,
        f"the client shows that the first configuration waits for data for {MIN_DATA_SHARE:.0%} of the"
        f" step or more: {first.data_share:.0%}": first.data_share >= MIN_DATA_SHARE,
        f"the first advice is loader-workers, and the saving that it predicts is within {WITHIN:.0%} of the"
        f" measured one: {predicted_ms:.2f} ms of {saved_ms:.2f} ms": is_within(predicted_ms, saved_ms),
    }
    return [Bound(text, None if machine.is_rehearsal else each) for text, each in held.items()]
