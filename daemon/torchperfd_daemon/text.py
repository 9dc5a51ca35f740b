"""Text from outside, made safe for a terminal, a log line and a metric label."""


def one_line(text: str, most: int) -> str:
    """Return at most ``most`` characters of a text, with ``?`` for each that is not printable.

    Not printable are control characters (C0, C1, DEL), line and paragraph separators, bidirectional
    overrides and other format characters, surrogates, and spaces other than the ASCII one.
    """
    text = text[:most]
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "?" for character in text)
