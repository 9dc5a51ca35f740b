"""Rules with their conditions, what they find, and the choice of findings that becomes the advice of a run.

Also merges the advice of several ranks into one list, and shows it as a document and as dictionaries.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from torchperfd.document.blocks import Code, Document, Heading, Item, Sentences
from torchperfd.model.formatting import ns_text
from torchperfd_daemon.analysis.advice.context import AdviceContext
from torchperfd_daemon.analysis.advice.edits import NOTHING, Edit
from torchperfd_daemon.text import ranks_phrase

Per = Literal["step", "recording"]
MIN_NS: Final = 50_000
"""Findings that save less than this per step are left out,"""
MIN_SHARE: Final = 0.03
"""and those that save less than this share of the step."""
EXCHANGES: Final = frozenset({"gradient-accumulation", "exposed-communication"})
"""The rules on collective work of all ranks."""
LOSES_AS_WELL: Final = 0.5
"""A rank is named if its saving is at least this part of the largest rank's."""
# Ranks wait alike in exchanges if none waits longer than the one that waits least, by this factor.
_ALIKE: Final = 1.25


@dataclass(frozen=True, slots=True)
class Advice:
    """A change, its reason and its saving.

    Attributes:
        saves_ns_per_step: What the change would save; 0 for a risk that costs nothing yet.
        share_of_step: The same as a part of the step, 0 to 1.
        setting: The code to write, or the setting to make.
        per: The unit that ``saves_ns_per_step`` refers to; the whole recording if it has no steps.
        margin_ns: How far the saving may be off either way; 0 if replaying the steps explains them.
    """

    rule: str
    evidence: str
    saves_ns_per_step: float
    share_of_step: float
    change: str
    setting: str
    ranks: tuple[int, ...] = ()
    per: Per = "step"
    margin_ns: float = 0.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding of a rule, before it is weighed against other findings.

    Attributes:
        edit: What the change does to a step; its saving is that of the replayed step.
        risk: It is worth reporting although it saves nothing.
        most_ns: The most that it can save of a step, where the run shows a limit.
        settled_ns: It repeats what the run was advised, with that saving; None to find it by the edit.
    """

    rule: str
    evidence: str
    edit: Edit
    change: str
    setting: str
    risk: bool = False
    most_ns: float = math.inf
    settled_ns: float | None = None


def weigh(
    findings: Iterable[Finding],
    saved: Callable[[Edit], float],
    step_ns: float,
    per: Per = "step",
    margin_ns: float = 0.0,
) -> tuple[Advice, ...]:
    """Return the findings that save enough as advice, most time saved first.

    No two findings save the same time: each counts for what its edit saves beyond the edits of those that
    save more, and never for more than it saves alone. So all savings together are never more than the step.
    Of several findings of one rule, which are variants of one change, only the largest counts. A saving that
    may be nothing is left out.
    """
    alone = [(_alone(finding, saved), finding) for finding in findings]
    advice: list[Advice] = []
    seen: set[str] = set()
    edits, together, left = NOTHING, 0.0, step_ns
    for own, finding in sorted(alone, key=lambda each: (-each[0], each[1].rule)):
        if finding.rule in seen:
            continue
        with_it = saved(edits + finding.edit) if advice else own
        is_settled = finding.settled_ns is not None
        saves = min(own if is_settled else max(with_it - together, 0.0), own, left)
        share = saves / step_ns if step_ns else 0.0
        margin = 0.0 if is_settled else min(margin_ns, step_ns)
        if saves - margin < MIN_NS or share < MIN_SHARE:
            if not finding.risk:
                continue
            saves = share = margin = 0.0
        else:
            edits, together = edits + finding.edit, with_it
            left -= saves
        seen.add(finding.rule)
        advice.append(
            Advice(
                finding.rule,
                finding.evidence,
                saves,
                share,
                finding.change,
                finding.setting,
                per=per,
                margin_ns=margin,
            )
        )
    return tuple(sorted(advice, key=lambda each: -each.saves_ns_per_step))


def _alone(finding: Finding, saved: Callable[[Edit], float]) -> float:
    """Return what a finding saves of a step if nothing else is changed, in ns."""
    if finding.settled_ns is not None:
        return finding.settled_ns
    return min(saved(finding.edit), finding.most_ns)


def gather(ranks: Sequence[tuple[int | None, Sequence[Advice]]]) -> tuple[Advice, ...]:
    """Return the advice for a run, most time saved first.

    Ranks of one run wait for each other. So the saving of a rule is the largest saving of any rank, and that
    rank's evidence is shown. An exchange is different: all ranks wait in it until the last one has entered.
    So the rank that waits least shows the cost of the exchange. If that is nothing, the others wait for that
    rank and not for the exchange. Ranks that wait alike differ by chance, and the least of several is below
    what each of them loses: their mean counts.

    The advice names the ranks whose saving is at least :data:`LOSES_AS_WELL` of the largest one; for an
    exchange, all. Savings of different ranks may be of the same time. So each is cut to the share of the step
    that larger ones leave, as `weigh` does for one rank.
    """
    by_rule: dict[str, list[tuple[int | None, Advice]]] = {}
    for rank, each in ranks:
        for advice in each:
            by_rule.setdefault(advice.rule, []).append((rank, advice))
    found = []
    for rule, pairs in by_rule.items():
        if rule in EXCHANGES and len(pairs) < len(ranks):
            continue
        choose = min if rule in EXCHANGES else max
        _, chosen = choose(pairs, key=lambda pair: pair[1].saves_ns_per_step)
        if rule in EXCHANGES and chosen.saves_ns_per_step:
            savings = [each.saves_ns_per_step / chosen.saves_ns_per_step for _, each in pairs]
            times = statistics.fmean(each for each in savings if each <= _ALIKE)
            saves, share = chosen.saves_ns_per_step * times, min(chosen.share_of_step * times, 1.0)
            chosen = replace(chosen, saves_ns_per_step=saves, share_of_step=share)
        # A rule also fires on ranks with a small loss, which are not named.
        least = 0.0 if rule in EXCHANGES else LOSES_AS_WELL * chosen.saves_ns_per_step
        numbers = {rank for rank, each in pairs if rank is not None and each.saves_ns_per_step >= least}
        found.append(replace(chosen, ranks=tuple(sorted(numbers))))
    return _within_one_step(sorted(found, key=lambda each: -each.saves_ns_per_step))


def _within_one_step(advice: Sequence[Advice]) -> tuple[Advice, ...]:
    """Return the advice, its savings cut so that all together are no more than the shortest step."""
    steps = [each.saves_ns_per_step / each.share_of_step for each in advice if each.share_of_step]
    left = min(steps, default=0.0)
    kept = []
    for each in advice:
        if not each.share_of_step:
            kept.append(each)
            continue
        saves = min(each.saves_ns_per_step, left)
        share = each.share_of_step * saves / each.saves_ns_per_step
        is_whole = saves == each.saves_ns_per_step
        if is_whole or (saves >= MIN_NS and share >= MIN_SHARE):
            left -= saves
            kept.append(replace(each, saves_ns_per_step=saves, share_of_step=share))
    return tuple(sorted(kept, key=lambda each: -each.saves_ns_per_step))


# Fewer steps in less time show little but chance. It is 10 ms, rounded to whole milliseconds.
MIN_RECORDED_NS: Final = 9_500_000
MIN_STEPS: Final = 3
# Idle time is known only if at least this share of the launches has its kernels in the file.
_MIN_FOLLOWED: Final = 0.9


@dataclass(frozen=True, slots=True)
class Condition:
    """A fact that must be true of the run.

    Attributes:
        text: The fact, as the documentation lists it.
    """

    text: str
    holds: Callable[[AdviceContext], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; several rules with one name are variants of the same advice.

    Attributes:
        find: Yields the findings of a run for which all conditions hold.
    """

    name: str
    find: Callable[[AdviceContext], Iterator[Finding]]
    needs: tuple[Condition, ...] = ()

    def apply(self, context: AdviceContext) -> Iterator[Finding]:
        """Yield the findings; none unless all conditions hold."""
        if all(condition.holds(context) for condition in self.needs):
            yield from self.find(context)


