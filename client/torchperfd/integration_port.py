"""The integration port: what an integration may do with an attached client, and no more."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchperfd.faults import Faults

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class IntegrationPort:
    """The client's operations for frameworks' loops.

    Attributes:
        mark: Writes an event, a code and an argument, on the training thread; returns whether this is it.
        here: Returns whether this is the training thread.
        slot: Returns the slot of a phase, built in or one of at most 16 others; past those, ``other``'s.
        watch_model: Has the forward of a model timed.
        flush: Sends what was measured so far.
        faults: Where failures of ours are counted.
    """

    mark: Callable[[int, int], bool]
    here: Callable[[], bool]
    slot: Callable[[str], int]
    watch_model: Callable[["nn.Module"], None]
    flush: Callable[[], None]
    faults: Faults
