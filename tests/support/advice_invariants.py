"""What must be true of every answer's advice, whatever the trace."""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from torchperfd_daemon.analysis.advice.rules import Advice
from torchperfd_daemon.analysis.callers import is_tools
from torchperfd_daemon.analysis.summary import Summary

# Savings are sums of doubles.
_TOLERANCE: Final = 1 + 1e-9
_IDLES: Final = re.compile(
    r"idles (?P<idle>[\d.,]+ (?:ns|µs|ms|s)) of (?:the|each step of) (?P<whole>[\d.,]+ (?:ns|µs|ms|s))"
)
_UNITS: Final = {"ns": 1.0, "µs": 1e3, "ms": 1e6, "s": 1e9}
# Figures in sentences have three digits.
_ROUNDING: Final = 1.01


def violations(summary: Summary) -> Iterator[str]:
    """Yield a sentence for each broken invariant of one rank's answer; none for a sound one."""
    if summary.idle is not None:
        idle = sum(cause.ns for cause in summary.idle.causes)
        if idle > summary.breakdown.window_ns or idle > summary.duration_ns:
            yield f"idle for {idle} ns of {min(summary.breakdown.window_ns, summary.duration_ns)} ns recorded"
    whole = max((step.duration_ns for step in summary.steps), default=summary.duration_ns)
    yield from violations_of(summary.advice, whole)


def violations_of(advice: Sequence[Advice], step_ns: float) -> Iterator[str]:
    """Yield a sentence for each broken invariant of some advice that is shown together.

    Args:
        step_ns: The longest step, or the recording without steps.
    """
    for each in advice:
        if not 0 <= each.saves_ns_per_step <= step_ns * _TOLERANCE or each.share_of_step > _TOLERANCE:
            yield f"{each.rule} saves {each.saves_ns_per_step} ns of a step of {step_ns} ns"
        for found in _IDLES.finditer(each.evidence):
            if _ns(found["idle"]) > _ns(found["whole"]) * _ROUNDING:
                yield f"{each.rule}: {found[0]}"
        words = re.split(r"; | in |: ", f"{each.change}; {each.evidence}")
        yield from (f"{each.rule} names a tool: {word}" for word in words if is_tools(word))
    saved, share = sum(each.saves_ns_per_step for each in advice), sum(each.share_of_step for each in advice)
    if saved > step_ns * _TOLERANCE or share > _TOLERANCE:
        yield f"all savings together: {saved} ns of a step of {step_ns} ns"


def _ns(text: str) -> float:
    number, unit = text.split(" ")
    return float(number.replace(",", "")) * _UNITS[unit]
