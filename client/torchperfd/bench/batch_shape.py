"""What a batch holds. Imports torch."""

from typing import Any, Final, NamedTuple

import torch

_MAX_PARTS: Final = 256


class BatchShape(NamedTuple):
    """What a batch holds.

    Attributes:
        samples: In the first dimension of its first tensor; one where that cannot be seen.
        tensors: In it.
        size: Their bytes.
    """

    samples: int
    tensors: int
    size: int


def batch_shape(batch: Any) -> BatchShape:
    """Return what a batch of lists, tuples and dicts of tensors holds."""
    samples = tensors = size = 0
    parts = [batch]
    for _ in range(_MAX_PARTS):
        if not parts:
            break
        part = parts.pop()
        if isinstance(part, torch.Tensor):
            samples = samples or (part.shape[0] if part.ndim else 0)
            tensors += 1
            size += part.nbytes
        elif isinstance(part, (list, tuple)):
            parts += reversed(part)
        elif isinstance(part, dict):
            parts += reversed(list(part.values()))
    return BatchShape(samples or 1, tensors, size)
