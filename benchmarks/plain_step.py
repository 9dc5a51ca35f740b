"""What the hooks write on the ring buffer of one plain training step, event by event."""

from torchperfd.events import EventBuffer, codes

EVENTS = (
    (codes.DRAW, 0),
    (codes.DRAWN, 32),
    (codes.ZERO, 0),
    (codes.ZERO_END, 0),
    (codes.FORWARD, 0),
    (codes.FORWARD_END, 0),
    (codes.BACKWARD, 0),
    (codes.BACKWARD_END, 0),
    (codes.OPTIMIZER, 1),
    (codes.OPTIMIZER_END, 1),
)


def plain_step(buffer: EventBuffer) -> None:
    """Write of a draw, a zeroing of gradients, a forward, a backward and an optimizer step."""
    for code, argument in EVENTS:
        buffer.mark(code, argument)
