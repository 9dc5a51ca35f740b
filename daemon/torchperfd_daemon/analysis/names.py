"""Tables of the names that are in use, small enough to be shown."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from torchperfd_daemon.analysis.trace import Int64

# Names of generated kernels go on for kilobytes.
_LONGEST: Final = 400


def in_use(texts: Sequence[str], names: Int64) -> tuple[tuple[str, ...], Int64]:
    """Return a table of the names in use, cut where they are very long, and the column that counts in it.

    Args:
        texts: The table that ``names`` counts in.
        names: Indices; -1 is no name and stays.
    """
    used, inverse = np.unique(names, return_inverse=True)
    shown = [texts[name] for name in used.tolist() if name >= 0]
    table = tuple(text if len(text) <= _LONGEST else text[:_LONGEST] + "…" for text in shown)
    return table, inverse - (len(used) - len(table))
