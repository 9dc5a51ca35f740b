"""Text from outside, made safe for a terminal, a log line and a metric label."""

from typing import Any, Final

_MOST_CHARACTERS: Final = 4096


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
            if not value.isprintable() or len(value) > _MOST_CHARACTERS:
                # A frozen record is as new here: nothing has read it yet.
                object.__setattr__(record, name, one_line(value, _MOST_CHARACTERS))
        else:
            for each in value if isinstance(value, list) else (value,):
                clean_fields(each)
