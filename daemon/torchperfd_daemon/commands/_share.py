"""An option that takes a share: ``5%`` or ``0.05``."""

import math
from typing import Any

import click


class Share(click.ParamType):  # type: ignore[type-arg] # generic from click 8.2 on
    """A share of something, in percent with a percent sign, else as a number."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return it as a number, 0.05 for 5 %."""
        if isinstance(value, float):
            return value
        text = str(value).strip()
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            share = math.nan
        if not (math.isfinite(share) and share >= 0):
            self.fail(f"{value!r} is no share such as 5% or 0.05", param, ctx)
        return share
