"""What the hooks tell the loop of one plain training step, call by call."""

from torchperfd.loop import Loop


def plain_step(loop: Loop) -> None:
    """Report a draw, a zeroing of gradients, a forward, a backward and an optimizer step."""
    depth = loop.recorder.depth
    loop.draw_begin()
    loop.draw_end(32)
    loop.zero_begin()
    loop.leave(depth)
    loop.forward_begin(True)
    loop.forward_end()
    loop.backward_begin()
    loop.backward_end(depth)
    loop.optimizer_begin(1)
    loop.optimizer_end(1)
