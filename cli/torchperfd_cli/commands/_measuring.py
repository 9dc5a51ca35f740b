"""What the commands that measure this machine share: a warning if it is busy, and SIGTERM as Ctrl-C."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

import click
import psutil

INTERRUPTED: Final = 130
_TERMINATED: Final = 128 + signal.SIGTERM
_BUSY: Final = 0.5
_SAMPLE_S: Final = 0.5


class Interruption:
    """How a measurement was ended early.

    Attributes:
        exit_code: What the command returns then: 130 after Ctrl-C, 143 after SIGTERM.
    """

    exit_code: int = INTERRUPTED


@contextlib.contextmanager
def results_on_sigterm() -> Iterator[Interruption]:
    """Let SIGTERM end a measurement as Ctrl-C does, so that what was measured by then is printed.

    Batch systems and `timeout` send it. A second one ends the process at once.
    """
    found = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield found
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        found.exit_code = _TERMINATED
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield found
    finally:
        signal.signal(signal.SIGTERM, before)


def warn_if_busy() -> None:
    """Write a warning if other programs already use the machine's CPUs; takes half a second."""
    share = psutil.cpu_percent(_SAMPLE_S) / 100
    if share >= _BUSY:
        click.echo(
            f"torchperfd: other programs use {share:.0%} of the CPUs: only large gains can be verified now",
            err=True,
        )
