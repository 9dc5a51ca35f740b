"""One piece of advice, the choice among several findings, and the advice of several ranks as one list."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

Per = Literal["step", "recording"]
LEAST_NS: Final = 50_000
"""What saves less than this a step is not said,"""
LEAST_SHARE: Final = 0.03
"""nor what saves less than this share of the step."""
EXCHANGES: Final = frozenset({"gradient-accumulation", "exposed-communication"})
"""The rules on what all ranks do together."""
LOSES_AS_WELL: Final = 0.5
"""A rank is named beside the one that loses most from this part of the latter's saving on."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A change, its reason and its saving.

    Attributes:
        rule: The rule that found it, such as ``loader-workers``.
        evidence: What the trace shows, one sentence with figures.
        saves_ns_per_step: What the change would save; 0 for a risk that costs nothing yet.
        share_of_step: The same as a part of the step, 0 to 1.
        change: What to do, one imperative sentence.
        setting: The code to write, or the setting to make.
        ranks: Which ranks lose by it materially; empty for a trace that does not say its rank.
        per: What ``saves_ns_per_step`` is of; the whole recording where nothing marks steps in it.
    """

    rule: str
    evidence: str
    saves_ns_per_step: float
    share_of_step: float
    change: str
    setting: str
    ranks: tuple[int, ...] = ()
    per: Per = "step"

    @property
    def per_what(self) -> str:
        """What the saving is of, in words that follow it."""
        return "a step" if self.per == "step" else "of the recording"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found, before it is weighed against what others found.

    Attributes:
        rule: As in `Advice`.
        evidence: As in `Advice`.
        saves_ns: Per step, had nothing else been changed.
        change: As in `Advice`.
        setting: As in `Advice`.
        of_idle: It saves time in which the device idles, of which there is only so much.
        risk: It is worth saying though it saves nothing.
        waits: What it saves is waiting for others, which being recorded makes no longer.
    """

    rule: str
    evidence: str
    saves_ns: float
    change: str
    setting: str
    of_idle: bool = False
    risk: bool = False
    waits: bool = False


def weigh(
    findings: Iterable[Finding], step_ns: float, idle_ns: float, per: Per = "step"
) -> tuple[Advice, ...]:
    """Return the findings that save enough as advice, most time saved first.

    No two findings save the same time: each is cut to what the larger ones leave of the step, and of the idle
    time where it saves that. So all savings together are never more than the step.

    Args:
        findings: What the rules found, in any order.
        step_ns: The step.
        idle_ns: What of it the device idles.
        per: What the step is, if it is not one of the loop's.
    """
    advice = []
    left = step_ns
    for finding in sorted(findings, key=lambda each: (-each.saves_ns, each.rule)):
        saves = min(finding.saves_ns, left, idle_ns if finding.of_idle else left)
        share = saves / step_ns if step_ns else 0.0
        if saves < LEAST_NS or share < LEAST_SHARE:
            if not finding.risk:
                continue
            saves = share = 0.0
        else:
            left -= saves
            idle_ns -= saves if finding.of_idle else 0.0
        advice.append(
            Advice(finding.rule, finding.evidence, saves, share, finding.change, finding.setting, per=per)
        )
    return tuple(sorted(advice, key=lambda each: -each.saves_ns_per_step))


def gather(ranks: Sequence[tuple[int | None, Sequence[Advice]]]) -> tuple[Advice, ...]:
    """Return the advice for a run, most time saved first.

    Ranks of one run wait for each other, so a rule saves what it saves on the rank where that is most, and it
    is that rank's evidence which stands for all. An exchange is another matter: all wait in it until the last
    has come, so it is the last one, which waits least, that shows what the exchange costs; where that is
    nothing, the others wait for that rank and not for the exchange.

    Named are the ranks that lose by it at least :data:`LOSES_AS_WELL` as much as the one that loses most; by
    an exchange, all.

    Args:
        ranks: Each rank and the advice for it alone.
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
        # A rule also fires on ranks with a small loss, which are not named.
        least = 0.0 if rule in EXCHANGES else LOSES_AS_WELL * chosen.saves_ns_per_step
        numbers = {rank for rank, each in pairs if rank is not None and each.saves_ns_per_step >= least}
        found.append(replace(chosen, ranks=tuple(sorted(numbers))))
    return tuple(sorted(found, key=lambda each: -each.saves_ns_per_step))