LONG_ENOUGH: Final = Condition(
    "3 steps or 10 ms are recorded",
    lambda context: context.count >= MIN_STEPS or context.trace.duration_ns >= MIN_RECORDED_NS,
)
REPEATS: Final = Condition("steps are marked or inferred", lambda context: not context.is_whole)
ON_DEVICE: Final = Condition("a device ran something", lambda context: context.on_device)
ON_HOST_ALONE: Final = Condition("no device ran anything", lambda context: not context.on_device)
TRAINS: Final = Condition("training: a backward pass or an optimizer", lambda context: context.run.trains)
HOST_RECORDED: Final = Condition("operators are recorded", lambda context: context.run.has_operators)
# 9 of 10 launches have their kernels, no graph is being captured, and the recording is no cold start.
IDLE_KNOWN: Final = Condition(
    "idle time is known",
    lambda context: (
        context.followed_share >= _MIN_FOLLOWED
        and not context.is_capturing
        and not context.cold_start.is_cold
    ),
)
NOT_COMPILED: Final = Condition("not compiled already", lambda context: not context.run.is_compiled)
NO_GRAPHS: Final = Condition("no CUDA graphs already", lambda context: not context.run.launches_graphs)
COMPILES: Final = Condition(
    "torch.compile makes kernels for the device", lambda context: context.run.device_type.is_compiled_for
)
HAS_GRAPHS: Final = Condition(
    "the device is CUDA's or ROCm's", lambda context: context.run.device_type.has_graphs
)


