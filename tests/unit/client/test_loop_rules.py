"""The rules of the loop: no rule hides another, and the first that matches applies."""

from types import SimpleNamespace
from typing import Any

from torchperfd.steps.loop_rules import DECISIONS, Decision, Rule
from torchperfd.steps.loop_state import NOTHING, STEPPED


def covers(rule: Rule, later: Rule) -> bool:
    """Return whether a rule applies wherever a later one would."""
    same_held = not rule.held or (bool(later.held) and later.held <= rule.held)
    return same_held and {c.__name__ for c in rule.when} <= {c.__name__ for c in later.when}


def test_loop_rules_none_is_hidden_by_one_before_it() -> None:
    for decision in DECISIONS:
        for number, later in enumerate(decision.rules):
            hidden = any(covers(rule, later) for rule in decision.rules[:number])
            assert not hidden, (decision.event, later)


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
