"""The ``torchperfd.run/1`` document: names and units that scripts depend on. Fields are only added."""

from typing import TYPE_CHECKING, Any

from torchperfd.account import Account, KindAccount
from torchperfd.phases import PhaseNames
from torchperfd.report.numbers import between_ns, fit_ns

if TYPE_CHECKING:
    from torchperfd.report.rank import RankReport

RUN_SCHEMA = "torchperfd.run/1"


def run_document(run: str, ranks: "list[RankReport]", verdict: dict[str, Any] | None) -> dict[str, Any]:
    """Return the ``torchperfd.run/1`` document that ``torchperfd run --report`` writes."""
    return {
        "schema": RUN_SCHEMA,
        "run": run,
        "ranks": [rank.to_dict() for rank in sorted(ranks, key=lambda rank: rank.rank)],
        "verdict": verdict,
    }


def rank_document(rank: int, account: Account, names: PhaseNames) -> dict[str, Any]:
    """Return one rank's part of it.

    ``train`` has all steps, the first included; ``warmup`` is that first one again, by itself.
    ``warmup`` has no steps and ``fit`` is null where only the totals of a rank are known.
    """
    return {
        "rank": rank,
        "train": _kind(account.train, names),
        "validate": _kind(account.validate, names),
        "warmup": _kind(account.warmup, names),
        "fit": {"seconds_total": fit_ns(account) / 1e9, "between_seconds": between_ns(account) / 1e9}
        if account.began_ns
        else None,
    }


def _kind(kind: KindAccount, names: PhaseNames) -> dict[str, Any]:
    slots = [slot for slot in range(len(names)) if kind.phases[slot].calls]
    slots.sort(key=lambda slot: -kind.phases[slot].ns)
    return {
        "steps": kind.steps,
        "step_seconds_total": kind.ns / 1e9,
        "samples": kind.samples,
        "phases": {
            names.name(slot): {
                "calls": kind.phases[slot].calls,
                "seconds_total": kind.phases[slot].seconds,
                "mean_seconds": kind.phases[slot].mean_seconds,
                "std_seconds": kind.phases[slot].std_seconds,
            }
            for slot in slots
        },
    }
