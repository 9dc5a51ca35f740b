"""Traces that were cut or scribbled on, through everything that the analyser does with one."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.daemon.traces import document, event

from torchperfd.document.markup import render_csv, render_markdown
from torchperfd.document.terminal import render
from torchperfd_cli import main
from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.trace_repair import by_process
from torchperfd_daemon.errors import TorchperfdError

STEPS = 4


def whole() -> str:
    """Return a trace with something of everything: host, device, collectives, frames and memory."""
    lines = []
    for step in range(STEPS):
        at = step * 1_000_000
        lines.append(event(f"ProfilerStep#{step}", at, at + 990_000, cat="user_annotation"))
        name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        lines.append(event(name, at + 1_000, at + 100_000, cat="user_annotation"))
        lines.append(event("train.py(12): step", at + 500, at + 980_000, cat="python_function"))
        lines.append(event("nn.Module: Linear_0", at + 110_000, at + 400_000, cat="python_function"))
        for number in range(6):
            begin, linked = at + 120_000 + number * 40_000, step * 100 + number + 1
            ids = {"External id": linked, "Sequence number": linked}
            dims = {"Input Dims": [[64, 32], [32, 8]], "Input type": ["double", "float"]}
            lines.append(event("aten::mm", begin, begin + 30_000, args={**ids, **dims}))
            launch = {"External id": linked, "correlation": linked}
            lines.append(
                event("cudaLaunchKernel", begin + 5_000, begin + 9_000, cat="cuda_runtime", args=launch)
            )
            kernel = ("sgemm", "Memcpy HtoD (Pageable -> Device)")[number % 2]
            where = ("kernel", "gpu_memcpy")[number % 2]
            more = {**launch, "stream": 7}
            lines.append(event(kernel, begin + 12_000, begin + 40_000, cat=where, thread=7, args=more))
        collective = {
            "Collective name": "allreduce",
            "Process Group Name": "0",
            "Process Group Ranks": "[0, 1]",
            "In msg nelems": 4096,
            "Out msg nelems": 4096,
            "dtype": "Float",
            "Seq": step,
        }
        begin = at + 600_000
        lines.append(event("record_param_comms", begin, begin + 9_000, args=collective))
        name = "ncclDevKernel_AllReduce_Sum_f32"
        lines.append(event(name, begin + 9_000, begin + 90_000, cat="kernel", thread=20, args=collective))
        name = "cudaStreamSynchronize"
        lines.append(
            event(name, at + 700_000, at + 900_000, cat="cuda_runtime", args={"correlation": 99_000 + step})
        )
        instant = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1}
        memory = {"Bytes": 4096 * (step + 1), "Device Type": 1, "Total Reserved": 1 << 20}
        lines.append(json.dumps({**instant, "ts": 7_000_000_000_000.0 + at / 1000, "args": memory}))
    return document(lines)


def everything(path: Path) -> int:
    """Do all that there is to be done with a trace; return how many events it had."""
    summary = analysis.summarise(analysis.load(path), samples=True, rectangles=1000)
    ranks = [(0, summary), (1, summary)]
    across = analysis.across({rank: each.collectives for rank, each in ranks})
    document = {"ranks": [analysis.to_dict(each, rank) for rank, each in ranks]}
    json.dumps(document)
    found = analysis.summary_document(summary, 0, limit=10, sort_by="self")
    if across is not None:
        found += analysis.across_document(across)
    render(found)
    render_markdown(found)
    render_csv(analysis.csv_document(ranks, "self"))
    analysis.render_html(document, [each.picture for _, each in ranks])
    comparison = analysis.compare([summary], [summary])
    assert {change.status for change in comparison.operators} <= {"same"}
    return summary.events


def attempt(path: Path) -> int:
    """Return how many events could be read; 0 for a refusal, which is one line."""
    said = ""
    try:
        return everything(path)
    except TorchperfdError as error:
        said = str(error)
    assert said.count("\n") == 0
    return 0


def test_everything_is_done_with_the_whole_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(whole())
    assert everything(path) == STEPS * (4 + 18 + 2 + 1 + 1)


def test_truncated_trace_is_reported_up_to_its_end(tmp_path: Path) -> None:
    text = whole()
    path = tmp_path / "t.json"
    most = 0
    for length in sorted(random.Random(0).sample(range(len(text)), 100)):
        path.write_text(text[:length])
        found = attempt(path)
        assert found >= most, "a longer file never says less"
        most = found
    assert most > STEPS * 20


@pytest.mark.parametrize("seed", range(60))
def test_bytes_that_were_overwritten_never_bring_anything_down(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    content = bytearray(whole().encode())
    for _ in range(chance.randint(1, 40)):
        at = chance.randrange(len(content))
        content[at : at + chance.randint(1, 6)] = chance.randbytes(chance.randint(0, 6))
    path = tmp_path / "t.json"
    path.write_bytes(content)
    attempt(path)


@pytest.mark.parametrize("seed", range(60))
def test_values_that_make_no_sense_never_bring_anything_down(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    trace = json.loads(whole())
    nonsense: list[object] = [
        None,
        -1,
        0,
        2**62,
        -(2**62),
        10**30,
        -(10**30),
        1e300,
        "x",
        "",
        [],
        {},
        True,
        "7",
        [[]],
        {"a": 1},
        0.5,
    ]
    for _ in range(chance.randint(1, 60)):
        holder = chance.choice(trace["traceEvents"])
        if chance.random() < 0.6 and isinstance(holder.get("args"), dict) and holder["args"]:
            holder = holder["args"]
        holder[chance.choice([*holder])] = copy.deepcopy(chance.choice(nonsense))
    path = tmp_path / "t.json"
    path.write_text(json.dumps(trace))
    attempt(path)


FUZZ = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
SCALARS: list[Any] = [
    None,
    True,
    -1,
    2**62,
    10**30,
    1e300,
    "",
    "7",
    "1,5",
    "\ud800",
    "\x1b[2J",
    [],
    {},
    [[1]],
    {"name": []},
    "GPU 0",
    "kernel",
    "cuda_runtime",
]


WHOLE = whole()


def commanded(capfd: pytest.CaptureFixture[str], *arguments: str) -> None:
    """Run a command: it answers, or refuses in a line, and never shows a traceback."""
    code = main.run_command([*arguments])
    captured = capfd.readouterr()
    assert code in (0, 1, 3, 5)
    assert "Traceback" not in captured.out + captured.err
    if code == 0:
        json.loads(captured.out)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=6), st.integers(0, 6)), max_size=8),
    st.lists(
        st.tuples(
            st.integers(0, 400),
            st.sampled_from(
                ["ph", "cat", "name", "pid", "tid", "ts", "dur", "args", "External id", "correlation"]
            ),
            st.sampled_from(SCALARS),
        ),
        max_size=8,
    ),
    st.sampled_from(["object", "list", "twice"]),
    st.sampled_from(SCALARS),
)
@FUZZ
def test_commands_on_a_mutated_file_answer_or_refuse(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    bytes_changed: list[tuple[float, bytes, int]],
    fields: list[tuple[int, str, Any]],
    form: str,
    header: Any,
) -> None:
    trace = json.loads(WHOLE) | {"distributedInfo": header, "deviceProperties": [header], "WARNING": header}
    for at, key, value in fields:
        holder = trace["traceEvents"][at % len(trace["traceEvents"])]
        if key in ("External id", "correlation"):
            holder = holder["args"] if isinstance(holder.get("args"), dict) else {}
        holder[key] = value
    content = bytearray(json.dumps(trace["traceEvents"] if form == "list" else trace).encode())
    content *= 2 if form == "twice" else 1
    for place, inserted, removed in bytes_changed:
        at = int(place * len(content))
        content[at : at + removed] = inserted
    file = tmp_path / "trace.json"
    file.write_bytes(content)
    commanded(capfd, "analyze", str(file), "--json", "--with-text")
    everything_or_refusal(file)


def everything_or_refusal(path: Path) -> None:
    for trace in attempted(path):
        summary = analysis.summarise(trace, samples=True, rectangles=1000)
        analysis.render_html({"ranks": [analysis.to_dict(summary, 0)], "advice": []}, [summary.picture])
        analysis.compare([summary], [summary])


def attempted(path: Path) -> list[analysis.Trace]:
    try:
        return list(by_process(analysis.load(path)))
    except TorchperfdError:
        return []


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"traceEvents": [{"ph": "X", "name": "aten::mm", "ts": 1', "56"),
        ('{"traceEvents": [', "17"),
        ('{"traceEvents": [{"ph" "X"}]}', "23"),
    ],
)
def test_load_damaged_before_any_event_names_the_byte(tmp_path: Path, text: str, place: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(
        TorchperfdError, match=rf"cut off or damaged at byte {place} of its text, and has no event"
    ):
        analysis.load(tmp_path / "t.json")
