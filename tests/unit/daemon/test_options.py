"""Sizes, ages and moments on the command line."""

import contextlib
import time
from datetime import datetime

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd_cli.commands._options import Age, Moment
from torchperfd_daemon.config.kinds import parse_size
from torchperfd_daemon.errors import BadValueError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1024", 1024),
        ("10GiB", 10 * 2**30),
        ("10gib", 10 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("500MB", 500_000_000),
        ("2Ti", 2 * 2**40),
        ("3k", 3000),
        ("7B", 7),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("0", 0), ("90s", 90), ("1.5h", 5400), ("7d", 604800), ("1w", 604800)]
)
def test_ages_are_read(text: str, seconds: float) -> None:
    assert Age().convert(text, None, None) == seconds


def test_moments_are_dates_or_ages() -> None:
    assert Moment().convert("2026-07-01T12:30", None, None) == datetime(2026, 7, 1, 12, 30).timestamp()
    assert Moment().convert("2026-07-01T00:00+02:00", None, None) == 1782856800.0
    before = time.time()
    assert before - 7200 <= Moment().convert("2h", None, None) <= time.time() - 7200


@pytest.mark.parametrize(
    "text", ["", "i", "10iB", "-1", "1e3", "GiB", "10 furlongs", "\u0661", "1" * 5000, "nan", "10G\n"]
)
def test_what_is_no_size_is_said(text: str) -> None:
    with pytest.raises(BadValueError, match="is no size") as error:
        parse_size(text)
    assert len(str(error.value)) < 100


@given(st.text(max_size=12) | st.from_regex(r"[0-9.]{1,6} ?[a-zA-Z]{0,3}", fullmatch=True))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(BadValueError):
        assert parse_size(text) >= 0
    for option in (Age(), Moment()):
        with contextlib.suppress(click.BadParameter):
            assert option.convert(text, None, None) >= 0 or isinstance(option, Moment)


@pytest.mark.parametrize("text", ["7", "7y", "d", "-1d", "yesterday", "2026-13-01", "9999999999d"])
def test_what_is_no_age_or_moment_is_said(text: str) -> None:
    for option in (Age(), Moment()):
        with pytest.raises(click.BadParameter, match="; write it like "):
            option.convert(text, None, None)
