"""How many samples a batch holds.

A batch is a tensor, something that counts its own samples, or a structure of parts. A part of it is
tensors whose first dimension is the sample, or a list with one entry a sample; a list of tensors may be
either. The number that most of the parts agree on is the batch's.
"""

import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

from torchperfd.safety.interrupts import is_from_script

_MAX_NESTING: Final = 2
_MAX_PARTS: Final = 8
_MAX_TYPES: Final = 256
_MIN_WHOLE_BATCH: Final = 4
"""Fewer rows than these may be a pair or a triplet: one sample."""
# What classes of batches call their own number of samples. The first of them is of graphs, where a
# tensor's first dimension is the nodes.
_OWN_NUMBERS: Final = ("num_graphs", "batch_size")

_NOTHING, _PLAIN, _SHAPED, _PACKED, _COUNTED, _MAPPING, _LIST, _NAMED, _OBJECT = range(9)

_kinds: dict[type, int] = {}


def samples_in(batch: Any) -> int:
    """Return the number of samples in a batch, 0 when unknown."""
    numbers = _numbers(batch, _MAX_NESTING)
    if numbers:
        return numbers[0]
    # A tensor without dimensions is one sample.
    return int(_kinds.get(type(batch)) == _SHAPED and len(getattr(batch, "shape", (0,))) == 0)


def samples_of_one(batch: Any) -> int:
    """Return the number of samples in a batch for which the loader asked its data set for one thing.

    That is one sample, of which collating may make some rows, unless the data set gives whole batches.
    """
    numbers = _numbers(batch, _MAX_NESTING)
    return numbers[0] if numbers and 1 not in numbers and numbers[0] >= _MIN_WHOLE_BATCH else 1


def counts_itself(iterable: Any) -> bool:
    """Return whether the draws from within something are those of a DataLoader, with its own samples."""
    torch_data: Any = sys.modules.get("torch.utils.data")
    if torch_data is None or not isinstance(iterable, torch_data.DataLoader):
        return False
    # A subclass with a way of its own to iterate may draw ahead, or cut batches up.
    return type(iterable).__iter__ is torch_data.DataLoader.__iter__


def _kind(cls: type) -> int:
    """Return what a class of parts is; asked once for each, since it takes many microseconds."""
    if issubclass(cls, type(None)):
        kind = _NOTHING
    elif issubclass(cls, str | bytes | int | float | complex):
        kind = _PLAIN
    elif hasattr(cls, "batch_sizes") and hasattr(cls, "sorted_indices"):
        kind = _PACKED
    elif any(hasattr(cls, name) for name in _OWN_NUMBERS):
        kind = _COUNTED
    elif hasattr(cls, "shape"):
        kind = _SHAPED
    elif issubclass(cls, Mapping):
        kind = _MAPPING
    elif hasattr(cls, "_fields") or hasattr(cls, "__dataclass_fields__"):
        kind = _NAMED
    elif issubclass(cls, list | tuple):
        kind = _LIST
    else:
        kind = _OBJECT
    if len(_kinds) < _MAX_TYPES:
        _kinds[cls] = kind
    return kind


def _numbers(part: Any, nesting: int) -> list[int]:
    """Return how many samples a part may hold, the likeliest first; empty if it does not show that."""
    kind = _kinds.get(type(part))
    if kind is None:
        kind = _kind(type(part))
    if kind <= _PLAIN:
        return []
    if kind == _SHAPED:
        return _first_dimension(part)
    if kind == _PACKED:
        return [int(part.batch_sizes[0])]  # how many sequences begin
    if kind == _COUNTED or (kind == _OBJECT and hasattr(part, _OWN_NUMBERS[1])):
        for name in _OWN_NUMBERS:
            number = getattr(part, name, None)
            if isinstance(number, int):
                return [number]
        return _first_dimension(part)
    if not nesting:
        return []
    if kind == _MAPPING:
        return _agreed(part.values(), nesting)
    if kind == _LIST:
        return _numbers_in_list(part, nesting)
    if kind == _NAMED:
        names = getattr(part, "_fields", None) or part.__dataclass_fields__
        return _agreed([getattr(part, name, None) for name in names], nesting)
    if hasattr(part, "shape"):
        return _first_dimension(part)
    return _agreed(getattr(part, "__dict__", {}).values(), nesting)


def _first_dimension(part: Any) -> list[int]:
    try:
        shape: Any = getattr(part, "shape", ())
        length = int(shape[0]) if len(shape) else 0
    except RuntimeError as error:
        if is_from_script(error):
            raise
        # A nested tensor has no shape where its parts differ, but a size of the first dimension.
        length = int(part.size(0)) if hasattr(part, "size") else 0
    except (TypeError, ValueError, IndexError) as error:
        if is_from_script(error):
            raise
        return []  # an attribute of that name, but no tensor's
    return [length] if length > 0 else []


def _numbers_in_list(parts: "list[Any] | tuple[Any, ...]", nesting: int) -> list[int]:
    inside = _agreed(parts, nesting)
    if not parts or len({type(part) for part in parts}) > 1:
        return inside
    length, first = len(parts), next(iter(parts))
    if not inside:
        # One text, label or object a sample.
        return [length] if _kinds.get(type(first)) in (_PLAIN, _MAPPING, _OBJECT) else []
    if isinstance(first, Mapping):
        keys = first.keys()
        if length > 1 and all(isinstance(part, Mapping) and part.keys() == keys for part in parts):
            return [length, *inside]  # a sample each; else inputs and targets that were collated apart
    if all(_kinds.get(type(part)) == _SHAPED for part in parts[:_MAX_PARTS]):
        lengths = [_first_dimension(part) for part in parts[:_MAX_PARTS]]
        alike = len({getattr(part, "ndim", 0) for part in parts[:_MAX_PARTS]}) == 1
        if alike and [] not in lengths and len({each[0] for each in lengths}) > 1:
            return [length, *inside]  # tensors of different lengths: a sample each
    return [*inside, length]


def _agreed(parts: Iterable[Any], nesting: int) -> list[int]:
    """Return what parts may hold, first what most of them agree on, then in the order of the parts."""
    votes: dict[int, int] = {}
    for number, part in enumerate(parts):
        if number == _MAX_PARTS:
            break
        for samples in _numbers(part, nesting - 1):
            votes[samples] = votes.get(samples, 0) + 1
    return sorted(votes, key=lambda samples: -votes[samples]) if len(votes) > 1 else list(votes)
