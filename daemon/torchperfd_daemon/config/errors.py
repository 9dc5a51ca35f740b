"""Errors of the configuration, as messages of one line."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Final

from torchperfd.v1.variables import unknown_text
from torchperfd_daemon.errors import UsageError

_LARGEST_SHOWN: Final = 2**63 - 1
_LONGEST_SHOWN: Final = 40
_MAX_NAMES: Final = 20


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


def shown(value: object) -> str:
    """Return a value for a message: short, and of one line."""
    # Python refuses to write out numbers of thousands of digits.
    if isinstance(value, int) and not -_LARGEST_SHOWN <= value <= _LARGEST_SHOWN:
        return "so large a number"
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value[:_LONGEST_SHOWN]) if isinstance(value, str) else repr(value)[:_LONGEST_SHOWN]


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
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names[:_MAX_NAMES])}{more}"
        raise BadValueError(f"{where}: there is no key {shown(key)}", hint)
