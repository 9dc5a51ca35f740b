"""The account of a step: its words, its rows, and what carries it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.accounts import uneven_account, with_account

from torchperfd.launch.run_report import verdict_document
from torchperfd.model.messages import fill
from torchperfd.model.step_account import REST, Account, Part, PartKind, part_kind
from torchperfd.v1 import control_pb2


def account_of(step: float, *parts: Part, hidden: tuple[Part, ...] = ()) -> Account:
    return Account(step, step, parts, hidden)


def computing(seconds: float, phase: str = "forward") -> Part:
    return Part(PartKind.COMPUTING, phase, seconds)


def test_words_begin_with_computing_then_the_largest() -> None:
    assert uneven_account().words == (
        "of each 85.6 ms: 34 computing, 42 waiting for ranks whose work differs from step to step,"
        " 8 exchange, 1 garbage collection, 1 rest"
    )


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (0.000_01, "of each 10 µs: 7.5 computing, 2.5 waiting for data"),
        (0.9996, "of each 1 s: 0.75 computing, 0.25 waiting for data"),
        (2.0, "of each 2 s: 1.5 computing, 0.5 waiting for data"),
        (125.0, "of each 125 s: 94 computing, 31 waiting for data"),
    ],
)
def test_words_have_parts_in_the_unit_of_the_step(step: float, words: str) -> None:
    account = account_of(step, computing(0.75 * step), Part(PartKind.DATA, "", 0.25 * step))
    assert account.words == words


@pytest.mark.parametrize(
    ("part", "words", "label"),
    [
        (Part(PartKind.LOSS, "script code", 1.0), "script code", "script code"),
        (Part(PartKind.LATE_RANK, "", 1.0, 3), "waiting for rank 3", "wait for rank 3"),
        (Part(PartKind.LOCK, "", 1.0), "waiting for Python's interpreter", "wait for interpreter"),
        (Part(PartKind.EXCHANGE, "", 1.0), "exchange", "exchange"),
        (Part(PartKind.UNNAMED, "other", 1.0), "in other, unnamed", "in other, unnamed"),
        (Part(PartKind.UNNAMED, "", 1.0), "unnamed", "unnamed"),
    ],
)
def test_part_words_name_what_it_is(part: Part, words: str, label: str) -> None:
    assert (part.words, part.label) == (words, label)


def test_rows_sum_to_the_step_with_small_parts_as_rest() -> None:
    account = uneven_account()
    rows = account.rows
    assert sum(row.seconds for row in rows) == pytest.approx(account.step_seconds)
    assert [row.label for row in rows] == [
        "wait, uneven work",
        "forward",
        "backward",
        "exchange",
        "optimizer",
        "garbage collection",
        REST,
    ]
    [hidden] = account.hidden_rows
    assert hidden.is_hidden
    assert hidden.seconds == 0.0031


KINDS = st.sampled_from([*PartKind])
PARTS = st.builds(
    Part, KINDS, st.sampled_from(["", "forward", "data"]), st.floats(0, 10, allow_subnormal=False)
)


@given(st.lists(PARTS, min_size=1, max_size=40))
def test_rows_of_any_account_sum_to_its_step(parts: list[Part]) -> None:
    step = sum(part.seconds for part in parts)
    account = Account(step, step, tuple(parts), tuple(parts))
    assert sum(row.seconds for row in account.rows) == pytest.approx(step, rel=1e-3)
    assert all(row.seconds >= 0 for row in (*account.rows, *account.hidden_rows))
    message = control_pb2.Verdict()
    fill(message.account, account)
    assert Account.from_verdict(message) == account
    assert account.words.startswith("of each ")


def test_rows_sum_parts_of_the_same_words() -> None:
    account = account_of(1.0, computing(0.5), Part(PartKind.DATA, "", 0.3), Part(PartKind.DATA, "", 0.2))
    assert [(row.label, row.share) for row in account.rows] == [("forward", 0.5), ("wait for data", 0.5)]


def test_account_without_time_has_no_rows() -> None:
    empty = account_of(0.0)
    assert (empty.rows, empty.error, empty.share(PartKind.DATA), empty.open_words) == ((), 0.0, 0.0, "")


@pytest.mark.parametrize(
    ("replayed", "words"),
    [(1.04, ""), (0.92, "not certain: a replay of the same records takes 920 ms, 8% off")],
)
def test_doubt_is_said_where_the_replay_is_off(replayed: float, words: str) -> None:
    assert Account(1.0, replayed, (computing(1.0),)).doubt == words


def test_open_words_name_the_largest_part_beside_work() -> None:
    wait = "48% is waiting for ranks whose work differs from step to step"
    assert uneven_account().open_words == wait
    assert account_of(1.0, computing(0.95), Part(PartKind.DATA, "", 0.05)).open_words == ""


@pytest.mark.parametrize(
    ("account", "has_more"),
    [
        (account_of(1.0, computing(0.6), Part(PartKind.DATA, "", 0.4)), False),
        (account_of(1.0, computing(0.6), Part(PartKind.LOSS, "host-bound", 0.4)), True),
        (account_of(1.0, computing(1.0), hidden=(Part(PartKind.DATA, "", 0.4),)), True),
        (account_of(1.0, computing(1.0), hidden=(Part(PartKind.DATA, "", 0.001),)), False),
    ],
)
def test_has_more_than_phases_where_a_row_is_none(account: Account, has_more: bool) -> None:
    assert account.has_more_than_phases == has_more


def test_account_survives_its_message() -> None:
    own = uneven_account()
    assert Account.from_verdict(with_account(control_pb2.Verdict(), own)) == own
    assert Account.from_verdict(control_pb2.Verdict()) is None
    assert part_kind("of a newer version") is PartKind.UNNAMED


def test_document_of_a_run_has_account_and_note() -> None:
    verdict = with_account(control_pb2.Verdict(cause="none", note="busy node"), uneven_account())
    document = verdict_document(control_pb2.GetRunResponse(verdict=verdict))
    assert document is not None
    assert document["note"] == "busy node"
    assert document["account"]["words"] == uneven_account().words
    late = next(part for part in document["account"]["parts"] if part["kind"] == "late_rank")
    assert (late["rank"], late["name"], late["words"]) == (3, None, "waiting for rank 3")
    assert sum(part["share"] for part in document["account"]["parts"]) == pytest.approx(1.0)
