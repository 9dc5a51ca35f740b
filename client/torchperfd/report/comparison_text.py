"""A comparison of two runs in words: for a terminal, for a pull request, and beside its numbers as JSON."""

import time
from itertools import chain
from typing import Any

from torchperfd.model.formatting import milliseconds
from torchperfd.model.terminal_text import TextTable, fold_text, markdown_table, paint
from torchperfd.report.comparison import PhaseChange, RunComparison
from torchperfd.report.record import RunRecord

_HEADS = ("phase", "A ms", "B ms", "change ms", "of the step", "")
_PART_HEADS = ("where a step goes", "A ms", "B ms", "change ms")
_CONTEXT = len("differs    ")


def comparison_document(comparison: RunComparison) -> dict[str, Any]:
    """Return the document of schema ``torchperfd.run_comparison/1``, with the sentences of the text."""
    return {**comparison.to_dict(), "headline": headline(comparison), "findings": findings(comparison)}


def comparison_text(comparison: RunComparison, *, colour: bool = False, width: int | None = None) -> str:
    """Return lines for people, without a newline at the end; slower is red, and faster is green.

    Args:
        width: Columns of the terminal; None if the text is not for one.
    """
    sides = (("A", comparison.before), ("B", comparison.after))
    lines = [
        *(fold_text(f"{name}  {_side(run)}", width, margin=3) for name, run in sides),
        "",
        paint(fold_text(headline(comparison), width), _style(comparison), colour=colour),
        *(fold_text(line, width) for line in findings(comparison)),
        "",
    ]
    rows = [_cells(phase) for phase in comparison.phases]
    drawn = TextTable(
        _HEADS, rows, left=(_HEADS[0], _HEADS[-1]), shorten=_HEADS[0], lift=_HEADS[:1], folds_heads=True
    ).draw(width)
    lines += [paint(line, "dim", colour=colour) for line in drawn.head]
    for phase, row in zip(comparison.phases, drawn.rows, strict=True):
        style = _phase_style(phase)
        lines += [paint(line, style, colour=colour) if style else line for line in row]
    if comparison.parts:
        drawn = TextTable(
            _PART_HEADS, _part_cells(comparison), left=_PART_HEADS[:1], lift=_PART_HEADS[:1], folds_heads=True
        ).draw(width)
        lines += ["", *(paint(line, "dim", colour=colour) for line in drawn.head), *chain(*drawn.rows)]
    context = [fold_text(line, width, margin=_CONTEXT) for line in _context(comparison)]
    return "\n".join([*lines, "", *context]).rstrip()


def comparison_markdown(comparison: RunComparison) -> str:
    """Return the same as GitHub-flavoured Markdown, without a newline at the end."""
    lines = [f"**{_escaped(headline(comparison))}**", ""]
    lines += [f"- {_escaped(line)}" for line in findings(comparison)]
    rows = [[_escaped(cell) for cell in _cells(phase)] for phase in comparison.phases]
    marks = ["**" if phase.is_changed else "" for phase in comparison.phases]
    rows = [[f"{mark}{cell}{mark}" for cell in row] for mark, row in zip(marks, rows, strict=True)]
    lines += ["", *markdown_table((*_HEADS[:-1], "verdict"), "|:--|--:|--:|--:|--:|:--|", rows)]
    if comparison.parts:
        rows = [[_escaped(cell) for cell in cells] for cells in _part_cells(comparison)]
        lines += ["", *markdown_table(_PART_HEADS, "|:--|--:|--:|--:|", rows)]
    lines += ["", f"- A: {_escaped(_side(comparison.before))}", f"- B: {_escaped(_side(comparison.after))}"]
    lines += [f"- {_escaped(line)}" for line in _context(comparison)]
    return "\n".join(lines)


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


def _context(comparison: RunComparison) -> list[str]:
    lines = []
    if comparison.machine_factor is not None:
        lines.append(f"A's times count {comparison.machine_factor:.2f} times for the changes of phases")
    if any(phase.mean.is_clipped for phase in comparison.changed_phases):
        lines.append("spikes clipped: the change leaves spikes out, A and B do not")
    for name, run in (("A", comparison.before), ("B", comparison.after)):
        if run.verdict:
            lines.append(f"verdict {name}  {run.verdict}")
    if comparison.differences:
        lines.append(f"differs    {'; '.join(each.words for each in comparison.differences)}")
    return lines


def _side(run: RunRecord) -> str:
    parts = [run.run]
    if run.started is not None:
        parts.append(time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started)))
    parts.append(f"{run.steps:,} steps")
    if run.world_size > 1:
        parts.append(f"{run.world_size} ranks")
    if run.exit_state not in ("", "finished"):
        parts.append(run.exit_state)
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


def _part_cells(comparison: RunComparison) -> list[tuple[str, ...]]:
    return [
        (words, _ms(before), _ms(after), _difference(after - before))
        for words, before, after in comparison.parts
    ]


def _difference(seconds: float) -> str:
    return f"{1e3 * seconds:+.3f}" if abs(seconds) < 1e-3 else f"{1e3 * seconds:+.2f}"


def _style(comparison: RunComparison) -> str:
    if not comparison.is_changed:
        return "bold"
    return "bad" if comparison.step.difference > 0 else "good"


def _phase_style(phase: PhaseChange) -> str:
    if not phase.is_changed:
        return ""
    return "bad" if phase.share > 0 else "good"


def _outcome(phase: PhaseChange) -> str:
    if not phase.is_changed:
        return "within noise"
    return "changed (spikes clipped)" if phase.mean.is_clipped else "changed"


def _ms(seconds: float) -> str:
    return milliseconds(seconds, 3)


def _percent(share: float) -> str:
    text = f"{100 * share:+.1f} %"
    return "0.0 %" if text in ("+0.0 %", "-0.0 %") else text


def _escaped(text: str) -> str:
    return "".join(f"\\{each}" if each in "\\|*_`<>[]" else each for each in text)
