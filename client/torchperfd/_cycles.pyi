"""Types of the C module."""

from array import array

def repeat(
    events: memoryview,
    words: array[int],
    masks: array[int],
    deeds: bytes,
    state: array[int],
    slots: int,
    other: int,
    index: int,
    ahead: int,
    most: int,
    /,
) -> tuple[int, bytes, bytes]:
    """Repeat ``deeds`` on the cycles that ``events`` begin with, whose words, masked, are ``words``.

    Args:
        events: Of a drained tape, from the first of a cycle on.
        words: int64 per event of a cycle: what its word is, after masking.
        masks: int64 per event: which bits of the word count.
        deeds: Pairs of a deed and its operand, as :mod:`torchperfd.cycles` names them.
        state: The recorder's at the edge: last, start, depth, then exclusive nanoseconds and phase by
            depth. It is that after the last cycle upon return.
        slots: Phases of a row.
        other: The phase of no phase.
        index: The first step's.
        ahead: Nanoseconds by which the wall clock is ahead of the tape's.
        most: How many cycles at most.

    Returns:
        How many cycles; their rows, int64; their sums of squares, double, ``slots`` a row.

    Raises:
        ValueError: What is to be repeated makes no sense.
    """
