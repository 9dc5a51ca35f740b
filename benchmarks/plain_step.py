"""What the hooks write on the tape of one plain training step, event by event."""

from torchperfd.events import EventBuffer
from torchperfd.events import codes as on_tape

EVENTS = (
    (on_tape.DRAW, 0),
    (on_tape.DRAWN, 32),
    (on_tape.ZERO, 0),
    (on_tape.ZERO_END, 0),
    (on_tape.FORWARD, 0),
    (on_tape.FORWARD_END, 0),
    (on_tape.BACKWARD, 0),
    (on_tape.BACKWARD_END, 0),
    (on_tape.OPTIMIZER, 1),
    (on_tape.OPTIMIZER_END, 1),
)


def plain_step(tape: EventBuffer) -> None:
    """Write of a draw, a zeroing of gradients, a forward, a backward and an optimizer step."""
    for code, argument in EVENTS:
        tape.mark(code, argument)
