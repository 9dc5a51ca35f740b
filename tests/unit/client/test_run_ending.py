"""How a script has ended, in words: also where it has not trained."""

import pytest

from torchperfd.runs.ending import ending_words, why_untrained


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ("", "", ""),
        ("finished", "", "finished"),
        ("failed", "exit code 2", "failed: exit code 2"),
        ("interrupted", "", "interrupted by Ctrl-C"),
        ("terminated", "", "terminated by SIGTERM"),
    ],
)
def test_ending_has_its_cause(state: str, error: str, words: str) -> None:
    assert ending_words(state, error) == words


@pytest.mark.parametrize(
    ("state", "error", "advice", "why"),
    [
        ("failed", "KeyError: 'x'", "", "the script failed before its first training step: KeyError: 'x'"),
        # A failure explains missing steps better than how training could be seen.
        ("failed", "no", "call step()", "the script failed before its first training step: no"),
        ("failed", "", "", "the script failed before its first training step"),
        ("terminated", "", "", "SIGTERM ended the script before its first training step"),
        ("interrupted", "", "call step()", "call step()"),
        ("finished", "", "", "no training step was seen: the script has not trained with torch"),
    ],
)
def test_untrained_run_says_why(state: str, error: str, advice: str, why: str) -> None:
    assert why_untrained(state, error, advice) == why
