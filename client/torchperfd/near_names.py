"""Which name was meant where one was mistyped."""

from collections.abc import Iterable
from typing import Final

_MIN_ALIKE: Final = 0.8
_MAX_SUGGESTED: Final = 2
_MIN_BEGINNING: Final = 3
"""Characters: two are the beginning of too many names."""
_MAX_COMPARED: Final = 120
"""Characters, since the comparison takes their number squared."""


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """Return the names nearest to one that does not exist, as a question; empty if none is near.

    The beginning of a name counts as the name, since commands take one for the other.
    """
    from difflib import SequenceMatcher

    given = given[:_MAX_COMPARED]
    matcher = SequenceMatcher(None, b=given, autojunk=False)

    def alike(name: str) -> float:
        best = 0.0
        for beginning in {
            name[:length] for length in range(max(len(given) - 1, _MIN_BEGINNING), len(given) + 2)
        } | {name}:
            matcher.set_seq1(beginning[:_MAX_COMPARED])
            if matcher.quick_ratio() >= _MIN_ALIKE:
                best = max(best, matcher.ratio())
        return best

    ranked = sorted((-alike(name), name) for name in set(names))
    near = [name for score, name in ranked if -score >= _MIN_ALIKE]
    return f"did you mean {' or '.join(near[:_MAX_SUGGESTED])}?" if near else ""
