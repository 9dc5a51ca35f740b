"""The phase table and the ``torchperfd.run/1`` document, of one and the same account."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd.account import Account, KindAccount, PhaseAccount
from torchperfd.phases import PhaseNames
from torchperfd.recorder import DATA, FORWARD, OTHER
from torchperfd.report import RankReport, duration, run_document

MS = 10**6


@pytest.fixture
def report() -> RankReport:
    """One hundred training steps of 10 ms, and two of validation."""
    names = PhaseNames()
    augment = names.slot("augment the images, slowly")
    train = KindAccount(steps=100, ns=1000 * MS, samples=3200)
    # Half of the draws 2 ms, half 4 ms.
    train.phases[DATA] = PhaseAccount(100, 300 * MS, 50 * (2.0 * MS) ** 2 + 50 * (4.0 * MS) ** 2)
    train.phases[FORWARD] = PhaseAccount(200, 500 * MS, 200 * (2.5 * MS) ** 2)
    train.phases[augment] = PhaseAccount(1, 199_999_500, 199_999_500.0**2)
    train.phases[OTHER] = PhaseAccount(100, 500, 2500.0)
    validate = KindAccount(steps=2, ns=3 * MS)
    validate.phases[FORWARD] = PhaseAccount(2, 3 * MS, 2 * (1.5 * MS) ** 2)
    return RankReport(3, Account(train, validate), names)


def test_the_text_is_a_table_per_kind_longest_phase_first(report: RankReport) -> None:
    assert str(report) == report.to_text()
    assert report.to_text() == (
        "rank 3 · train · 100 steps · 10 ms a step · 3,200 samples/s\n"
        "  phase               calls       mean        std      total   share\n"
        "  forward               200     2.5 ms       0 ns     500 ms   50.0%\n"
        "  data                  100       3 ms       1 ms     300 ms   30.0%\n"
        "  augment the imag        1     200 ms       0 ns     200 ms   20.0%\n"
        "  other                 100       5 ns       0 ns     500 ns    0.0%\n"
        "\n"
        "rank 3 · validate · 2 steps · 1.5 ms a step\n"
        "  phase               calls       mean        std      total   share\n"
        "  forward                 2     1.5 ms       0 ns       3 ms  100.0%"
    )


def test_the_text_without_steps_says_so() -> None:
    assert RankReport(7, Account(), PhaseNames()).to_text() == "rank 7: no step was seen"


def test_steps_that_took_no_time_do_not_divide_by_it() -> None:
    account = Account()
    account.train.steps = 2
    account.train.phases[OTHER].calls = 2
    text = RankReport(0, account, PhaseNames()).to_text()
    assert text.splitlines()[0] == "rank 0 · train · 2 steps · 0 ns a step"
    assert text.splitlines()[2].split() == ["other", "2", "0", "ns", "0", "ns", "0", "ns", "0.0%"]


def test_the_document_has_the_keys_that_scripts_depend_on(report: RankReport) -> None:
    verdict = {"cause": "input"}
    other = RankReport(0, Account(), PhaseNames())
    document = run_document("bert-17", [report, other], verdict)
    assert document == json.loads(json.dumps(document))
    assert list(document) == ["schema", "run", "ranks", "verdict"]
    assert (document["schema"], document["run"], document["verdict"]) == (
        "torchperfd.run/1",
        "bert-17",
        verdict,
    )
    assert [rank["rank"] for rank in document["ranks"]] == [0, 3]
    empty, rank = document["ranks"]
    assert empty["train"] == {"steps": 0, "step_seconds_total": 0.0, "samples": 0, "phases": {}}
    assert list(rank) == ["rank", "train", "validate"]
    assert list(rank["train"]) == ["steps", "step_seconds_total", "samples", "phases"]
    assert (rank["train"]["steps"], rank["train"]["step_seconds_total"], rank["train"]["samples"]) == (
        100,
        1.0,
        3200,
    )
    assert list(rank["train"]["phases"]) == ["forward", "data", "augment the images, slowly", "other"]
    assert rank["train"]["phases"]["data"] == pytest.approx(
        {"calls": 100, "seconds_total": 0.3, "mean_seconds": 0.003, "std_seconds": 0.001}
    )
    assert rank["validate"]["phases"]["forward"]["seconds_total"] == pytest.approx(0.003)


def test_shares_are_of_the_whole_step(report: RankReport) -> None:
    shares = {line.phase: line.share for line in report.lines(report.account.train)}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["data"] == pytest.approx(0.3)
    assert "backward" not in shares


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ns"),
        (5e-9, "5 ns"),
        (999e-9, "999 ns"),
        (1e-6, "1 µs"),
        (1.234e-6, "1.23 µs"),
        (999e-6, "999 µs"),
        (999.6e-6, "1 ms"),
        (0.0125, "12.5 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (1.0, "1 s"),
        (59.99, "60 s"),
        (99.96, "100 s"),
        (100.0, "100 s"),
        (1234.5, "1,234 s"),
        (123456.0, "123,456 s"),
    ],
)
def test_a_duration_has_the_unit_that_reads_best(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(0, 1e7))
def test_a_duration_is_short_and_within_half_a_percent(seconds: float) -> None:
    text = duration(seconds)
    assert re.fullmatch(r"[\d,]+(\.\d+)? (ns|µs|ms|s)", text), text
    assert len(text) <= 10 or seconds >= 1e6
    number, unit = text.replace(",", "").split()
    told = float(number) * {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
    assert told == pytest.approx(seconds, rel=0.0051, abs=0.51e-9)
