"""Earlier runs of the same script, and a comparison of two runs in words.

An earlier run has given advice on the loader, and may have promised a gain. A comparison is written for a
terminal, for a pull request, and beside its numbers as JSON.
"""

import hashlib
import math
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from torchperfd.document.blocks import Block, Document, Facts, Heading, Sentences
from torchperfd.document.tables import Table
from torchperfd.document.text import Style
from torchperfd.model.formatting import milliseconds
from torchperfd.model.significance import MIN_BLOCKS
from torchperfd.report.comparison import PhaseChange, RunComparison, compare_runs
from torchperfd.report.ending import FAILED
from torchperfd.report.promise import CHANGED, MACHINE, NOISE, UNCHANGED, Promise, PromiseOutcome
from torchperfd.report.record import RankRecord, RunFileError, RunRecord

_HEADS = ("phase", "A ms", "B ms", "change ms", "of the step", "verdict")
_PART_HEADS = ("where a step goes", "A ms", "B ms", "change ms")
_CONTEXT = len("differs    ")


def comparison_document(comparison: RunComparison) -> dict[str, Any]:
    """Return the document of schema ``torchperfd.run_comparison/1``, with the sentences of the text."""
    return {**comparison.to_dict(), "headline": headline(comparison), "findings": findings(comparison)}


def people_document(comparison: RunComparison) -> Document:
    """Return the comparison for people: both sides, what changed, and the context."""
    context = Document([[_notes(comparison), Facts(_context(comparison), column=_CONTEXT)]])
    return Document([[Facts(_sides(comparison), column=3)]]) + _changes(comparison) + context


def markdown_document(comparison: RunComparison) -> Document:
    """Return the same for Markdown, what changed first."""
    last: list[Block] = [Facts(_sides(comparison)), _notes(comparison), Facts(_context(comparison))]
    return _changes(comparison) + Document([last])


def _changes(comparison: RunComparison) -> Document:
    phases = Table(
        _HEADS,
        [_cells(phase) for phase in comparison.phases],
        left=(_HEADS[0], _HEADS[-1]),
        shorten=_HEADS[0],
        lift=_HEADS[:1],
        folds_heads=True,
        head_style="dim",
        styles=[_style(phase.share, is_changed=phase.is_changed) for phase in comparison.phases],
    )
    parts = Table(
        _PART_HEADS,
        [
            (words, _ms(before), _ms(after), _difference(after - before))
            for words, before, after in comparison.parts
        ],
        left=_PART_HEADS[:1],
        lift=_PART_HEADS[:1],
        folds_heads=True,
        head_style="dim",
    )
    style = _style(comparison.step.difference, is_changed=comparison.is_changed)
    above = (
        Heading(headline(comparison), style=style or "bold"),
        Sentences(findings(comparison), is_list=True),
    )
    return Document([above, [phases], [parts] if comparison.parts else []])


def headline(comparison: RunComparison) -> str:
    """Return the change of the step time in one line."""
    step = comparison.step
    words = "no change beyond noise"
    if comparison.is_changed:
        words = "slower" if step.difference > 0 else "faster"
    elif comparison.is_step_changed:
        words = "the machine's speed changed, not the run"
    return (
        f"step time {_ms(step.before)} → {_ms(step.after)} ms, {_percent(comparison.ratio)}"
        f" ± {100 * comparison.ratio_margin:.1f} %: {words}{' (spikes clipped)' if step.is_clipped else ''}"
    )


def findings(comparison: RunComparison) -> list[str]:
    """Return what explains the change, a line each; empty where nothing changed."""
    lines = []
    factor = comparison.machine_factor
    if factor is not None:
        other = "what differs below" if comparison.differences else "a change of the whole script"
        lines.append(f"all phases changed alike, by {_percent(factor - 1)}: machine speed, or {other}")
    for phase in comparison.changed_phases:
        beyond = " beyond that" if factor is not None else ""
        lines.append(f"{phase.name} changed by {_percent(phase.share)} of the step{beyond}")
    if comparison.is_changed and not lines:
        lines.append("no single phase stands out from noise")
    slow = comparison.slow_ranks
    if slow[0] != slow[1]:
        before, after = ("none" if rank is None else str(rank) for rank in slow)
        lines.append(f"slow rank {before} → {after}")
    return lines


def _sides(comparison: RunComparison) -> list[tuple[str, str]]:
    return [("A", _side(comparison.before)), ("B", _side(comparison.after))]


def _notes(comparison: RunComparison) -> Sentences:
    lines = []
    if comparison.machine_factor is not None:
        lines.append(f"A's times count {comparison.machine_factor:.2f} times for the changes of phases")
    if any(phase.mean.is_clipped for phase in comparison.changed_phases):
        lines.append("spikes clipped: the change leaves spikes out, A and B do not")
    return Sentences(lines, margin=_CONTEXT, is_list=True)


def _context(comparison: RunComparison) -> list[tuple[str, str]]:
    lines = []
    for name, run in (("A", comparison.before), ("B", comparison.after)):
        if run.verdict:
            lines.append((f"verdict {name}", run.verdict))
    if comparison.differences:
        lines.append(("differs", "; ".join(each.words for each in comparison.differences)))
    return lines


def _side(run: RunRecord) -> str:
    parts = [run.run]
    if run.started is not None:
        parts.append(time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started)))
    parts.append(f"{run.steps:,} steps")
    if run.world_size > 1:
        parts.append(f"{run.world_size} ranks")
    if run.ending.state not in ("", "finished"):
        parts.append(run.ending.state)
    return "  ".join(parts)


def _cells(phase: PhaseChange) -> tuple[str, ...]:
    return (
        phase.name,
        _ms(phase.before),
        _ms(phase.after),
        _difference(phase.mean.difference),
        _percent(phase.share),
        _outcome(phase),
    )


def _difference(seconds: float) -> str:
    return f"{1e3 * seconds:+.3f}" if abs(seconds) < 1e-3 else f"{1e3 * seconds:+.2f}"


def _style(change: float, *, is_changed: bool) -> Style:
    return ("bad" if change > 0 else "good") if is_changed else ""


def _outcome(phase: PhaseChange) -> str:
    if not phase.is_changed:
        return "within noise"
    return "changed (spikes clipped)" if phase.mean.is_clipped else "changed"


def _ms(seconds: float) -> str:
    return milliseconds(seconds, 3)


def _percent(share: float) -> str:
    text = f"{100 * share:+.1f} %"
    return "0.0 %" if text in ("+0.0 %", "-0.0 %") else text


MAX_BYTES: Final = 8 << 20
"""Larger reports of earlier runs are not read."""
_DIGITS: Final = 16


def script_marker(script: str) -> bytes:
    """Return the text by which :meth:`RunStore.newest_with` finds the runs of a script."""
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
    return run.ending.state != FAILED and has_blocks


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
        before, after = (
            replace(run, ranks=tuple(_scaled(rank, 1 / samples) for rank in run.ranks))
            for run, samples in ((before, size), (after, new_size))
        )
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


def _scaled(rank: RankRecord, factor: float) -> RankRecord:
    blocks = rank.blocks
    if blocks is not None:
        phases = {name: _times(column, factor) for name, column in blocks.phases.items()}
        blocks = replace(blocks, step=_times(blocks.step, factor), phases=phases)
    return replace(
        rank,
        step_seconds=None if rank.step_seconds is None else factor * rank.step_seconds,
        phase_seconds={name: factor * each for name, each in rank.phase_seconds.items()},
        blocks=blocks,
    )


def _times(column: Iterable[float], factor: float) -> tuple[float, ...]:
    return tuple(factor * each for each in column)
