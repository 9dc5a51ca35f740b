"""Names of runs and captures by any unique prefix."""

from collections.abc import Iterable
from typing import Final

from torchperfd_daemon.errors import NoSuchTargetError

_MAX_NAMED: Final = 8


def whole_name(given: str, names: Iterable[str], what: str) -> str:
    """Return the only name with a prefix; the prefix itself where there is none, or where it is empty.

    Raises:
        NoSuchTargetError: Several have the prefix, and none is equal to it.
    """
    known = set(names)
    found = sorted(name for name in known if name.startswith(given))
    if not given or given in known or not found:
        return given
    if len(found) > 1:
        some = ", ".join(found[:_MAX_NAMED])
        raise NoSuchTargetError(f"{len(found)} {what}s begin with {given[:80]}: {some}", "write more of one")
    return found[0]
