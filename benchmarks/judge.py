"""Figures with bounds: how benchmarks print and judge what they have measured."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value, and the range that it has to be in.

    Attributes:
        name: Its row in the table.
        value: What was measured; nan if nothing could be, which is not judged.
        form: How the value is printed, for :meth:`str.format`.
        least: The lowest value that is good.
        most: The highest value that is good.
    """

    name: str
    value: float
    form: str = "{:.0%}"
    least: float = -math.inf
    most: float = math.inf

    @property
    def text(self) -> str:
        return "-" if math.isnan(self.value) else self.form.format(self.value)

    @property
    def wanted(self) -> str:
        """The range in words; empty if any value is good."""
        if self.most == 0:
            return "0"
        if self.least == 1 and "%" in self.form:
            return "all"
        bounds = ((">=", self.least), ("<=", self.most))
        texts = [f"{sign} {self.form.format(bound)}" for sign, bound in bounds if math.isfinite(bound)]
        return ", ".join(texts).replace("%", " %")

    @property
    def is_missed(self) -> bool:
        return self.value < self.least or self.value > self.most


def rows(figures: Iterable[Figure]) -> list[str]:
    """Return a line of a table for each figure."""
    return [f"{each.name:<38} {each.text:>8}   {each.wanted}".rstrip() for each in figures]


def missed(figures: Iterable[Figure]) -> list[str]:
    """Return a sentence for each figure that is not in its range."""
    return [f"{each.name}: {each.text}, wanted {each.wanted}" for each in figures if each.is_missed]


def exit_code(problems: Iterable[str]) -> int:
    """Print what is wrong, and return the exit code of a benchmark: 1 if anything is."""
    code = 0
    for problem in problems:
        print(f"FAILED: {problem}")
        code = 1
    return code
