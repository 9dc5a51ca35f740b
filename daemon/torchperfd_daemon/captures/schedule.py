"""The schedule: chooses the steps to capture from the ranks' progress."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from torchperfd_daemon.captures.rank_attempts import Ack
from torchperfd_daemon.errors import TorchperfdError

MAX_STEPS: Final = 1000
"""Of one capture."""

_MARGIN_S: Final = 0.25
_MARGIN_STEPS: Final = 2


@dataclass(frozen=True, slots=True)
class When:
    """Which steps were asked for; by default the next ones that all ranks can reach.

    Attributes:
        at_step: Start exactly there, counting from 0.
        duration_seconds: Take as many steps as last so long, 1 to 1000; 0 for the number in the options.
    """

    at_step: int | None = None
    duration_seconds: float = 0.0


SOON: Final = When()


def agree(
    when: When, acks: Mapping[int, Ack], steps: int, longest_pause_seconds: float = math.inf
) -> tuple[int, int]:
    """Return the first step to capture and the first one after, which every rank has yet to begin.

    Args:
        acks: How far each ready rank is; at least one.
        steps: How many steps unless ``when`` has a duration.
        longest_pause_seconds: Fewer steps are taken if training would pause for longer when they end.

    Raises:
        TorchperfdError: The chosen step is past or too near, steps have no length yet, or the capture of one
            step would pause training for too long.
    """
    start = start_step(list(acks.values()))
    if when.at_step is not None:
        if when.at_step < start:
            rank, farthest = max(acks.items(), key=lambda each: each[1].next_step)
            raise TorchperfdError(
                f"step {when.at_step} is past or too near: rank {rank} is at step {farthest.next_step}",
                f"ask for step {start} or a later one",
            )
        start = when.at_step
    if when.duration_seconds:
        means = [ack.step_seconds for ack in acks.values() if ack.step_seconds > 0]
        if not means:
            raise TorchperfdError("no step has ended yet, so the length of a step is unknown", "use --steps")
        steps = min(MAX_STEPS, max(1, round(when.duration_seconds * len(means) / sum(means))))
    pause = max(ack.pause_seconds_per_step for ack in acks.values())
    if pause * steps > longest_pause_seconds:
        steps = int(longest_pause_seconds / pause)
        if not steps:
            raise TorchperfdError(
                f"training would pause for about {pause:.1f} s when one step was captured",
                "ask for a capture yourself",
            )
    return start, start + steps


def start_step(acks: list[Ack]) -> int:
    """Return a step that every rank has yet to begin: a quarter second and two steps ahead."""
    farthest = max(ack.next_step for ack in acks)
    fastest = min((ack.step_seconds for ack in acks if ack.step_seconds > 0), default=_MARGIN_S)
    return farthest + _MARGIN_STEPS + math.ceil(_MARGIN_S / fastest)
