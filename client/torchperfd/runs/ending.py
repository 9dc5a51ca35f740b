"""How a script has ended, in words."""

from typing import Final

FAILED: Final = "failed"
INTERRUPTED: Final = "interrupted"
TERMINATED: Final = "terminated"
FINISHED: Final = "finished"
_SIGNALS: Final = {INTERRUPTED: "Ctrl-C", TERMINATED: "SIGTERM"}
_UNTRAINED: Final = "no training step was seen: the script has not trained with torch"


def ending_words(state: str, error: str) -> str:
    """Return the state, with what has caused it where that is known.

    Args:
        state: ``finished``, ``failed``, ``interrupted`` or ``terminated``; empty if unknown.
        error: The exception in one line, or the exit code; empty if unknown.
    """
    if state in _SIGNALS:
        return f"{state} by {_SIGNALS[state]}"
    return f"{state}: {error}" if error else state


def why_untrained(state: str, error: str, advice: str = "") -> str:
    """Return why there is no training step.

    Args:
        state: See :func:`ending_words`.
        error: See :func:`ending_words`.
        advice: What to do where training was seen but no step of it.
    """
    if state == FAILED:
        return f"the script failed before its first training step{f': {error}' if error else ''}"
    if advice:
        return advice
    if state in _SIGNALS:
        return f"{_SIGNALS[state]} ended the script before its first training step"
    return _UNTRAINED
