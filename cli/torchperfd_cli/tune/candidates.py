"""Which changes are worth a trial, by where the steps' time goes. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from torchperfd.model.loader_facts import MAX_WORKERS, LoaderAdvice
from torchperfd_cli.tune.trial import (
    AMP,
    COMPILE,
    LOADER,
    MATMUL,
    OPTIMIZER,
    THREADS,
    ZERO_GRAD,
    Change,
    Trial,
    change,
)
from torchperfd_daemon.loader_workers import most_computing_workers

MIN_SHARE: Final = 0.03
"""What has a smaller share of the step cannot save enough to be measured."""
_MIN_WAIT: Final = 0.1
"""Workers do not come evenly, so that the loop always waits a little."""
_DEFAULT_PREFETCH: Final = 2


@dataclass(frozen=True, slots=True)
class Requested:
    """What to try, and what may change the training and is tried only on request.

    Attributes:
        amp: Automatic mixed precision, with bfloat16.
        matmul_precision: Of float32 matrix products: ``high`` or ``medium``; empty for none.
        only: Targets to try of those that are tried without a request; empty for all.
    """

    amp: bool = False
    compiles: bool = False
    matmul_precision: str = ""
    only: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Alternatives for one thing.

    Attributes:
        changes: Of which the best is kept, if it is faster.
        share: The most of a step that they can save, 0 to 1.
    """

    changes: tuple[Change, ...]
    share: float


def propose(
    trial: Trial, kept: Sequence[Change], requested: Requested, advice: LoaderAdvice | None = None
) -> tuple[list[Group], list[str]]:
    """Return what to try next, the largest share first, and what is not worth it, in words.

    Args:
        trial: A run with what has been kept so far.
    """
    facts = trial.facts
    groups: list[Group] = []
    skipped: list[str] = []
    for group, reason in (
        _loader(trial, kept, advice),
        _optimizer(trial, kept),
        _zero_grad(trial),
        _threads(trial, kept),
    ):
        if group is not None:
            if not requested.only or group.changes[0].target in requested.only:
                groups.append(group)
        elif reason:
            skipped.append(reason)
    if requested.matmul_precision and requested.matmul_precision != facts.matmul_precision:
        groups.append(Group((change(MATMUL, precision=requested.matmul_precision),), 0.5))
    if requested.amp:
        groups.append(Group((change(AMP),), 0.5))
    if requested.compiles:
        groups.append(Group((change(COMPILE),), 0.5))
    return sorted(groups, key=lambda group: -group.share), skipped


Proposal = tuple[Group | None, str]


def _loader(trial: Trial, kept: Sequence[Change], advice: LoaderAdvice | None) -> Proposal:
    loaders, facts = trial.facts.loaders, trial.facts
    if not loaders:
        return None, "DataLoader: the training loop draws from none"
    if all(each.is_iterable for each in loaders):
        return None, "DataLoader: of an iterable dataset, other workers may give other data"
    share = trial.share("data") + (trial.share("h2d") if facts.uses_cuda else 0.0)
    values = _kept_values(kept, LOADER)
    own = loaders[0]
    workers = values.get("num_workers", own.workers)
    prefetch = own.prefetch or _DEFAULT_PREFETCH
    found: list[dict[str, Any]] = []
    crowded = max(1, most_computing_workers(facts.cpus))
    if share >= (_MIN_WAIT if workers else MIN_SHARE):
        pinned = {"pin_memory": True} if facts.uses_cuda else {}
        counts = [min(2 * workers, MAX_WORKERS)] if values else _worker_counts(trial, workers, advice)
        for count in counts:
            found.append(
                {"num_workers": count, "persistent_workers": True, **pinned} if count else {"num_workers": 0}
            )
        if workers and not values:
            found.append({"num_workers": workers, "prefetch_factor": 2 * prefetch})
            if not own.is_persistent:
                found.append({"num_workers": workers, "persistent_workers": True})
        if pinned and not own.is_pinned:
            found.append(pinned)
    elif workers > 2 * facts.cpus:
        found.append({"num_workers": crowded})
        share = 1.0
    if not found:
        return None, f"DataLoader: the loop waits for it in {share:.1%} of a step"
    # Without workers the other arguments have no meaning.
    changes = [
        change(LOADER, **(each if each.get("num_workers") == 0 else {**values, **each})) for each in found
    ]
    return Group(tuple(dict.fromkeys(changes)), share), ""


