"""The rules of the loop: the documentation has the table that runs, and no rule hides another."""

import os
from types import SimpleNamespace
from typing import Any

from tests.support.node import ROOT

from torchperfd.steps.loop_rules import DECISIONS, Decision, Rule
from torchperfd.steps.loop_state import HELD, NOTHING, STEPPED

DOCUMENT = ROOT / "docs" / "phases.md"
BEGIN, END = "<!-- rules of the loop -->\n", "<!-- end of the rules -->\n"


def words(names: list[str]) -> str:
    return ", ".join(name.replace("_", " ") for name in names)


def row(rule: Rule) -> str:
    held = words([HELD[kind] for kind in sorted(rule.held)]) or "any"
    when = words([condition.__name__ for condition in rule.when]) or "always"
    then = words([action.__name__ for action in rule.then]) or "nothing"
    after = "as before" if rule.held_after is None else HELD[rule.held_after]
    return f"| {held} | {when} | {then} | {after} |\n"


def rendered() -> str:
    """Return the table as Markdown, a section for each decision."""
    lines = []
    for decision in DECISIONS:
        lines.append(f"\n**{decision.event}**\n\n")
        lines.append("| held | if | then | held afterwards |\n|---|---|---|---|\n")
        lines += [row(rule) for rule in decision.rules]
    return "".join([*lines, "\n"])


def test_loop_rules_in_the_documentation_are_the_same() -> None:
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    expected = f"{before}{BEGIN}{rendered()}{END}{after}"
    if os.environ.get("TORCHPERFD_REWRITE_GOLDEN"):
        DOCUMENT.write_text(expected)
    assert DOCUMENT.read_text() == expected


def covers(rule: Rule, later: Rule) -> bool:
    """Return whether a rule applies wherever a later one would."""
    same_held = not rule.held or (bool(later.held) and later.held <= rule.held)
    return same_held and {c.__name__ for c in rule.when} <= {c.__name__ for c in later.when}


def test_loop_rules_none_is_hidden_by_one_before_it() -> None:
    for decision in DECISIONS:
        for number, later in enumerate(decision.rules):
            hidden = any(covers(rule, later) for rule in decision.rules[:number])
            assert not hidden, (decision.event, row(later))


def test_decision_first_matching_rule_applies() -> None:
    done: list[str] = []

    def note(name: str, held: int | tuple[()] = (), *, matches: bool = True) -> Rule:
        return Rule(held, when=[lambda _: matches], then=[lambda _: done.append(name)])

    state: Any = SimpleNamespace(held=NOTHING)
    Decision("event", note("no", matches=False), note("held", STEPPED), note("yes"), note("late")).apply(
        state
    )
    Decision("event", note("held", STEPPED)).apply(state)
    assert done == ["yes"]
