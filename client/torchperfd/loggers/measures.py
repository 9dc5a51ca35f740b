"""Measures for loggers: the means of the steps between two readings of the totals. Pure."""

from torchperfd.steps.phases import PhaseNames
from torchperfd.steps.totals import KindTotals, Totals


def measures(before: Totals, now: Totals, names: PhaseNames) -> dict[str, float]:
    """Return the numbers by name; none while no step has ended in between.

    The first training step is in none of them. Times are seconds per step, so that a step's
    phases sum to it; the rate of a phase is that of its time alone. Memory is as of now.
    """
    train = now.train.minus(before.train if before.train.steps else now.warmup)
    validate = now.validate.minus(before.validate)
    found = {**_kind("train", train, names), **_kind("validate", validate, names)}
    if found:
        found.update(_beside(now, train))
    return found


def _kind(kind: str, steps: KindTotals, names: PhaseNames) -> dict[str, float]:
    if steps.steps <= 0:
        return {}
    found = {f"torchperfd/{kind}/step_seconds": steps.mean_seconds}
    for counted, count in (("samples", steps.samples), ("tokens", steps.tokens)):
        if count and steps.ns:
            found[f"torchperfd/{kind}/{counted}_per_second"] = count / (steps.ns / 1e9)
    for slot in range(len(names)):
        phase = steps.phases[slot]
        if phase.calls:
            # A slash would be one more level, and some trackers keep levels as directories.
            name = names.name(slot).replace("/", "_")
            found[f"torchperfd/{kind}/phase_seconds/{name}"] = phase.ns / steps.steps / 1e9
            if steps.samples and phase.ns:
                rate = steps.samples / (phase.ns / 1e9)
                found[f"torchperfd/{kind}/phase_samples_per_second/{name}"] = rate
    return found


def _beside(now: Totals, train: KindTotals) -> dict[str, float]:
    found: dict[str, float] = {}
    utilization = now.flops_utilization(train)
    if utilization is not None:
        found["torchperfd/train/model_flops_utilization"] = utilization
    if now.cuda is not None:
        found["torchperfd/cuda/allocated_bytes"] = now.cuda.allocated
        found["torchperfd/cuda/reserved_bytes"] = now.cuda.reserved
        found["torchperfd/cuda/peak_bytes"] = now.cuda.peak
    if now.overhead is not None:
        found["torchperfd/client/overhead_ratio"] = now.overhead
    return found
