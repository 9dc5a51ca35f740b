"""Parallel coordinates: where a rank stands in each dimension in which its job is split."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A rank's place in one dimension.

    Attributes:
        dimension: Its name, as a ``DeviceMesh`` or another maker of process groups has it, such as ``tp``.
        rank: The place, from 0 on.
        size: How many places there are.
    """

    dimension: str
    rank: int
    size: int
