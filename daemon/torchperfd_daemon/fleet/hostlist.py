"""Slurm's short way of writing many host names: ``node[01-10,12],gpu-[1-2]-[3-4]``."""

import itertools
import re
from collections.abc import Iterator
from typing import Final

from torchperfd_daemon.errors import UsageError

_ELEMENT: Final = re.compile(r"(?:[A-Za-z0-9._-]|\[[0-9,-]+\])+")
_PART: Final = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")
_RANGE: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def expand(text: str, most: int = 10_000) -> list[str]:
    """Return the host names of a hostlist, in Slurm's order: of several brackets, the last varies fastest.

    A range keeps the width of its first number, so that ``[08-10]`` is 08, 09, 10. The form is that of
    ``scontrol show hostnames``.

    Raises:
        UsageError: It is no hostlist, or names more hosts.
    """
    names: list[str] = []
    for element in _elements(text):
        if _ELEMENT.fullmatch(element) is None:
            raise _malformed(element)
        parts = [
            list(_numbers(match[1], most)) if match[1] is not None else [match[2]]
            for match in _PART.finditer(element)
        ]
        product = map("".join, itertools.product(*parts))
        names.extend(itertools.islice(product, most + 1 - len(names)))
        if len(names) > most:
            raise UsageError(f"the hostlist {text[:40]!r} names more than {most:,} hosts")
    return names


def _elements(text: str) -> Iterator[str]:
    """Split at the commas outside of brackets."""
    start = depth = 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == "," and not depth:
            yield text[start:position]
            start = position + 1
    yield text[start:]


def _numbers(text: str, most: int) -> Iterator[str]:
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _malformed(f"[{text}]")
        first, final = int(match[1]), int(match[2] or match[1])
        if final < first:
            raise _malformed(f"[{text}]")
        # One beyond the limit is enough to refuse the list.
        for number in range(first, min(final, first + most) + 1):
            yield str(number).zfill(len(match[1]))


def _malformed(text: str) -> UsageError:
    return UsageError(
        f"{text[:40]!r} is not a Slurm hostlist", "write it like node[01-10,12],gpu-[1-2]-[3-4]"
    )