def recording_notes(context: AdviceContext) -> list[str]:
    """Return a sentence for each thing in the recording that other steps of the run do not have."""
    lines = [*context.overheads.lines(0 if context.is_whole else context.count), *context.cold_start.lines]
    if context.on_device and context.followed_share < _MIN_FOLLOWED and not context.is_capturing:
        lines.append(
            f"only {context.followed_share:.0%} of the launches in the steps have their kernels in the file: "
            "no advice rests on idle time"
        )
    return lines


_INDENT: Final = 3


def advice_to_dict(advice: Sequence[Advice]) -> list[dict[str, Any]]:
    """Return the ``advice`` of the ``torchperfd.analysis/1`` document; times in µs."""
    return [
        {
            "rule": each.rule,
            "ranks": list(each.ranks),
            "evidence": each.evidence,
            "saves_us_per_step": each.saves_ns_per_step / 1000,
            "margin_us_per_step": each.margin_ns / 1000,
            "per": each.per,
            "share_of_step": each.share_of_step,
            "change": each.change,
            "setting": each.setting,
        }
        for each in advice
    ]


def advice_document(advice: Sequence[Advice], of: int = 0) -> Document:
    """Return the changes, most time saved first; empty without advice."""
    if not advice:
        return Document([])
    items = [
        Item(
            number,
            Heading(each.change, f": {_saves(each, of)}", fold="always"),
            (
                Sentences([each.evidence], indent=_INDENT, margin=_INDENT, fold="always"),
                Code(each.setting.splitlines(), "bold", indent=_INDENT, fold="always"),
            ),
        )
        for number, each in enumerate(advice, 1)
    ]
    return Document([[Heading("Advice", style="bold"), *items]])


def _saves(advice: Advice, of: int) -> str:
    on = f", on {ranks_phrase(sorted(advice.ranks), of)}" if advice.ranks else ""
    if not advice.saves_ns_per_step:
        return f"a risk, no time{on}"
    least, most = (advice.saves_ns_per_step + side * advice.margin_ns for side in (-1, 1))
    saved = f"{ns_text(least)} to {ns_text(most)}" if advice.margin_ns else ns_text(least)
    unit = "a step" if advice.per == "step" else "of the recording"
    return f"saves {saved} {unit} ({advice.share_of_step:.0%}){on}"
