"""Batches of events that the C module parses straight into columns.

The module is compiled when the package is built. It accepts a batch only if every event in it is sound and
plain: no odd number, no escape in a key, no field of another type, no category missing. `kineto` and
`loading` read the other batches, or all of them if there was no compiler, and reach the same columns.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from torchperfd_daemon.analysis.decoding import Args
from torchperfd_daemon.analysis.trace import Table

try:
    from torchperfd_daemon.analysis import _native
except ImportError:
    _native = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from torchperfd_daemon.analysis._native import Batch

# As in native.h. A checkout that was updated may have the module of an earlier version.
_ABI: Final = "torchperfd-analysis-abi-2"
NATIVE: Final = _native if getattr(_native, "ABI", "") == _ABI else None
"""The C module; None if this installation has none of this version."""

_TEXT: Final = msgspec.json.Decoder(str)
_PLACE: Final = msgspec.json.Decoder(tuple[int | str, int | str])
_ARGS: Final = msgspec.json.Decoder(list[Args])
# In the order of Batch.columns.
_COLUMNS: Final = (
    "name", "category", "thread", "shape", "type",
    "start", "end", "external", "correlation", "sequence",
    "backward", "in_group", "unfinished",
)  # fmt: skip


class BatchColumns:
    """Takes the columns out of parsed batches; new names get their numbers from the tables."""

    def __init__(
        self,
        names: Table[str],
        categories: Table[str],
        threads: Table[tuple[int | str, int | str]],
        shapes: Table[bytes],
        types: Table[bytes],
    ) -> None:
        numbering: tuple[Callable[[bytes], int], ...] = (
            lambda text: names[_TEXT.decode(text)],
            lambda text: categories[_TEXT.decode(text)],
            lambda text: threads[_PLACE.decode(b"[%b]" % text)],
            shapes.__getitem__,
            types.__getitem__,
        )
        self._interners = tuple(NATIVE.Interner(each) for each in numbering) if NATIVE else ()

    def columns(self, batch: "Batch") -> dict[str, Any]:
        """Return the columns of `Trace` as bytes, without a clock's origin."""
        return dict(zip(_COLUMNS, batch.columns(*self._interners), strict=True))


def collectives_of(batch: "Batch") -> tuple[list[int], list[Args]]:
    """Return the rows of a batch that are collectives, and their arguments."""
    rows, texts = batch.collectives()
    return rows, _ARGS.decode(b"[%b]" % b",".join(texts)) if rows else []
