"""Options of commands, and what commands print when they are ended, disturbed or refused."""

import contextlib
import os
import signal
import threading
import time
from datetime import datetime

import click
import grpc
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd_cli.commands._daemon import _translated
from torchperfd_cli.commands._options import AGE, MOMENT, NUMBERS, SHARE
from torchperfd_cli.commands._output import INTERRUPTED, results_on_sigterm, warn_if_busy
from torchperfd_cli.main import run_command
from torchperfd_daemon.config.kinds import parse_size
from torchperfd_daemon.errors import (
    BadValueError,
    DaemonUnreachableError,
    DeadlineError,
    IncompatibleVersionError,
    NoSuchTargetError,
    TorchperfdError,
    UsageError,
)


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
    assert AGE.convert(text, None, None) == seconds


def test_moments_are_dates_or_ages() -> None:
    assert MOMENT.convert("2026-07-01T12:30", None, None) == datetime(2026, 7, 1, 12, 30).timestamp()
    assert MOMENT.convert("2026-07-01T00:00+02:00", None, None) == 1782856800.0
    before = time.time()
    assert before - 7200 <= MOMENT.convert("2h", None, None) <= time.time() - 7200


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
    for option in (AGE, MOMENT):
        with contextlib.suppress(click.BadParameter):
            assert option.convert(text, None, None) >= 0 or option is MOMENT


@pytest.mark.parametrize("text", ["7", "7y", "d", "-1d", "yesterday", "2026-13-01", "9999999999d"])
def test_what_is_no_age_or_moment_is_said(text: str) -> None:
    for option in (AGE, MOMENT):
        with pytest.raises(click.BadParameter, match="; write it like "):
            option.convert(text, None, None)


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.05", 0.05), ("0", 0.0), ("12.5%", 0.125)])
def test_share_is_a_number_or_a_percentage(text: str, share: float) -> None:
    assert SHARE.convert(text, None, None) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "-5%", "nan", "inf", "five"])
def test_share_refuses_what_is_none(text: str) -> None:
    with pytest.raises(click.BadParameter):
        SHARE.convert(text, None, None)


def test_numbers_are_each_listed_once() -> None:
    assert NUMBERS.convert("32, 64,32", None, None) == (32, 64)


@pytest.mark.parametrize("text", ["", "0", "1,,2", "1.5", "-1", "many"])
def test_numbers_refuse_what_is_none(text: str) -> None:
    with pytest.raises(click.BadParameter):
        NUMBERS.convert(text, None, None)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["dataloader", "train"], "'train' names no loader"),
        (["compare", "a:f"], "compare needs two functions"),
        (["compare", "a:f", "b:g", "-p", "size=1", "-p", "size=2"], "a parameter is given twice"),
        (["compare", "a:f", "b:g", "-p", "=1"], "no parameter such as"),
        (["compare", "a:f", "b:g", "--rounds", "2"], "2 is not in the range"),
        (["dataloader", "a:f", "--start-methods", "thread"], "no list of fork, spawn and forkserver"),
    ],
)
def test_command_line_that_is_wrong_is_exit_code_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["bench", *arguments]) == 2
    assert expected in " ".join(capsys.readouterr().err.split())


def test_sigterm_interrupts_and_has_its_exit_code() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with results_on_sigterm() as interruption:
        assert interruption.exit_code == INTERRUPTED
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert interruption.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_on_another_thread_is_left_alone() -> None:
    before, codes = signal.getsignal(signal.SIGTERM), []

    def measure() -> None:
        with results_on_sigterm() as interruption:
            codes.append(interruption.exit_code)

    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
    assert (codes, signal.getsignal(signal.SIGTERM)) == ([INTERRUPTED], before)


@pytest.mark.parametrize(("percent", "words"), [(97.0, "97%"), (12.0, "")])
def test_busy_machine_is_named(
    percent: float, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda _: percent)
    warn_if_busy()
    err = capsys.readouterr().err
    assert words in err
    assert bool(err) is bool(words)


RAW = "failed to connect to all addresses; last error: FAILED_PRECONDITION: unix:d.sock: connect failed"


class Failure(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str | None) -> None:
        super().__init__()
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str | None:
        return self._details


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (grpc.StatusCode.UNAVAILABLE, DaemonUnreachableError, "the daemon at /d.sock has ended"),
        (grpc.StatusCode.CANCELLED, DaemonUnreachableError, "the daemon at /d.sock has ended"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineError, "has not answered in time"),
        (grpc.StatusCode.UNIMPLEMENTED, IncompatibleVersionError, "is too old for this request"),
    ],
)
def test_failed_call_of_grpc_is_said_in_our_words(
    code: grpc.StatusCode, kind: type[TorchperfdError], words: str
) -> None:
    error = _translated(Failure(code, RAW), "/d.sock")
    assert type(error) is kind
    assert words in str(error)
    assert "; " in str(error), "and what to do"
    assert "connect to all" not in str(error)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.NOT_FOUND, NoSuchTargetError),
        (grpc.StatusCode.INVALID_ARGUMENT, UsageError),
        (grpc.StatusCode.FAILED_PRECONDITION, TorchperfdError),
    ],
)
def test_failed_call_of_the_daemon_keeps_its_words(
    code: grpc.StatusCode, kind: type[TorchperfdError]
) -> None:
    error = _translated(Failure(code, "no run x on this node; see ps"), "/d.sock")
    assert (type(error), str(error)) == (kind, "no run x on this node; see ps")


def test_failed_call_of_unknown_kind_points_to_the_log() -> None:
    text = str(_translated(Failure(grpc.StatusCode.UNKNOWN, "Unexpected KeyError\ntraceback"), "/d.sock"))
    assert text == "the daemon at /d.sock failed: Unexpected KeyError; see its log"
