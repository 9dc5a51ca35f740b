"""A capture of a running loop by the client, and the analyser's summary of its trace."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final
from unittest.mock import patch

from torch import nn

import torchperfd
from torchperfd.client import Client
from torchperfd_daemon import analysis
from torchperfd_daemon.worker_cost import of_this_machine

WITHIN: Final = 0.25
"""How far a predicted saving may be from the measured one, as a part of that."""

_LONGEST_SECONDS: Final = 20.0
"""Longest time that a capture of a few steps may take, its export included."""
_ENDED: Final = frozenset({"complete", "failed"})


@contextmanager
def attached(model: nn.Module | None = None, *, on_oom: bool = False) -> Iterator[Client]:
    """Attach a client that has no daemon, and whose captures are deleted at the end.

    Args:
        on_oom: Whether it leaves a snapshot when there is no memory left.
    """
    with tempfile.TemporaryDirectory() as folder:
        places = {"TORCHPERFD_SOCKET": f"{folder}/no-daemon.sock", "TORCHPERFD_CAPTURES_DIR": folder}
        with patch.dict(os.environ, places):
            client = torchperfd.attach(model=model, on_oom=on_oom)
            try:
                yield client
            finally:
                client.detach()


def record(
    client: Client, step: Callable[[], None], steps: int, *, profile_memory: bool = False
) -> analysis.Summary:
    """Capture some steps while the loop goes on; return the analysis of the trace.

    Args:
        step: Trains one step that the client sees.
        steps: How many steps the capture has.
        profile_memory: Whether to record allocations, which the rules on memory need.

    Raises:
        CaptureError: The capture failed.
        TimeoutError: It did not end in time.
    """
    capture = client.capture(steps=steps, record_shapes=True, profile_memory=profile_memory)
    until = time.monotonic() + _LONGEST_SECONDS
    while capture.state not in _ENDED:
        if time.monotonic() > until:
            state = capture.state
            capture.cancel()
            raise TimeoutError(f"the capture is still {state} after {_LONGEST_SECONDS:.0f} s")
        step()
    # The state changes a moment before the capture has ended, and the next one may start.
    return analysis.summarise(analysis.load(capture.wait(_LONGEST_SECONDS)), worker_cost=of_this_machine)


def place_of(rule: str, advice: Sequence[analysis.Advice]) -> int | None:
    """Return the place of a rule's advice in a list, from 1; None if it is not in it."""
    return next((place for place, each in enumerate(advice, 1) if each.rule == rule), None)


def saving_ms(rule: str, advice: Sequence[analysis.Advice]) -> float:
    """Return the saving per step that a rule's advice predicts, in ms; 0 without such advice."""
    return next((each.saves_ns_per_step / 1e6 for each in advice if each.rule == rule), 0.0)


def in_order(advice: Sequence[analysis.Advice]) -> str:
    """Return the rules of some advice and what each predicts, in one line."""
    return ", ".join(f"{each.rule} {each.saves_ns_per_step / 1e6:.2f} ms" for each in advice) or "no advice"


def is_within(predicted: float, measured: float) -> bool:
    """Return whether a predicted saving is close enough to a measured one; never if nothing was saved."""
    return measured > 0 and abs(predicted / measured - 1) <= WITHIN
