"""Which name was meant where one was mistyped."""

from collections.abc import Iterable
from typing import Final

_LEAST_ALIKE: Final = 0.8
_MOST_SUGGESTED: Final = 2
_LEAST_BEGINNING: Final = 3
"""Characters: two are the beginning of too many names."""
_MOST_COMPARED: Final = 120
"""Characters, since the comparison takes their number squared."""


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """Return the names nearest to one that does not exist, as a question; empty if none is near.

    The beginning of a name counts as the name, since commands take one for the other.
    """
    from difflib import SequenceMatcher

    given = given[:_MOST_COMPARED]
    matcher = SequenceMatcher(None, b=given, autojunk=False)

    def alike(name: str) -> float:
        best = 0.0
        for beginning in {
            name[:length] for length in range(max(len(given) - 1, _LEAST_BEGINNING), len(given) + 2)
        } | {name}:
            matcher.set_seq1(beginning[:_MOST_COMPARED])
            if matcher.quick_ratio() >= _LEAST_ALIKE:
                best = max(best, matcher.ratio())
        return best

    ranked = sorted((-alike(name), name) for name in set(names))
    near = [name for score, name in ranked if -score >= _LEAST_ALIKE]
    return f"did you mean {' or '.join(near[:_MOST_SUGGESTED])}?" if near else ""
