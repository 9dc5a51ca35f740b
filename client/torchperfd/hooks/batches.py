"""How many samples a batch holds."""

from collections.abc import Mapping
from typing import Any

from torchperfd.interrupts import is_from_script

_MAX_NESTING = 3


def samples_in(batch: Any) -> int:
    """Return the length of the first dimension of the first tensor in a batch, 0 when unknown."""
    for _ in range(_MAX_NESTING):
        shape = getattr(batch, "shape", None)
        if shape is not None:
            try:
                return int(shape[0]) if len(shape) else 1
            except (TypeError, ValueError) as error:
                if is_from_script(error):
                    raise
                return 0  # an attribute of that name, but no tensor's
        if isinstance(batch, list | tuple) and batch:
            batch = batch[0]
        elif isinstance(batch, Mapping) and batch:
            batch = next(iter(batch.values()))
        else:
            return 0
    return 0
