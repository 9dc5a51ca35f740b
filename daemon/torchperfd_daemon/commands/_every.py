"""Repeating a command at intervals, until Ctrl-C."""

import math
import time
from collections.abc import Callable

import click

from torchperfd_daemon.errors import (
    IncompatibleVersionError,
    NoSuchTargetError,
    PartialResultError,
    TorchperfdError,
    UsageError,
)


def repeat(
    seconds: float,
    once: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Run an action now and at every interval after, until Ctrl-C.

    Failures are printed, and retried at the next interval. An interval that ends before the previous action
    is skipped: two never run at once.

    Raises:
        PartialResultError: Some have failed.
        TorchperfdError: It can never succeed: the target has ended, or is invalid.
    """
    began = clock()
    done = failed = 0
    try:
        while True:
            try:
                once()
            except (UsageError, NoSuchTargetError, IncompatibleVersionError):
                raise
            except TorchperfdError as error:
                failed += 1
                click.echo(f"torchperfd: {error}", err=True)
            done += 1
            passed = clock() - began
            sleep((math.floor(passed / seconds) + 1) * seconds - passed)
    except KeyboardInterrupt:
        click.echo(f"{done} made, {failed} of them failed or are partial", err=True)
    if failed:
        raise PartialResultError(f"{failed} of {done} failed or are partial")
