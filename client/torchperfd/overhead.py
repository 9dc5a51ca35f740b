"""The overhead: what torchperfd costs training, as it measures itself, and what it gives up for it.

From time to time all that hooks write is written twice for a while. By how much the steps of
those moments are longer than their neighbours is what writing once costs. To that comes the
time that the pump takes from the interpreter.
"""

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from struct import iter_unpack
from typing import Final

from torchperfd.tape import Tape
from torchperfd.tape import events as on_tape

log = logging.getLogger("torchperfd")

CAMPAIGN_EVERY_S: Final = 30.0
CAMPAIGN_RARELY_S: Final = 600.0
"""From one campaign to the next; rarely where nothing is to be given up beside short steps."""

SHORT_STEP_S: Final = 0.005
"""The pump turns every few seconds beside steps below it, and a turn takes the time of several of them. A
campaign's turns would be more than all others."""
_BLOCKS: Final = 8
_BLOCK_STEPS: Final = 4
_CAMPAIGNS_KEPT: Final = 9
_MOST_STEPS_KEPT: Final = 4096

SHED: Final = ("device times", "the phases within a step", "everything")
"""What is given up, one after the other, where training must not pay for it."""

_WITHIN_A_STEP: Final = (on_tape.ZERO, on_tape.FORWARD, on_tape.BACKWARD, on_tape.COLLECTIVE)


class Overhead:
    """Measures by campaigns: blocks of steps, of which every other one is doubled.

    Args:
        tape: What the hooks write on.
        limit: The part of training time that may be spent on us; None for any.
        clock: Monotonic seconds.
        pump_clock: CPU seconds of the thread that calls :meth:`turn`.

    Attributes:
        ratio: Our part of training time, 0 to 1; None before it was measured.
        shed: How many of ``SHED`` have been given up.
    """

    def __init__(
        self,
        tape: Tape,
        limit: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        pump_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.ratio: float | None = None
        self.shed = 0
        self._tape = tape
        self._limit = limit
        self._clock = clock
        self._pump_clock = pump_clock
        self._next_campaign = clock()
        self._block_ends = 0.0
        self._blocks_left = 0
        self._results: deque[float] = deque(maxlen=_CAMPAIGNS_KEPT)
        self._pumped = (clock(), pump_clock())
        # Of the steps that are being read.
        self._optimizer = 0
        self._began = 0
        self._shadows = 0
        self._shadows_before = 0
        self._plain: list[int] = []
        self._doubled: list[int] = []

    @property
    def measuring(self) -> bool:
        """Whether a campaign is on."""
        return self._blocks_left > 0

    def read(self, events: "bytes | memoryview[int]") -> None:
        """Learn how long steps take from events that were taken off the tape, in the order of time."""
        if not self._blocks_left:
            return
        for now, word in iter_unpack(on_tape.EVENT_FORMAT, events):
            code = word & on_tape.CODE_MASK
            if code == on_tape.SHADOW:
                self._shadows += 1
            elif code == on_tape.OPTIMIZER:
                self._optimizer_step(word >> on_tape.ARGUMENT_SHIFT, now)

    def _optimizer_step(self, optimizer: int, now: int) -> None:
        """An optimizer begins to step, at ``now`` nanoseconds: so long after its last time is a step."""
        self._optimizer = self._optimizer or optimizer
        if optimizer != self._optimizer:
            return
        shadows, self._shadows = self._shadows, 0
        spent, self._began = now - self._began if self._began else 0, now
        # A step that is doubled in part tells nothing; neither do its neighbours, to be fair.
        if spent and bool(shadows) == bool(self._shadows_before):
            steps = self._doubled if shadows else self._plain
            if len(steps) < _MOST_STEPS_KEPT:
                steps.append(spent)
        self._shadows_before = shadows

    def turn(self, step_seconds: float) -> None:
        """Go on with the campaign, or begin one; a step takes about ``step_seconds``."""
        now = self._clock()
        if self._blocks_left:
            if now >= self._block_ends:
                self._blocks_left -= 1
                if self._blocks_left:
                    self._begin_block(now, step_seconds)
                else:
                    self._conclude(now, step_seconds)
        elif now >= self._next_campaign and step_seconds and self.shed < len(SHED):
            self._blocks_left = _BLOCKS
            self._pumped = (now, self._pump_clock())
            self._begin_block(now, step_seconds)

    def stop(self) -> None:
        """Measure no more."""
        self._tape.doubled = False
        self._blocks_left = 0
        self._next_campaign = float("inf")

    def _begin_block(self, now: float, step_seconds: float) -> None:
        self._block_ends = now + _BLOCK_STEPS * step_seconds
        self._tape.doubled = self._blocks_left % 2 == 0

    def _conclude(self, now: float, step_seconds: float) -> None:
        self._tape.doubled = False
        rarely = self._limit is None and step_seconds < SHORT_STEP_S
        self._next_campaign = now + (CAMPAIGN_RARELY_S if rarely else CAMPAIGN_EVERY_S)
        plain, doubled = self._plain, self._doubled
        if len(plain) >= _BLOCK_STEPS and len(doubled) >= _BLOCK_STEPS:
            began, pumped = self._pumped
            pump = (self._pump_clock() - pumped) / (now - began) if now > began else 0.0
            self._results.append(_ratio(plain, doubled) + pump)
            self.ratio = max(0.0, statistics.median(self._results))
            self._judge()
        self._plain, self._doubled = [], []
        self._optimizer = self._began = self._shadows = self._shadows_before = 0

    def _judge(self) -> None:
        if self._limit is None or self.ratio is None or self.ratio <= self._limit:
            return
        if self.shed == 0 and self._tape.ticket is None:
            self.shed = 1  # there are none
        given_up = SHED[self.shed]
        self.shed += 1
        if self.shed == 1:
            self._tape.ticket = None
        elif self.shed == 2:
            self._tape.muted |= sum(1 << code for code in _WITHIN_A_STEP)
        else:
            self._tape.thread = 0
        log.warning(
            "torchperfd takes %.2f %% of training time, more than the %.2f %% allowed; gives up %s",
            100 * self.ratio,
            100 * self._limit,
            given_up,
        )
        # What was measured was another detail.
        self._results.clear()


def _ratio(plain: Sequence[int], doubled: Sequence[int]) -> float:
    """Return by which part the median step is longer when doubled."""
    median = statistics.median(plain)
    return (statistics.median(doubled) - median) / median if median else 0.0
