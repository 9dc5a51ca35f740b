"""Kinds of configured values: what is read is what is shown, and nothing is a traceback."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchperfd_daemon.config.kinds import (
    Address,
    Choice,
    Choices,
    Count,
    Counts,
    File,
    Kind,
    Labels,
    Mode,
    Name,
    Number,
    Size,
    Span,
    Switch,
    Text,
)
from torchperfd_daemon.errors import BadValueError, refuse_unknown

HERE = Path("/etc/somewhere")
KINDS: tuple[Kind, ...] = (
    Text(),
    Name(("command",)),
    File(),
    Address(),
    Mode(),
    Size(),
    Span(),
    Span(1, 3600),
    Number(0.05, 3600, "time in seconds"),
    Count(1, 1000),
    Switch(),
    Choice(("debug", "info")),
    Choices(("gpu", "cpu", "steps")),
    Labels(),
    Counts(),
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(
        [
            "10GiB",
            "1.5 GB",
            "0",
            "30m",
            "90s",
            "[::1]:80",
            "a.b:9407",
            "600",
            "info",
            "nan",
            "cpu,gpu",
            "all",
            "9" * 5000,
        ]
    )
    | st.just(16**5000)
)
values = scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.text(max_size=5), scalars, max_size=3)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
@given(value=values)
@settings(max_examples=50)
def test_whatever_a_file_has_is_read_or_refused_in_one_line(kind: Kind, value: object) -> None:
    try:
        read = kind.read(value, HERE)
    except BadValueError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert kind.read(kind.show(read), HERE) == read
    assert refusal.isprintable()
    assert len(refusal) < 300


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
@settings(max_examples=50)
@given(
    text=st.text(max_size=20)
    | st.sampled_from(["1", "0", "true", "off", "2.5", "1e400", "-1", "٣", "9" * 5000])
)
def test_whatever_a_variable_has_is_read_or_refused_in_one_line(kind: Kind, text: str) -> None:
    with contextlib.suppress(BadValueError):
        read = kind.parse(text, HERE)
        assert kind.read(kind.show(read), HERE) == read


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (Size(), "50GB", 50_000_000_000),
        (Size(), 7, 7),
        (Span(), "1.5h", 5400.0),
        (Span(), 0, 0.0),
        (Mode(), "660", 0o660),
        (Address(), "[::1]:0", ("::1", 0)),
        (File(), "captures", HERE / "captures"),
        (File(), "/var/x", Path("/var/x")),
        (Number(0, 10), 3, 3.0),
        (Labels(), {"phase": "data", "a": "b"}, (("a", "b"), ("phase", "data"))),
        (Counts(), [79, 95], (79, 95)),
        (Choices(("gpu", "cpu", "steps")), ["steps", "gpu", "gpu"], ("gpu", "steps")),
        (Choices(("gpu", "cpu", "steps")), "steps, cpu", ("cpu", "steps")),
        (Choices(("gpu", "cpu", "steps")), "all", ("gpu", "cpu", "steps")),
    ],
)
def test_values_are_read(kind: Kind, value: object, expected: Any) -> None:
    assert kind.read(value, HERE) == expected


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Size(), True),
        (Size(), -1),
        (Size(), 2**63),
        (Span(), 30),
        (Span(10), "9s"),
        (Span(0, 60), "2m"),
        (Mode(), 600),
        (Mode(), "1777"),
        (Address(), "localhost"),
        (Address(), "host:65536"),
        (Count(), 1.0),
        (Count(), True),
        (Count(1, 9), 10),
        (Number(0, 1), float("nan")),
        (Number(0, 1), True),
        (Number(0, 1), "0.5"),
        (Switch(), 1),
        (Choice(("on",)), "off"),
        (Name(("script",)), "script"),
        (Name(), "Upper"),
        (Text(), "two\nlines"),
        (Labels(), {"rank": 0}),
        (Counts(), []),
        (Choices(("gpu", "cpu")), []),
        (Choices(("gpu", "cpu")), ["gpu", 1]),
        (Choices(("gpu", "cpu")), ["all", "gpu"]),
        (Choices(("gpu", "cpu")), "gpu,"),
    ],
)
def test_what_has_the_wrong_type_or_range_is_refused(kind: Kind, value: object) -> None:
    with pytest.raises(BadValueError):
        kind.read(value, HERE)


@pytest.mark.parametrize(
    ("text", "on"), [("1", True), ("TRUE", True), (" on ", True), ("0", False), ("no", False)]
)
def test_switches_are_words(text: str, on: bool) -> None:
    assert Switch().parse(text, HERE) is on


def test_a_size_is_shown_in_its_largest_whole_unit() -> None:
    shown = [Size().show(size) for size in (0, 1, 1000, 1024, 50 * 10**9, 20 * 2**30, 2**40 + 1)]
    assert shown == [0, 1, "1kB", "1KiB", "50GB", "20GiB", 2**40 + 1]


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("captures-max-byte", "did you mean captures_max_bytes?"),
        ("INTERVAL", "did you mean interval?"),
        ("zzz", "known are captures_max_bytes, interval"),
    ],
)
def test_an_unknown_key_gets_a_suggestion(key: str, hint: str) -> None:
    with pytest.raises(BadValueError) as error:
        refuse_unknown({key: 1}, ("captures_max_bytes", "interval"), "a.toml")
    assert str(error.value) == f"a.toml: there is no key {key!r}; {hint}"


def test_a_choice_gets_a_suggestion() -> None:
    with pytest.raises(BadValueError, match=r"'stal' is none of the choices; did you mean stall\?"):
        Choice(("stall", "straggler")).read("stal", HERE)


def test_unknown_name_of_several_gets_the_list_of_names() -> None:
    with pytest.raises(BadValueError) as error:
        Choices(("gpu", "cpu")).read(["cpu", "gpus"], HERE)
    assert str(error.value) == "'gpus' is none of the choices; use all, or some of gpu, cpu"


def test_names_are_shown_as_a_list_or_as_all() -> None:
    kind = Choices(("gpu", "cpu"))
    assert [kind.show(kind.parse(text, HERE)) for text in ("cpu", "cpu,gpu")] == [["cpu"], "all"]
