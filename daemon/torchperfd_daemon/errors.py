"""Errors of commands, with the exit code of each."""

import contextlib
from collections.abc import Iterator

from torchperfd.errors import TorchperfdError as TorchperfdError


class UsageError(TorchperfdError):
    """The request is invalid or contradictory."""

    exit_code = 2


class NoSuchTargetError(TorchperfdError):
    """The run, rank, capture or file named does not exist."""

    exit_code = 3


class NotAllowedError(TorchperfdError):
    """The caller may not do that."""


class DiskFullError(TorchperfdError):
    """The disk has too little room for what was asked."""


class DaemonUnreachableError(TorchperfdError):
    """No daemon answers."""

    exit_code = 4


class PartialResultError(TorchperfdError):
    """Some ranks are missing from the result."""

    exit_code = 5


class IncompatibleVersionError(TorchperfdError):
    """The two ends speak no common version of the protocol."""

    exit_code = 6


class SlowerError(TorchperfdError):
    """Something is slower than was allowed."""

    exit_code = 7


class UnseenRanksError(TorchperfdError):
    """Nothing can be said for all ranks, since some were not seen."""

    exit_code = 5


class DeadlineError(TorchperfdError):
    """The operation did not finish in time."""

    exit_code = 124


@contextlib.contextmanager
def explained(problem: str, remedy: str = "") -> Iterator[None]:
    """Say what could not be done where the system refuses something in the block, and why.

    Raises:
        TorchperfdError: An OSError was raised.
    """
    try:
        yield
    except OSError as error:
        raise TorchperfdError(f"{problem}: {error.strerror}", remedy) from error
