"""Earlier runs of the same script: their advice on the loader, and what became of a promised gain."""

import hashlib
import math
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from torchperfd.errors import TorchperfdError
from torchperfd.model.significance import MIN_BLOCKS
from torchperfd.model.verdict_document import SettledAdvice
from torchperfd.report.comparison import compare_runs
from torchperfd.report.ending import FAILED
from torchperfd.report.promise import CHANGED, MACHINE, NOISE, UNCHANGED, Promise, PromiseOutcome
from torchperfd.report.record import RankBlocks, RankRecord, RunFileError, RunRecord, read_record
from torchperfd.report.store import RunStore

MAX_BYTES: Final = 8 << 20
"""Larger reports of earlier runs are not read."""
_MAX_RUNS: Final = 4
_DIGITS: Final = 16


@dataclass(frozen=True, slots=True)
class AdvisedRun:
    """What the card of a kept run advised.

    Attributes:
        run_id: Of the run, as ``torchperfd runs show`` takes it.
        settled: What it was advised on its loaders.
    """

    run_id: str
    settled: SettledAdvice


def newest_advised(store: RunStore, script: str) -> AdvisedRun | None:
    """Return what the newest run of a script on this machine was advised; None without such a run.

    Args:
        script: Path of the script.
    """
    host = os.environ.get("NODE_NAME") or socket.gethostname()
    with suppress(OSError):
        for run_id, content in store.newest_with(script_marker(script), _MAX_RUNS, MAX_BYTES):
            with suppress(TorchperfdError):
                record = read_record(content, run_id)
                if record.loader_advice is not None and record.host == host:
                    return AdvisedRun(run_id, record.loader_advice)
    return None


def script_marker(script: str) -> bytes:
    """Return the text by which :meth:`RunStore.newest_with` finds the runs of a script.

    Args:
        script: Its path.
    """
    return f'"path":"{script_digest(os.path.realpath(script))}"'.encode()


def script_digest(path: str) -> str:
    """Return the digest of a script's resolved path that reports contain in its place."""
    return hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:_DIGITS]


_SAME_BATCH: Final = 0.05
"""Batches whose mean sizes differ by a smaller part are alike: the last one of an epoch may be smaller."""
_MIN_CHANGE: Final = 0.01
_NOT_THE_USERS: Final = frozenset({"host", "torchperfd"})
"""What may differ between two runs without a change by their user that a step depends on."""


def outcome_of(run: RunRecord, earlier: Iterable[tuple[str, RunRecord]]) -> PromiseOutcome | None:
    """Return what a run has made of the newest promise before it.

    Args:
        run: The new one.
        earlier: Kept runs with their ids, the newest first.

    Returns:
        None without a promise, and where one of both runs has failed or has too few steps to compare. A run
        that has answered a promise closes it: later ones are compared with what that run promises.
    """
    if not _is_comparable(run) or run.source is None:
        return None
    for run_id, before in earlier:
        if not _is_comparable(before) or not _is_alike(before, run):
            continue
        if _is_unchanged(before, run):
            return PromiseOutcome(run_id, UNCHANGED)
        if before.promises:
            try:
                return _judge(run_id, before, run)
            except RunFileError:
                continue
        if before.outcome is not None:
            return None
    return None


def _is_comparable(run: RunRecord) -> bool:
    has_blocks = any(rank.blocks and len(rank.blocks.step) >= MIN_BLOCKS for rank in run.ranks)
    return run.exit_state != FAILED and has_blocks


def _is_alike(before: RunRecord, after: RunRecord) -> bool:
    """Return whether it is the same script and kind of job; its arguments may differ."""
    return (
        before.source is not None
        and after.source is not None
        and before.source.path == after.source.path
        and before.world_size == after.world_size
        and before.environment.get("device") == after.environment.get("device")
    )


def _is_unchanged(before: RunRecord, after: RunRecord) -> bool:
    """Return whether script, arguments, versions and settings are the same, as far as both are known."""
    if not before.source or not before.source.code or before.source != after.source:
        return False
    old, new = (
        {name: value for name, value in run.in_effect.items() if name not in _NOT_THE_USERS}
        for run in (before, after)
    )
    return all(old[name] == new[name] for name in old.keys() & new.keys())


def _judge(run_id: str, before: RunRecord, after: RunRecord) -> PromiseOutcome:
    promise = _answered(before, after)
    size, new_size = before.samples_per_step, after.samples_per_step
    is_per_sample = bool(size and new_size) and abs(math.log(new_size / size)) > _SAME_BATCH
    if is_per_sample:
        before, after = _scaled(before, 1 / size), _scaled(after, 1 / new_size)
    comparison = compare_runs(before, after)
    is_own = is_per_sample or any(each.name not in _NOT_THE_USERS for each in comparison.differences)
    factor = None if is_own or not comparison.is_step_changed else comparison.machine_factor
    speed = factor or 1.0
    step, state = comparison.step, NOISE
    beyond = step.after / (speed * step.before) - 1
    if comparison.is_step_changed:
        state = CHANGED
        if factor is not None and (not comparison.changed_phases or abs(beyond) < _MIN_CHANGE):
            state, factor, speed, beyond = MACHINE, None, 1.0, comparison.ratio
    return PromiseOutcome(
        run=run_id,
        state=state,
        cause=promise.cause,
        fix=promise.fix,
        promised_ratio=None if promise.saving is None else _rounded(-promise.saving),
        cost_ratio=_rounded(promise.cost),
        before_seconds=_rounded(speed * step.before),
        after_seconds=_rounded(step.after),
        ratio=_rounded(beyond),
        ratio_margin=_rounded(comparison.ratio_margin / speed),
        machine_ratio=None if factor is None else _rounded(factor - 1),
        is_per_sample=is_per_sample,
        has_unseen_ranks=bool(before.unseen_ranks or after.unseen_ranks),
    )


def _rounded(number: float) -> float:
    """Return a number as blocks of steps are kept: to five digits."""
    return float(f"{number:.5g}")


def _answered(before: RunRecord, after: RunRecord) -> Promise:
    """Return the promise whose setting the later run has; the first one if it has none of them."""
    old, new = before.in_effect, after.in_effect
    return next((each for each in before.promises if each.is_kept_by(old, new)), before.promises[0])


def _scaled(run: RunRecord, factor: float) -> RunRecord:
    """Return a run all times of which are multiplied."""
    return replace(run, ranks=tuple(_scaled_rank(rank, factor) for rank in run.ranks))


def _scaled_rank(rank: RankRecord, factor: float) -> RankRecord:
    blocks = rank.blocks
    if blocks is not None:
        phases = {name: _times(column, factor) for name, column in blocks.phases.items()}
        blocks = RankBlocks(blocks.steps, _times(blocks.step, factor), phases)
    return replace(
        rank,
        step_seconds=None if rank.step_seconds is None else factor * rank.step_seconds,
        phase_seconds={name: factor * each for name, each in rank.phase_seconds.items()},
        blocks=blocks,
    )


def _times(column: Iterable[float], factor: float) -> tuple[float, ...]:
    return tuple(factor * each for each in column)
