"""An option that takes whole numbers separated by commas."""

from typing import Any

import click


class Numbers(click.ParamType):  # type: ignore[type-arg] # generic from click 8.2 on
    """Whole numbers above 0, separated by commas."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return them as a tuple."""
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in value.split(",")]
        if not all(word.isdecimal() and int(word) for word in words):
            self.fail(f"{value!r} is no list of numbers such as 32,64,128", param, ctx)
        return tuple(dict.fromkeys(int(word) for word in words))
