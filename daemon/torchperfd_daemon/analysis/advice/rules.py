"""A rule of advice and the conditions that must be true of the run before it applies."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from torchperfd_daemon.analysis.advice.context import AdviceContext
from torchperfd_daemon.analysis.advice.item import Finding

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
        name: The name that its findings have.
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
