"""The C module and Python read the same columns from the same text, to the nanosecond."""

import dataclasses
import gzip
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.analysis import synthetic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.daemon.test_analysis_damage import whole
from tests.unit.daemon.traces import document, event

from torchperfd_daemon import analysis, untrusted_files
from torchperfd_daemon.analysis import intervals, kineto
from torchperfd_daemon.analysis.advice import sweep
from torchperfd_daemon.analysis.intervals import nest
from torchperfd_daemon.analysis.native_batches import NATIVE
from torchperfd_daemon.errors import TorchperfdError

pytestmark = pytest.mark.skipif(NATIVE is None, reason="the C module is not compiled")

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "trace_small.json"
PLAIN = {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "pid": 1, "tid": 2, "ts": 3.5, "dur": 4.25}


def plain_values(value: Any) -> Any:
    """Return a dataclass with arrays as what can be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_values(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def read(path: Path) -> Any:
    """Return all that is read from a file, or why it cannot be read."""
    try:
        return plain_values(analysis.load(path))
    except TorchperfdError as error:
        return str(error), error.remedy


def summarised(path: Path) -> Any:
    trace = analysis.load(path)
    return plain_values(trace), analysis.to_dict(analysis.summarise(trace, samples=True), 0)


def read_both(path: Path, piece: int = 1 << 19, read: Callable[[Path], Any] = read) -> tuple[Any, Any]:
    """Read a file with C and with Python, in pieces of so many bytes."""
    whole_pieces = untrusted_files.decompressed_pieces
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(untrusted_files, "decompressed_pieces", lambda raw, _most: whole_pieces(raw, piece))
        native = read(path)
        patch.setattr(kineto, "NATIVE", None)
        patch.setattr(intervals, "NATIVE", None)
        patch.setattr(sweep, "NATIVE", None)
        return native, read(path)


def read_text(text: bytes, piece: int = 1 << 19, suffix: str = ".json") -> tuple[Any, Any]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"rank0{suffix}"
        path.write_bytes(text)
        return read_both(path, piece)


def is_accepted(text: bytes) -> bool:
    return NATIVE is not None and NATIVE.parse(b"[" + text + b"]") is not None


# As they stand in the file: sound numbers of each kind, odd ones, and what is no number.
NUMBERS = st.one_of(
    st.integers(0, 10**6).map(str),
    st.integers(0, 1 << 54).map(lambda ns: f"{ns // 1000}.{ns % 1000:03}"),
    st.integers(1 << 62, 1 << 66).map(str),
    st.floats(0, 1 << 54).map(repr),
    st.decimals(0, 10**13, places=7).map(str),
    st.sampled_from([
        "-0", "-0.0", "-1", "1e3", "1E-3", "2.5e15", "0.0000000000000000000001", "1,5", "nan", "NaN",
        "-Infinity",
        "8796093022207.9999", "8796093022208.0005", "8796093022208.0015", "1700000000000000.1235",
        "9007199254740991.999",
        "9223372036854775807", "9223372036854775808", "-9223372036854775808", "18446744073709551615",
        "18446744073709551616", "99999999999999999999", "4294967296", "2147483648", "00", "01", "1.", ".5",
        "+1", "1e400", "1e", "0x10",
    ]),
)  # fmt: skip
TEXTS = st.one_of(
    st.text(max_size=12).map(json.dumps),
    st.text(max_size=12).map(lambda text: json.dumps(text, ensure_ascii=False)),
    st.sampled_from([
        '""', '"0"', '"7"', '"007"', '" 7 "', '"-7"', '"1_0"', '"7.0"', '"\\u0041"', '"\\/"',
        '"\\ud83d\\ude00"', '"\\ud800"', '"\\x"', '"a\nb"', '"\x00"', '"[memory]"',
        '"\\u005bmemory]"', '"Trace"', '"trace"', '"ProfilerStep#1"', '"a"b"',
    ]),
)  # fmt: skip
NESTED = st.recursive(
    st.one_of(NUMBERS, TEXTS, st.sampled_from(["null", "true", "false", "tru", ""])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{' , '.join(items)}]"),
        st.lists(st.tuples(TEXTS, inner), max_size=3).map(
            lambda items: "{" + ",".join(f"{key}:{value}" for key, value in items) + "}"
        ),
    ),
    max_leaves=6,
)
ARGUMENTS = (
    "External id", "external id", "correlation", "Process Group Name", "Collective name",
    "Process Group Ranks", "In msg nelems", "Out msg nelems", "dtype", "Seq", "Sequence number", "finished",
    "Fwd thread id", "Input Dims", "Input type", "Bytes", "Device Type", "Total Reserved", "stream", "x",
)  # fmt: skip
FIELDS = ("ph", "name", "cat", "pid", "tid", "ts", "dur", "args", "id", "na\\u006de")
SPACE = st.sampled_from(["", "", "", " ", "\n\t", "\r\n  "])


@st.composite
def events(draw: st.DrawFn, odd: int) -> str:
    """Draw an event, in which one of so many fields is anything at all."""

    def value(sound: st.SearchStrategy[str]) -> str:
        return draw(NESTED if not draw(st.integers(0, odd)) else sound)

    def joined(members: list[tuple[str, str]]) -> str:
        text = ",".join(f'{draw(SPACE)}"{key}"{draw(SPACE)}:{draw(SPACE)}{each}' for key, each in members)
        return "{" + text + draw(SPACE) + "}"

    identifier = st.one_of(st.integers(-2, 40).map(str), st.sampled_from(['"12"', '"a"']))
    args = [
        (key, value(st.integers(0, 4).map(str) if key in ("Bytes", "Device Type") else identifier))
        for key in draw(st.lists(st.sampled_from(ARGUMENTS), max_size=6))
    ]
    time = st.integers(0, 10**7).map(lambda ns: f"{ns // 1000}.{ns % 1000:03}")
    category = st.sampled_from(["cpu_op", "kernel", "gpu_memcpy", "cuda_runtime", "user_annotation", "Trace"])
    members = [
        ("ph", value(st.sampled_from(['"X"', '"X"', '"X"', '"i"', '"s"', '"M"']))),
        ("cat", value(category.map(json.dumps))),
        (
            "name",
            value(st.one_of(TEXTS, st.sampled_from(['"aten::mm"', '"cudaLaunchKernel"', '"[memory]"']))),
        ),
        ("pid", value(identifier)),
        ("tid", value(identifier)),
        ("ts", value(time)),
        ("dur", value(time)),
        ("args", value(st.just(joined(args)))),
    ]
    members = draw(st.permutations(members)) if not draw(st.integers(0, 3)) else members
    members = [each for each in members if draw(st.integers(0, odd * 4))]
    if not draw(st.integers(0, odd)):
        members.append((draw(st.sampled_from(FIELDS)), draw(NESTED)))
    return joined(members)


@st.composite
def traces(draw: st.DrawFn) -> tuple[bytes, int, str]:
    """Draw a file, how many bytes are read from it at once, and its suffix."""
    odd = draw(st.sampled_from([3, 20, 400]))
    listed = draw(st.lists(events(odd), min_size=1, max_size=12))
    text = draw(st.sampled_from(["", "", "\ufeff"])) + document(listed)
    data = text.encode("utf-8", "surrogatepass")
    if not draw(st.integers(0, 5)):
        data = data[: draw(st.integers(0, len(data)))]
    if not draw(st.integers(0, 5)):
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=3)) + data[at + 1 :]
    piece = draw(st.sampled_from([64, 500, 1 << 19]))
    return (gzip.compress(data), piece, ".json.gz") if not draw(st.integers(0, 5)) else (data, piece, ".json")


@given(traces())
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_parse_any_text_equals_python(trace: tuple[bytes, int, str]) -> None:
    native, python = read_text(*trace)
    assert native == python


@given(NESTED, st.sampled_from([*FIELDS, *(f"args {each}" for each in ARGUMENTS)]))
@settings(deadline=None, max_examples=200)
def test_parse_one_odd_field_equals_python(value: str, field: str) -> None:
    """Everything else in the file is sound, so that C and Python differ in this field or not at all."""
    text = json.dumps({**PLAIN, "args": {}})[:-2]
    odd = (
        f'{text}"{field[5:]}": {value}}}}}'
        if field.startswith("args ")
        else f'{text}}}, "{field}": {value}}}'
    )
    native, python = read_text(document([odd, event("relu", 0, 900)]).encode("utf-8", "surrogatepass"))
    assert native == python


def recorded() -> Iterator[tuple[str, Path | str]]:
    yield "golden", GOLDEN
    yield "everything", whole()
    yield (
        "old clock",
        document(
            [
                json.dumps(PLAIN | {"ts": 0}).replace('"ts": 0', f'"ts": 16000000000000{at:02}.{at:03}5')
                for at in range(40)
            ]
        ),
    )
    yield (
        "python's floats",
        document([json.dumps(PLAIN | {"ts": at * 1e9 / 7, "dur": at / 7}) for at in range(40)]),
    )


@pytest.mark.parametrize("trace", [each for _, each in recorded()], ids=[name for name, _ in recorded()])
@pytest.mark.parametrize("piece", [1000, 1 << 19])
def test_parse_recorded_trace_equals_python(tmp_path: Path, trace: Path | str, piece: int) -> None:
    path = trace if isinstance(trace, Path) else tmp_path / "rank0.json"
    if isinstance(trace, str):
        path.write_text(trace)
    native, python = read_both(path, piece, summarised)
    assert native == python


def test_parse_long_trace_equals_python(tmp_path: Path) -> None:
    synthetic.write(tmp_path / "rank0.json", 6000)
    native, python = read_both(tmp_path / "rank0.json", read=summarised)
    assert native == python
    assert native[0]["events"] == 6000


SOUND = json.dumps(
    {**PLAIN, "args": {"External id": 5, "Input Dims": [[1, 2], []], "Input type": ["float", ""]}}
)


@pytest.mark.parametrize(
    "text",
    [
        SOUND,
        f"{SOUND} ,\n{SOUND}",
        json.dumps(PLAIN | {"name": 'quoted "ü" \\ \n \u0001'}),
        json.dumps(PLAIN | {"ts": 1700000000000000.25, "dur": 1 / 3}),
        json.dumps(PLAIN | {"args": {"correlation": "12", "x": [{"y": [None]}]}}),
        json.dumps(PLAIN | {"args": {"Sequence number": (1 << 64) - 1, "finished": False}}),
        json.dumps({"ph": "s", "id": 7, "ts": 1}),
        json.dumps(PLAIN | {"dur": -1}),
    ],
)  # fmt: skip
def test_parse_sound_events_is_accepted(text: str) -> None:
    assert is_accepted(text.encode())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        SOUND[:-1],
        SOUND + ",",
        SOUND.replace("3.5", "03.5"),
        SOUND.replace("3.5", "3.5e0"),
        SOUND.replace("3.5", "12345678901234567890.5"),
        SOUND.replace("cpu_op", ""),
        SOUND.replace("aten", "a\\ud800"),
        SOUND.replace('"pid"', '"p\\u0069d"'),
        SOUND.replace("[1, 2]", "[" * 100_000),
        SOUND.replace("[1, 2]", "[" * 100_000 + "]" * 100_000),
        SOUND.replace("[1, 2]", '{"a": ' * 100 + "1" + "}" * 100),
    ],
)
def test_parse_odd_events_is_left_to_python(text: str) -> None:
    assert not is_accepted(text.encode())


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 12)), max_size=30))
def test_nest_in_c_equals_python(calls: list[tuple[int, int, int]]) -> None:
    lines = [event("a", start, start + took, thread=thread) for thread, start, took in [(0, 0, 1), *calls]]
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "t.json").write_text(document(lines))
        trace = analysis.load(Path(directory) / "t.json")
    native = plain_values(nest(trace, np.arange(len(trace))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "NATIVE", None)
        assert native == plain_values(nest(trace, np.arange(len(trace))))
