"""What loggers are sent: the means of the steps between two readings of the account. Pure."""

from torchperfd.account import Account, KindAccount
from torchperfd.phases import PhaseNames


def measures(before: Account, now: Account, names: PhaseNames) -> dict[str, float]:
    """Return the numbers by name; none for a kind of which no step has ended in between.

    The first training step is in none of them. Times are seconds per step, so that a step's
    phases sum to it.
    """
    already = before.train if before.train.steps else now.warmup
    found: dict[str, float] = {}
    found.update(_kind("train", now.train.minus(already), names))
    found.update(_kind("validate", now.validate.minus(before.validate), names))
    return found


def _kind(kind: str, steps: KindAccount, names: PhaseNames) -> dict[str, float]:
    if steps.steps <= 0:
        return {}
    found = {f"torchperfd/{kind}/step_seconds": steps.ns / steps.steps / 1e9}
    if steps.samples and steps.ns:
        found[f"torchperfd/{kind}/samples_per_second"] = steps.samples / (steps.ns / 1e9)
    for slot in range(len(names)):
        if steps.phases[slot].calls:
            # A slash would be one more level, and some trackers keep levels as directories.
            name = names.name(slot).replace("/", "_")
            found[f"torchperfd/{kind}/phase_seconds/{name}"] = steps.phases[slot].ns / steps.steps / 1e9
    return found