def _worker_counts(trial: Trial, workers: int, advice: LoaderAdvice | None) -> list[int]:
    cpus = trial.facts.cpus
    most = min(MAX_WORKERS, max(4, round(2 * cpus)))
    data = trial.phases.get("data", 0.0)
    # A short run may have no samples of draws to advise from. Another sampler is more than arguments.
    advised = [advice.workers] if advice is not None and advice.rule == "loader-workers" else []
    if workers:
        counts = dict.fromkeys([*advised, min(2 * workers, MAX_WORKERS), 0])
        return [count for count in counts if count != workers]
    rest = max(trial.step_seconds - data, 1e-6)
    # One more than keeps up on average, since batches do not come evenly.
    needed = min(most, math.ceil(data / rest) + 1)
    others = sorted({needed, max(1, min(most, most_computing_workers(cpus)))}, reverse=True)
    return [count for count in dict.fromkeys([*advised, *others]) if count]


def _optimizer(trial: Trial, kept: Sequence[Change]) -> Proposal:
    facts = trial.facts
    optimizers = [each for each in facts.optimizers if each.can_foreach]
    if not optimizers:
        return None, "optimizer: it has neither fused nor foreach"
    values = _kept_values(kept, OPTIMIZER)
    is_fused = bool(values.get("fused")) or all(each.fused or not each.can_fuse for each in optimizers)
    # On CUDA foreach is the default.
    is_foreach = bool(values.get("foreach")) or all(each.foreach or each.fused for each in optimizers)
    found = []
    if not is_fused and any(each.can_fuse for each in optimizers):
        found.append(change(OPTIMIZER, fused=True))
    if not is_foreach and not facts.uses_cuda and not values.get("fused"):
        found.append(change(OPTIMIZER, foreach=True))
    if not found:
        return None, "optimizer: it is fused already"
    share = 1.0 if facts.uses_cuda else trial.share("optimizer")
    if share < MIN_SHARE:
        return None, f"optimizer: it has {share:.1%} of a step"
    return Group(tuple(found), min(share, 0.5) if facts.uses_cuda else share), ""


def _zero_grad(trial: Trial) -> Proposal:
    if not trial.facts.zeroing:
        return None, ""
    # Backward adds to gradients that exist, which costs as much again.
    share = 0.1 if trial.facts.uses_cuda else 2 * trial.share("zero_grad")
    if share < MIN_SHARE:
        return None, f"zero_grad: it has {share / 2:.1%} of a step"
    return Group((change(ZERO_GRAD, set_to_none=True),), share), ""


def _threads(trial: Trial, kept: Sequence[Change]) -> Proposal:
    facts = trial.facts
    if facts.uses_cuda:
        return None, "threads: the model computes on a CUDA device"
    share = 1 - trial.share("data")
    threads = _kept_values(kept, THREADS).get("threads", facts.threads)
    counts = sorted({1, max(1, int(facts.cpus) // 2), max(1, int(facts.cpus))} - {threads})
    if not counts:
        return None, "threads: there is one CPU"
    if share < MIN_SHARE:
        return None, f"threads: the loop computes in {share:.1%} of a step"
    return Group(tuple(change(THREADS, threads=count) for count in counts), share), ""


def _kept_values(kept: Sequence[Change], target: str) -> dict[str, Any]:
    return next((dict(each.values) for each in kept if each.target == target), {})
