"""Records the hooks' calls of the loop, as text: ``data() forward() backward(forward())``."""

from collections.abc import Callable
from typing import Any

import pytest

import torchperfd
from torchperfd.steps import templates as step_templates
from torchperfd.steps.loop import Loop

_BEGINS = {
    "draw_begin": "data",
    "closure_draw_begin": "data",
    "backward_begin": "backward",
    "zero_begin": "zero",
    "optimizer_begin": "optimizer",
    "save_begin": "save",
}
_ENDS = ("draw_end", "draw_stop", "forward_end", "backward_end", "optimizer_end", "save_end", "leave")


class Events:
    """The calls so far."""

    def __init__(self) -> None:
        self._text = ""
        self._inside = False

    def take(self) -> str:
        """Return the events since the last call."""
        client = torchperfd.attachment.current()
        if client is not None:
            client.parts.instruments.replay.catch_up()
        text, self._text = self._text, ""
        return text

    def _begin(self, name: str) -> None:
        self._text += f" {name}(" if self._text and not self._text.endswith("(") else f"{name}("

    def _end(self, name: str, loop: Loop, details: tuple[Any, ...], options: dict[str, Any]) -> None:
        if name == "leave" and loop.recorder.depth <= details[0]:
            return
        if name == "draw_stop":
            self._text += "end"
        if options.get("called_off"):
            self._text += "called off"
        self._text += ")"

    def spy(self, name: str, honest: Callable[..., None]) -> Callable[..., None]:
        """Return a method that calls the original and records the call, but not the calls within it."""

        def reported(loop: Loop, *details: Any, **options: Any) -> None:
            outermost, self._inside = not self._inside, True
            try:
                if outermost:
                    if name in _ENDS:
                        self._end(name, loop, details, options)
                    elif name == "forward_begin":
                        self._begin("forward" if (*details, *options.values())[0] else "evaluate")
                    else:
                        self._begin(_BEGINS[name])
                honest(loop, *details, **options)
            finally:
                if outermost:
                    self._inside = False

        return reported


def spy_on_loops(monkeypatch: pytest.MonkeyPatch) -> Events:
    """Write down the events of all loops; before attaching, since hooks bind the loop's methods."""
    events = Events()
    # Equal steps are recorded once, and then repeated.
    monkeypatch.setattr(step_templates, "AVAILABLE", False)
    for name in (*_BEGINS, *_ENDS, "forward_begin"):
        monkeypatch.setattr(Loop, name, events.spy(name, getattr(Loop, name)))
    return events
