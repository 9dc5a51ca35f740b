"""The mutants that `make mutation` draws from."""

import pytest
from tools.mutation.mutants import mutants


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("a < b", ["(a >= b)", "(a <= b)"]),
        ("a >= b", ["(a < b)", "(a > b)"]),
        ("a < b == c", ["(a >= b == c)", "(a <= b == c)", "(a < b != c)"]),
        ("a is not b", ["(a is b)"]),
        ("a + b", ["(a - b)"]),
        ("a and b or c", ["((a and b) and c)", "(a or b) or c"]),
        ("not a", ["(a)"]),
        ("LIMIT: int | None = 3", ["LIMIT: int | None = (4)"]),
        ("LIMIT = 0.0", ["LIMIT = (1.0)"]),
        ("LIMIT = 0.25", ["LIMIT = (0.5)"]),
        ("f(True)", ["pass", "f((False))"]),
        ("await f()", ["pass"]),
        ("a.b = c", ["pass"]),
        ("a += b", ["pass"]),
        ("raise a", ["pass"]),
        (
            "@a(1)\ndef f(b: 'c' = 2) -> 'd':\n    return b",
            ["@a(1)\ndef f(b: 'c' = (3)) -> 'd':\n    return b"],
        ),
    ],
)
def test_mutants_change_one_thing_each(source: str, changed: list[str]) -> None:
    found = [mutant.source for mutant in mutants("m.py", source)]
    assert found[: len(changed)] == changed


@pytest.mark.parametrize(
    "source", ["a = b", "'text'", "f'{1}'", "log.info('a', 1)", "def f():\n    return None"]
)
def test_mutants_of_what_no_test_needs_to_see_are_none(source: str) -> None:
    assert list(mutants("m.py", source)) == []


def test_mutant_keeps_the_text_around_its_change() -> None:
    source = "WÖRTER = 'ö'  # a comment\n\n\ndef f(a):\n    return a  # why\n"
    (mutant,) = mutants("m.py", source)
    assert mutant.source == source.replace("return a", "return None")
    assert mutant[:4] == ("m.py", 5, "f", "return a -> return None")
