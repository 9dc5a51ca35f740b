"""Makes text from outside safe for a terminal, a log line and a metric label, and writes lists of ranks."""

from collections.abc import Sequence
from typing import Any, Final

_MAX_CHARACTERS: Final = 4096


def one_line(text: str, most: int) -> str:
    """Return at most ``most`` characters of a text, with ``?`` for each that is not printable.

    Not printable are control characters (C0, C1, DEL), line and paragraph separators, bidirectional
    overrides and other format characters, surrogates, and spaces other than the ASCII one.
    """
    text = text[:most]
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "?" for character in text)


def printable(text: str) -> str:
    """Return a text of several lines with ``?`` for each character that could drive a terminal."""
    if text.isprintable():
        return text
    return "".join(letter if letter in "\n\t" or letter.isprintable() else "?" for letter in text)


def clean_fields(record: Any) -> None:
    """Make every text in a dataclass one line, in place; also in the lists of dataclasses that it holds."""
    for name in getattr(record, "__dataclass_fields__", ()):
        value = getattr(record, name)
        if isinstance(value, str):
            if not value.isprintable() or len(value) > _MAX_CHARACTERS:
                # A frozen record is as new here: nothing has read it yet.
                object.__setattr__(record, name, one_line(value, _MAX_CHARACTERS))
        else:
            for each in value if isinstance(value, list) else (value,):
                clean_fields(each)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks in the form of ``--ranks``: 0-2,5.

    Args:
        ranks: Ranks in ascending order.
    """
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def ranks_phrase(ranks: Sequence[int], of: int = 0) -> str:
    """Return ranks as part of a sentence: ``rank 2``, ``ranks 0-2,5``, or ``all 8 ranks``.

    Args:
        ranks: Ranks in ascending order.
        of: The number of all ranks; 0 if all of them have no meaning here.
    """
    if len(ranks) == of > 1:
        return f"all {of} ranks"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranks_text(ranks)}"
