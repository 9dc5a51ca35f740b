"""The overhead: what torchperfd costs training, as it measures itself, and what it gives up for it.

From time to time all that hooks write is written twice for a while. By how much the steps of
those moments are longer than their neighbours is what writing once costs. To that comes the
time that the pump takes from the interpreter.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Final

from torchperfd.campaign import Campaign, median_and_error
from torchperfd.logs import log
from torchperfd.tape import Tape
from torchperfd.tape import events as on_tape

CAMPAIGN_EVERY_S: Final = 30.0
CAMPAIGN_RARELY_S: Final = 600.0
"""From one campaign to the next; rarely where nothing is to be given up beside short steps."""

SHORT_STEP_S: Final = 0.005
"""The pump turns every few seconds beside steps below it, and a turn takes the time of several of them. A
campaign's turns would be more than all others."""

RESOLUTION: Final = 0.01
"""A part of training time. What is told has a standard error of no more; where the machine is too noisy for
that, nothing is told."""

_BLOCKS: Final = 8
_MOST_BLOCKS: Final = 16
"""A campaign goes on so long where its first blocks did not tell."""

_BLOCK_STEPS: Final = 4
_CAMPAIGNS_KEPT: Final = 8
"""Of those before the one that is on."""

SHED: Final = ("device times", "the phases within a step", "everything")
"""What is given up, one after the other, where training must not pay for it."""

_WITHIN_A_STEP: Final = (on_tape.ZERO, on_tape.FORWARD, on_tape.BACKWARD, on_tape.COLLECTIVE)


class Overhead:
    """Measures by campaigns, and the pump between them.

    Args:
        tape: What the hooks write on.
        limit: The part of training time that may be spent on us; None for any.
        clock: Monotonic seconds.
        pump_clock: CPU seconds of the thread that calls :meth:`turn`.

    Attributes:
        limit: The same; may change.
        shed: How many of ``SHED`` have been given up.
    """

    def __init__(
        self,
        tape: Tape,
        limit: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        pump_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.shed = 0
        self._tape = tape
        self.limit = limit
        self._clock = clock
        self._flusher_clock = pump_clock
        self._next_campaign = clock()
        self._campaign: Campaign | None = None
        self._block = 0
        self._block_ends = 0.0
        self._kept: deque[list[float]] = deque(maxlen=_CAMPAIGNS_KEPT)
        self._writing: float | None = None
        # Of the pump, from turn to turn outside of campaigns, which have it turn more often than it does.
        self._turned: tuple[float, float] | None = None
        self._flusher_seconds = 0.0
        self._seconds = 0.0

    @property
    def ratio(self) -> float | None:
        """Our part of training time, 0 to 1; None where it is not known, to ``RESOLUTION``."""
        if self._writing is None:
            return None
        pump = self._flusher_seconds / self._seconds if self._seconds else 0.0
        return max(0.0, self._writing) + pump

    @property
    def measuring(self) -> bool:
        """Whether a campaign is on."""
        return self._campaign is not None

    def read(self, events: "bytes | memoryview[int]") -> None:
        """Learn how long steps take from events that were taken off the tape, in the order of time."""
        if self._campaign is not None:
            self._campaign.read(events)

    def turn(self, step_seconds: float) -> None:
        """Go on with the campaign, or begin one; a step takes about ``step_seconds``."""
        now, campaign = self._clock(), self._campaign
        if campaign is None:
            self._watch_pump(now)
            if now >= self._next_campaign and step_seconds and self.shed < len(SHED):
                self._campaign, self._block, self._turned = Campaign(), 0, None
                self._begin_block(now, step_seconds)
        elif now >= self._block_ends:
            self._block += 1
            if self._block < _BLOCKS or not self._concludes(campaign, now, step_seconds):
                self._begin_block(now, step_seconds)

    def stop(self) -> None:
        """Measure no more."""
        self._tape.doubled = False
        self._campaign = None
        self._next_campaign = math.inf

    def _watch_pump(self, now: float) -> None:
        spent = self._flusher_clock()
        if self._turned is not None:
            turned, spent_then = self._turned
            self._seconds += now - turned
            self._flusher_seconds += spent - spent_then
        self._turned = (now, spent)

    def _begin_block(self, now: float, step_seconds: float) -> None:
        self._block_ends = now + _BLOCK_STEPS * step_seconds
        self._tape.doubled = self._block % 2 == 0

    def _concludes(self, campaign: Campaign, now: float, step_seconds: float) -> bool:
        """End the campaign if it and those before it tell, or it had time enough; return whether it did."""
        found = campaign.differences()
        differences = list(chain(*self._kept, found))
        writing, error = median_and_error(differences) if differences else (0.0, math.inf)
        if error > RESOLUTION and self._block < _MOST_BLOCKS:
            return False
        self._tape.doubled = False
        self._campaign = None
        rarely = self.limit is None and step_seconds < SHORT_STEP_S
        self._next_campaign = now + (CAMPAIGN_RARELY_S if rarely else CAMPAIGN_EVERY_S)
        self._kept.append(found)
        self._writing = writing if error <= RESOLUTION else None
        self._keep_within(error)
        return True

    def _keep_within(self, error: float) -> None:
        """Give a tier up if we take more than is allowed, by more than what was measured may be off."""
        ratio = self.ratio
        if self.limit is None or ratio is None or ratio - 2 * error <= self.limit:
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
            100 * ratio,
            100 * self.limit,
            given_up,
        )
        # What was measured was another detail.
        self._kept.clear()
