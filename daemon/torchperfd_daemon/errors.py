"""Errors of commands and of the configuration, with the exit code of each, as messages of one line."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from torchperfd.errors import TorchperfdError as TorchperfdError
from torchperfd.v1.variables import unknown_text


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
    """No daemon answers, or no scheduler of Dask."""

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
        raise TorchperfdError(f"{problem}: {error.strerror or error}", remedy) from error


_MAX_SHOWN_NUMBER: Final = 2**63 - 1
_MAX_SHOWN_LENGTH: Final = 40
_MAX_NAMES_SHOWN: Final = 20


class BadValueError(UsageError):
    """A value is invalid. The message is one line, whatever the value is."""


class ConfigError(UsageError):
    """The configuration cannot be used; the message names the file or variable, and the key."""


def check_environment(environ: Mapping[str, str]) -> None:
    """Refuse variables with our prefix that no part of torchperfd reads.

    Raises:
        ConfigError: There is one; the message suggests the nearest that there is.
    """
    if unknown := unknown_text(environ):
        raise ConfigError(unknown)


def shown_value(value: object) -> str:
    """Return a value for a message: short, and of one line."""
    # Python refuses to write out numbers of thousands of digits.
    if isinstance(value, int) and not -_MAX_SHOWN_NUMBER <= value <= _MAX_SHOWN_NUMBER:
        return "so large a number"
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value[:_MAX_SHOWN_LENGTH]) if isinstance(value, str) else repr(value)[:_MAX_SHOWN_LENGTH]


def refuse_unknown(table: Mapping[str, object], known: Iterable[str], where: str) -> None:
    """Refuse unknown keys, and suggest the nearest known one.

    Args:
        where: File, and table in it.

    Raises:
        BadValueError: There is such a key.
    """
    names = list(known)
    for key in table:
        if key in names:
            continue
        near = difflib.get_close_matches(key.replace("-", "_").lower()[:80], names, 1)
        more = f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
        hint = (
            f"did you mean {near[0]}?" if near else f"known are {', '.join(names[:_MAX_NAMES_SHOWN])}{more}"
        )
        raise BadValueError(f"{where}: there is no key {shown_value(key)}", hint)
