"""Types of the C module."""

from array import array

ABI: str

def repeat(
    events: memoryview,
    words: array[int],
    masks: array[int],
    ops: bytes,
    state: array[int],
    phases: bytes,
    other: int,
    first: int,
    ahead: int,
    /,
) -> tuple[int, bool, int, bytes, tuple[tuple[int, int, float], ...], bytes]:
    """Repeat ``ops`` on the steps at the beginning of ``events`` whose words, masked, equal ``words``.

    Args:
        events: Of a ring buffer, from the first of a step on.
        words: int64 per event of the step: its word after masking.
        masks: int64 per event: which bits of the word count.
        ops: Pairs of an operation and its operand, as :mod:`torchperfd.steps.templates` names them.
        state: The recorder's at the edge: last, start, depth, then exclusive nanoseconds and phase by
            depth. It is that after the last step upon return.
        phases: Slots of all phases that occur, ``other`` among them.
        other: The phase of no phase.
        first: The first step's number within its kind.
        ahead: Nanoseconds by which the wall clock is ahead of the ring buffer's.

    Returns:
        How many steps; whether the events end there or within what begins like another; the places in a
        column; columns of int64, of which the first places are taken: number, kind, start, duration, samples,
        then nanoseconds and calls of each phase; sums of nanoseconds, calls and squared nanoseconds of each
        phase, and at last of duration, samples and squared duration; for as many places three int64: number,
        and when the step entered its first and its last collective, Unix nanoseconds, 0 without any.

    Raises:
        ValueError: The operations do not make up one step.
    """
