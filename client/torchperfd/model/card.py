"""The verdict card: one description of what is wrong with a run, rendered alike wherever it is shown.

Pure, and without protobuf: it is built from a verdict's message by its fields.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from torchperfd.document import markup, terminal
from torchperfd.document.blocks import Block, Document, Facts, Heading, Panel
from torchperfd.document.text import Style
from torchperfd.model.formatting import duration
from torchperfd.model.source_lines import SlowLine
from torchperfd.model.step_account import Account

SCRIPT: Final = "SCRIPT"
"""Stands in a fix for the script, whose name not every reader may see."""


def name_script(fix: str, script: str) -> str:
    """Return a fix with the name of the script; without a name, the fix itself.

    Args:
        script: As commands take it, quoted for a shell; empty if it is unknown.
    """
    return fix.replace(SCRIPT, script) if script else fix


_AFTER_THE_RUN: Final = ("torchperfd doctor", "torchperfd analyze ")
"""Commands, or their beginnings, that work without the run."""
MIN_SHARE: Final = 0.05
"""A further cause that costs a smaller share of what the first one leaves of the step is left out."""
HEALTHY: Final = "none"
UNKNOWN: Final = "unknown"
GROWTH: Final = "memory pressure"
_COLUMN: Final = 8
"""Where the words of a part begin."""
GAINS_REMARK: Final = "gains are each for itself; the account adds up"
"""Stands once below the account of a card with several causes."""


@dataclass(frozen=True, slots=True)
class CauseCard:
    """One cause of lost time.

    Attributes:
        cause: Its name, such as ``input-bound``.
        where: The rank and its node; empty if all ranks are alike.
        why: The measurements, and in which code the time goes where that is known.
        fix: What to change, the setting first; empty if nothing is known.
        cost_seconds: What the run would save of each step; 0 for a hang.
        step_seconds: The step that the cost is a part of; 0 if unknown.
        saves_seconds: The predicted saving of the fix per step; 0 without a prediction.
        stalled_seconds: For a hang, the time since the last step ended.
        rank: The rank that causes it; None if all are alike.
        line: The line of the script at which the time goes, in words; empty if unknown.
    """

    cause: str
    where: str
    why: str
    fix: str
    cost_seconds: float
    step_seconds: float
    saves_seconds: float
    stalled_seconds: float
    rank: int | None
    line: str = ""

    @property
    def share(self) -> float:
        """The cost as a part of the step, 0 to 1; 0 if unknown."""
        return min(1.0, self.cost_seconds / self.step_seconds) if self.step_seconds else 0.0

    @property
    def heading(self) -> str:
        return " · ".join(part for part in (self.cause, self.where, self.cost) if part)

    @property
    def cost(self) -> str:
        if self.stalled_seconds:
            return f"no step for {self.stalled_seconds:.0f} s"
        if self.share:
            return f"{self.share:.0%} of the step"
        if self.cause == GROWTH and not self.cost_seconds:
            # Such as "grows by 8.2 MiB/s, full in 39 min".
            growth, _, _ = self.why.partition(";")
            return growth.removeprefix("memory ").replace(" and is full", ", full")
        return f"{duration(self.cost_seconds)} of each step" if self.cost_seconds else ""

    @property
    def gain(self) -> str:
        """The predicted effect of the fix, in words; empty without a prediction."""
        left = self.step_seconds - self.saves_seconds
        if not self.saves_seconds or left <= 0:
            return ""
        faster = f"{self.step_seconds / left:.2g} times as fast"
        return f"{duration(self.step_seconds)} → about {duration(left)} a step, {faster}"

    @property
    def explanation(self) -> str:
        """The command that prints the page on this cause."""
        return f"torchperfd explain {self.cause.lower().replace(' ', '-')}"

    @property
    def parts(self) -> list[tuple[str, str]]:
        """What is known of the cause, as a name and its words each, in their order."""
        named = {
            "why": self.why,
            "line": self.line,
            "fix": self.fix,
            "gain": self.gain,
            "more": self.explanation,
        }
        return [(name, words) for name, words in named.items() if words]


@dataclass(frozen=True, slots=True)
class VerdictCard:
    """What is wrong with a run: ``print`` it in a terminal; in a notebook, it shows itself.

    Attributes:
        causes: The most important first, and each further one from :data:`MIN_SHARE` on of what that leaves
            of the step; empty for a healthy run, and if nothing is known.
        remark: Why there is no cause, in words; empty with causes.
        is_healthy: Whether the run was seen and nothing is wrong with it.
        next_command: The command that shows more; empty if none would work now.
        also: What else takes long and is no cause, or may take long, one line each.
        note: The state of the machine with what it costs; it stands above the causes. Empty without one.
        account: Where each millisecond of the run's step goes; None if unknown.
        trace: What the analysis of the capture that the run has made by itself advises; else empty.
        outcome: What the run has made of the promise of an earlier one; empty without one.
        failure: Why the run failed; empty if it did not, and for a run that goes on.
        remedy: What to change after the failure; empty if nothing is known.
    """

    run: str
    causes: tuple[CauseCard, ...] = ()
    remark: str = ""
    is_healthy: bool = False
    next_command: str = ""
    trace: str = ""
    also: tuple[str, ...] = ()
    outcome: str = ""
    failure: str = ""
    remedy: str = ""
    note: str = ""
    account: Account | None = None

    @property
    def summary(self) -> str:
        if self.failure:
            return f"{self.heading} · {self.failure}"
        return self.heading if self.causes else f"{self.heading} · {self.remark}"

    @property
    def heading(self) -> str:
        """That the run failed, or the heading of the first cause; without one, whether the run is healthy."""
        if self.failure:
            return "failed"
        if self.causes:
            return self.causes[0].heading
        return f"{self.state}: {self.open_words}" if self.open_words else self.state

    @property
    def state(self) -> str:
        """Of a run without a cause: ``healthy``, ``no cause yet`` if a part of the step is large, or
        ``not known``.
        """
        if self.is_healthy:
            return "healthy"
        return "no cause yet" if self.open_words else "not known"

    @property
    def open_words(self) -> str:
        """The largest part of the step that has no cause yet, in words; empty if it is small or unknown."""
        is_open = self.account is not None and not self.causes and not self.is_healthy
        return self.account.open_words if is_open and self.account else ""

    @property
    def account_lines(self) -> tuple[str, ...]:
        """The account of the step, whether it is certain, and that the gains of several causes do not add up;
        empty if unknown.
        """
        if self.account is None:
            return ()
        costs = [cause for cause in self.causes if cause.cost_seconds]
        lines = (self.account.words, self.account.doubt, GAINS_REMARK if len(costs) > 1 else "")
        return tuple(line for line in lines if line)

    @property
    def account_rows(self) -> list[dict[str, Any]]:
        """The rows of the account as documents have them, what is beside the step last; empty if unknown."""
        rows = () if self.account is None else (*self.account.rows, *self.account.hidden_rows)
        return [row.to_document() for row in rows]

    def after_run(self) -> "VerdictCard":
        """Return the card for readers who come after the run has ended: without a command that needs it."""
        return replace(self, next_command=command_after_run(self.next_command))

    def to_dict(self) -> dict[str, Any]:
        return {
            "state": "bad" if self.causes or self.failure else "good" if self.is_healthy else "unknown",
            "summary": self.summary,
            "heading": self.heading,
            "title": self.state if not self.causes and not self.failure else self.heading,
            "remark": self.failure or self.remark,
            "failure": self.failure,
            "note": self.note,
            "causes": [
                {
                    "heading": each.heading,
                    "parts": [{"name": name, "words": words} for name, words in each.parts],
                }
                for each in self.causes
            ],
            "account": list(self.account_lines),
            "account_rows": self.account_rows,
            "also": list(self.also),
            "next_command": self.next_command,
        }

    def document(self) -> Document:
        blocks: list[Block] = [_facts(("note", self.note))]
        style: Style
        if self.failure:
            named = (("why", self.failure), ("fix", self.remedy), ("steps", self.remark))
            blocks.append(_panel("✗ failed", "", "bad", named))
        elif not self.causes:
            mark, style = ("✓", "good") if self.is_healthy else ("?", "warn")
            rest = self.heading[len(self.state) :]
            blocks.append(_panel(f"{mark} {self.state}", rest, style, [("why", self.remark)]))
        for position, cause in enumerate(self.causes):
            mark, style = ("!", "warn") if position or self.failure else ("✗", "bad")
            rest = "".join(f" · {words}" for words in (cause.where, cause.cost) if words)
            blocks.append(_panel(f"{mark} {cause.cause}", rest, style, cause.parts))
        account = [("" if at else "step", words) for at, words in enumerate(self.account_lines)]
        also = [("also", words) for words in self.also]
        last = (("done", self.outcome), ("trace", self.trace), ("next", self.next_command))
        return Document([[*blocks, _facts(*account, *also, *last)]])

    def to_text(self, *, colour: bool = False, width: int = 80) -> str:
        """Return the card for a terminal, without a last newline; lines are folded at words."""
        return terminal.render(self.document(), terminal.Page(reading=width, colour=colour))

    def to_html(self) -> str:
        return markup.render_html(self.document())

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        return self.to_html()


def _panel(text: str, rest: str, style: Style, named: Iterable[tuple[str, str]]) -> Panel:
    heading = Heading(text, rest, style, fold="always", margin=_COLUMN)
    return Panel(heading, [_facts(*named)])


def _facts(*named: tuple[str, str]) -> Facts:
    rows = [each for each in named if each[1]]
    return Facts(rows, _COLUMN, indent=2, fold="always", name_style="dim", code=("fix", "next"))


def command_after_run(command: str) -> str:
    """Return a command if it works although the run has ended; else an empty text."""
    return command if command.startswith(_AFTER_THE_RUN) else ""


def card_of(verdict: Any) -> VerdictCard:
    """Return the card of a verdict.

    Args:
        verdict: A ``torchperfd.v1`` message ``Verdict``.
    """
    is_quiet = verdict.cause in (HEALTHY, UNKNOWN) and not verdict.cost_seconds_per_step
    first = [] if is_quiet else [_cause(verdict, verdict.script)]
    least = MIN_SHARE * (1 - first[0].share if first else 1)
    others = [_cause(each, verdict.script) for each in verdict.others]
    # What costs no time may cost the run: memory that grows, until it is full.
    further = [
        each
        for each in others
        if each.share >= least or (not each.cost_seconds and each.cause not in (HEALTHY, UNKNOWN))
    ]
    also = tuple(verdict.remarks)
    return VerdictCard(
        verdict.run,
        (*first, *further),
        remark="; ".join(filter(None, (_why(verdict), _line(verdict)))) if is_quiet else "",
        # What a switch costs is not measured.
        is_healthy=verdict.cause == HEALTHY and is_quiet and not also,
        next_command=verdict.next_command,
        also=also,
        failure=verdict.failure,
        note=verdict.note,
        account=Account.from_verdict(verdict),
    )


def _cause(verdict: Any, script: str) -> CauseCard:
    return CauseCard(
        cause=verdict.cause,
        where=_where(verdict),
        why=_why(verdict),
        fix=name_script(verdict.fix, script),
        cost_seconds=verdict.cost_seconds_per_step,
        step_seconds=verdict.step_seconds,
        saves_seconds=verdict.saves_seconds,
        stalled_seconds=verdict.stalled_seconds,
        rank=verdict.rank if verdict.rank >= 0 else None,
        line=_line(verdict),
    )


def _where(verdict: Any) -> str:
    if verdict.rank < 0:
        return ""
    return f"rank {verdict.rank}" + (f" on {verdict.node}" if verdict.node else "")


def _line(verdict: Any) -> str:
    line = SlowLine.from_verdict(verdict)
    return "" if line is None else line.words


def _why(verdict: Any) -> str:
    window = f" (last {verdict.window_seconds:.0f} s)" if verdict.window_seconds >= 1 else ""
    return f"{verdict.evidence}{window}"
