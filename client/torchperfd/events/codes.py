"""The events on a ring buffer, by code. An event is a time, a code and an argument."""

from typing import Final

# fmt: off
DRAW: Final = 0             # argument: the iterator's id, and DRAW_... flags
CLOSURE_DRAW: Final = 1     # the closure of an optimizer that is at work draws
DRAWN: Final = 2            # argument: samples in the batch
EXHAUSTED: Final = 3        # the draw raised, in general StopIteration; argument: the iterator's id
FORWARD: Final = 4
EVALUATE: Final = 5         # argument: EVALUATE_... flags
FORWARD_END: Final = 6
BACKWARD: Final = 7
BACKWARD_END: Final = 8
ZERO: Final = 9
ZERO_END: Final = 10
OPTIMIZER: Final = 11       # argument: the optimizer's id
OPTIMIZER_END: Final = 12   # argument: the optimizer's id
STALE: Final = 13           # an earlier optimizer step raised, so that its end was never written
ELSEWHERE: Final = 14       # argument: id of an optimizer that stepped on one of autograd's threads
SCALER: Final = 15          # argument: the optimizer's id
SCALER_END: Final = 16
SCALER_FAILED: Final = 17
SAVE: Final = 18
SAVE_END: Final = 19
ENTER: Final = 20           # argument: the phase's slot
EXIT: Final = 21
STEP: Final = 22            # argument: samples
SAMPLES: Final = 23         # argument: samples of the newest batch, if unknown at its draw
OUTER_DRAW: Final = 24      # a framework draws; argument: DRAW_... flags
OUTER_DRAWN: Final = 25     # argument: samples, if not known from a DataLoader inside
BETWEEN: Final = 26         # the loop is over, until the next draw
ADOPT: Final = 27           # from here on another thread writes
ABANDON: Final = 28         # a hook has failed: the step in progress is lost
CUDA_EVENT: Final = 29          # argument: number of the device event of the next event plus 1; 0 for none
NOT_TRAINING: Final = 30    # argument: for so many ns until now the thread did work of ours
READY: Final = 31           # argument: batches that wait in the workers' queue of the next draw plus 1
TOKENS: Final = 32          # argument: tokens that the step in progress has trained on
COLLECTIVE: Final = 33      # a collective is issued, or waited for
COLLECTIVE_END: Final = 34
REDUCTION: Final = 35       # the rest of the backward waits for others'; argument: for how long it has, in ns
PASS: Final = 36            # a loader is about to be drawn from
LEFT: Final = 37            # argument: id of an iterator that is gone, or that a name holds with LEFT_NAMED
OPTIMIZER_MADE: Final = 38  # argument: id of a new optimizer, with parameters of its own
EVALUATION_MODE: Final = 39  # a model that is trained is put into evaluation mode
TRAINING_MODE: Final = 40   # it is put back into training mode
# fmt: on

CODES: Final = 41

# Iterators lie at even addresses, so the low bits are free for flags.
DRAW_WITHOUT_GRADIENTS: Final = 1  # gradients are off
DRAW_IN_EVALUATION: Final = 2  # the models are in evaluation mode
LEFT_NAMED: Final = 1  # the script holds the iterator by a name
ITERATOR_MASK: Final = ~3

EVALUATE_IN_TRAINING_MODE: Final = 1  # gradients are off
EVALUATE_WITH_GRADIENTS: Final = 2  # the model is in evaluation mode

ARGUMENT_SHIFT: Final = 8
CODE_MASK: Final = (1 << ARGUMENT_SHIFT) - 1
EVENT_FORMAT: Final = "=qq"
"""How :mod:`struct` reads a drained event: a time in nanoseconds, then argument << 8 | code."""

PLACES: Final[dict[int, str]] = {
    **dict.fromkeys((DRAW, CLOSURE_DRAW, DRAWN, EXHAUSTED, OUTER_DRAW, OUTER_DRAWN, SAMPLES), "draw"),
    **dict.fromkeys((PASS, LEFT, NOT_TRAINING), "draw"),
    **dict.fromkeys((FORWARD, EVALUATE, FORWARD_END), "forward"),
    **dict.fromkeys((EVALUATION_MODE, TRAINING_MODE), "modes"),
    **dict.fromkeys((BACKWARD, BACKWARD_END), "backward"),
    **dict.fromkeys((ZERO, ZERO_END), "zero_grad"),
    **dict.fromkeys((OPTIMIZER, OPTIMIZER_END, STALE, ELSEWHERE, OPTIMIZER_MADE), "optimizer"),
    **dict.fromkeys((SCALER, SCALER_END, SCALER_FAILED), "scaler"),
    **dict.fromkeys((SAVE, SAVE_END), "save"),
    **dict.fromkeys((ENTER, EXIT), "phase"),
    STEP: "step",
    TOKENS: "step",
    READY: "draw",
    **dict.fromkeys((COLLECTIVE, COLLECTIVE_END, REDUCTION), "collective"),
}
"""Which hook a failure to understand an event is counted against."""
