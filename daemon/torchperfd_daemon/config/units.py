"""Sizes and spans of time, as people write them."""

import re
from typing import Final

from torchperfd_daemon.config.errors import BadValueError, shown

_UNITS: Final = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
}  # fmt: skip
SIZE_UNITS: Final = (
    ("TiB", 2**40), ("TB", 10**12), ("GiB", 2**30), ("GB", 10**9),
    ("MiB", 2**20), ("MB", 10**6), ("KiB", 2**10), ("kB", 10**3),
)  # fmt: skip
_SIZE: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?([kmgt]?i?)b?", re.IGNORECASE)
SPAN_UNITS: Final = {"w": 604800, "d": 86400, "h": 3600, "m": 60, "s": 1}
_SPAN: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?) ?([smhdw])")


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``10GiB``.

    Raises:
        BadValueError: It is none.
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise BadValueError(f"{shown(text)} is no size", "write it like 10GiB or 500MB")
    return int(float(match[1]) * unit)


def parse_span(text: str) -> float:
    """Return the seconds of a span of time such as ``7d``; those of ``0`` are 0.

    Raises:
        BadValueError: It is none.
    """
    match = _SPAN.fullmatch(text)
    if match is None and text != "0":
        raise BadValueError(f"{shown(text)} is no span of time", "write it like 7d, 12h or 30m")
    return float(match[1]) * SPAN_UNITS[match[2]] if match else 0.0
