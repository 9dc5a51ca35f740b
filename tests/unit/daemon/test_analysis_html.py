"""The page: its picture against a brute-force one, what stands in it, and ``analyze --html``."""

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.values import some
from tests.unit.daemon.traces import document, event, trace_of

from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.picture import Lane, draw

SMALL = Path(__file__).parents[2] / "golden" / "trace_small.json"
HOSTILE = '</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>"&'
# Name, start, end, and the calls within.
Call = tuple[str, int, int, list[Any]]


def calls_within(start: int, end: int, depth: int) -> st.SearchStrategy[list[Call]]:
    """Calls side by side within a span, each with calls within it."""

    @st.composite
    def make(pick: st.DrawFn) -> list[Call]:
        edges = sorted(pick(st.lists(st.integers(start, end), max_size=6, unique=True)))
        made: list[Call] = []
        for first, last in zip(edges[::2], edges[1::2], strict=False):
            inner = pick(calls_within(first, last, depth - 1)) if depth else []
            made.append(
                (pick(st.sampled_from(["a", "b", "ProfilerStep#1", "ProfilerStep#2"])), first, last, inner)
            )
        return made

    return make()


def flattened(calls: list[Call], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], int, int]]:
    """All calls as (path of names, start, end)."""
    found = []
    for name, start, end, inner in calls:
        found.append(((*path, name), start, end))
        found += flattened(inner, (*path, name))
    return found


def boxes(lane: Lane, names: tuple[str, ...]) -> list[tuple[int, int, int, str, int]]:
    """A lane's rectangles as (level, start, end, name, count)."""
    shown = [names[name] if name >= 0 else "" for name in lane.name.tolist()]
    columns = (lane.level.tolist(), lane.start.tolist(), lane.end.tolist(), shown, lane.count.tolist())
    return list(zip(*columns, strict=True))


def merged(
    events: list[tuple[tuple[str, ...], int, int]], resolution: int
) -> list[tuple[int, int, int, str, int]]:
    """Merge neighbours on each level, one after the other."""
    found: list[list[Any]] = []
    last: tuple[int, int, int] | None = None
    for path, start, end in sorted(events, key=lambda each: (len(each[0]), each[1])):
        level = len(path) - 1
        close = (
            last is not None
            and last[0] == level
            and max(end - start, last[2] - last[1], start - last[2]) < resolution
        )
        if close:
            found[-1][2:] = [end, "", found[-1][4] + 1]
        else:
            found.append([level, start, end, path[-1], 1])
        last = level, start, end
    return [(level, start, end, name, count) for level, start, end, name, count in found]


@settings(max_examples=100)
@given(calls=calls_within(0, 60, 3).filter(bool), rectangles=st.integers(1, 20))
def test_the_timeline_is_the_brute_force_one(calls: list[Call], rectangles: int) -> None:
    events = flattened(calls)
    timeline = draw(trace_of(event(path[-1], start, end) for path, start, end in events), rectangles).timeline
    (lane,) = timeline.lanes
    origin = min(start for _, start, _ in events)
    moved = [(path, start - origin, end - origin) for path, start, end in events]
    assert boxes(lane, timeline.names) == merged(moved, timeline.resolution_ns)
    levels = len({len(path) for path, _, _ in events})
    assert len(lane.level) <= max(rectangles, levels)
    if timeline.resolution_ns:
        assert len(merged(moved, timeline.resolution_ns - 1)) > max(rectangles, levels) - 1
    assert (timeline.lanes_left_out, timeline.events_left_out) == (0, 0)


@settings(max_examples=60)
@given(calls=calls_within(0, 3000, 3).filter(bool))
def test_the_flame_graph_is_the_brute_force_one(calls: list[Call]) -> None:
    events = flattened(calls)
    flame = draw(trace_of(event(path[-1], start, end) for path, start, end in events), 1 << 20).flame
    total: Counter[tuple[str, ...]] = Counter()
    count: Counter[tuple[str, ...]] = Counter()
    for path, start, end in events:
        one_step = tuple(re.sub(r"#\d", "*", name) for name in path)
        total[one_step] += end - start
        count[one_step] += 1
    paths: list[tuple[str, ...]] = []
    for parent, name in zip(flame.parent.tolist(), flame.name.tolist(), strict=True):
        paths.append((*paths[parent], flame.names[name]) if parent >= 0 else ())
    assert dict(zip(paths[1:], flame.total_ns.tolist()[1:], strict=True)) == total
    assert dict(zip(paths[1:], flame.calls.tolist()[1:], strict=True)) == count
    assert int(flame.total_ns[0]) == sum(end - start for _, start, end, _ in calls)
    assert flame.left_out == 0


def test_flame_graph_keeps_largest_paths_and_counts_the_rest() -> None:
    events = [event("outer", 0, 1000)]
    events += [event(f"inner{size}", 10 * size, 10 * size + size) for size in range(1, 10)]
    flame = draw(trace_of(events), 8 * 4).flame
    kept = [flame.names[name] for name in flame.name.tolist()]
    assert sorted(kept[2:]) == ["inner7", "inner8", "inner9"]
    assert flame.parent.tolist() == [-1, 0, 1, 1, 1]
    assert flame.left_out == 6


def test_path_of_overlapping_calls_stays_with_its_parent() -> None:
    # Three calls that overlap take longer together than the one around them.
    events = [event("outer", 0, 100), *(event("inner", at, 90 + at) for at in (1, 2, 3))]
    flame = draw(trace_of(events), 8).flame
    assert [flame.names[name] for name in flame.name.tolist()] == ["thread 1"]
    assert flame.left_out == 2


def test_lanes_are_threads_then_spans_then_streams() -> None:
    events = [
        event("aten::mul", 0, 50, thread=8),
        event("aten::add", 0, 90, thread=9),
        event("ProfilerStep#3", 0, 10, cat="user_annotation", thread=7),
        event("gloo:all_reduce", 5, 60, cat="user_annotation", thread=7),
        event("gloo:all_reduce", 40, 80, cat="user_annotation", thread=7),
        event("late", 30, 40, cat="kernel", thread=10),
        event("gemm", 20, 30, cat="kernel", thread=2),
        event("train", 20, 30, cat="gpu_user_annotation", thread=2),
        event("train.py(3): main", 0, 100, cat="python_function", thread=7),
    ]
    picture = draw(trace_of(events), 100)
    lanes = picture.timeline.lanes
    assert [(lane.kind, lane.label, len(lane.level)) for lane in lanes] == [
        ("thread", "main thread 7", 1),
        ("thread", "thread 9", 1),
        ("thread", "thread 8", 1),
        ("spans", "asynchronous", 2),
        ("stream", "device 1, stream 2", 2),
        ("stream", "device 1, stream 10", 1),
    ]
    assert lanes[3].level.tolist() == [0, 1]
    # Python frames are nested with the rest in the flame graph, and spans and kernels are not in it.
    flame = picture.flame
    assert [flame.names[name] for name in flame.name.tolist()] == [
        "main thread 7",
        "thread 9",
        "thread 8",
        "train.py(3): main",
        "aten::add",
        "aten::mul",
        "ProfilerStep*",
    ]


def test_what_is_left_out_of_a_crowded_timeline_is_counted() -> None:
    events = [event("op", 0, 10 + thread, thread=thread) for thread in range(60)]
    events += [event("deep", level, 200 - level, thread=100) for level in range(20)]
    timeline = draw(trace_of(events), 1000).timeline
    assert len(timeline.lanes) == 48
    assert timeline.lanes[0].label == "thread 100"
    assert timeline.lanes_left_out == 13
    assert timeline.events_left_out == 13 + 4


def page_of(*names: str, rank: int | None = None, picture: bool = True) -> str:
    trace = trace_of(event(name, 1000 * at, 1000 * at + 900) for at, name in enumerate(names))
    summary = analysis.summarise(trace, rectangles=100 if picture else 0)
    entry = analysis.to_dict(summary, rank)
    return analysis.render_html(
        {"schema": analysis.SCHEMA, "ranks": [entry], "failed": []}, [summary.picture]
    )


def block(page: str) -> Any:
    """Return the document in the page, cut out as a browser would."""
    text = page.split('<script type="application/json" id="document">')[1].split("</script>")[0]
    return json.loads(text)


def test_the_document_is_in_the_page_and_names_cannot_leave_it() -> None:
    page = page_of(HOSTILE, "lone \ud800 half")
    assert {row["name"] for row in block(page)["ranks"][0]["operators"]} >= {HOSTILE}
    assert page.count("<script") == page.count("</script") == 2
    assert "<img" not in page
    assert "<!--" not in page
    page.encode()


def test_policy_allows_only_the_pages_style_and_script() -> None:
    page = page_of("aten::mul")
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules == {
        "default-src": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "style-src": f"'sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}'",
        "script-src": f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'",
    }
    # The one address is the name of a namespace, which is never fetched.
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}


def test_pictures_come_as_distances_that_add_up() -> None:
    trace = analysis.load(SMALL)
    summary = analysis.summarise(trace, rectangles=1000)
    shown = {"schema": analysis.SCHEMA, "ranks": [analysis.to_dict(summary, None)], "failed": []}
    picture = block(analysis.render_html(shown, [summary.picture]))["ranks"][0]["picture"]
    for lane, drawn in zip(some(summary.picture).timeline.lanes, picture["lanes"], strict=True):
        assert np.cumsum(drawn["start"]).tolist() == lane.start.tolist()
        assert len(drawn["length"]) == len(drawn["name"]) == len(drawn["count"]) == len(drawn["level"])
    assert block(page_of("x", picture=False))["ranks"][0]["picture"] is None


def test_long_tables_are_cut_to_the_largest_rows() -> None:
    trace = trace_of(event(f"op{size}", 100_000 * size, 100_000 * size + size) for size in range(300))
    summary = analysis.summarise(trace, rectangles=100)
    entry = analysis.to_dict(summary, None, "calls")
    shown = {"schema": analysis.SCHEMA, "ranks": [entry] * 100, "failed": []}
    first, *_ = block(analysis.render_html(shown, [summary.picture] * 100))["ranks"]
    assert [row["name"] for row in first["operators"]] == [f"op{size}" for size in range(299, 179, -1)]
    assert first["n_operators"] == 300


def test_a_page_of_many_ranks_shares_its_rectangles() -> None:
    alone, eight, thousand = map(analysis.rectangles_for, (1, 8, 1000))
    assert alone == 8 * eight
    assert 0 < thousand < eight


def test_the_command_writes_a_page_of_the_ranks_it_could_read(
    analyze: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.json").write_bytes(SMALL.read_bytes())
    (tmp_path / "rank2.json").write_text("")
    file = tmp_path / "page.html"
    code, out, err = analyze(tmp_path, "--html", file)
    assert (code, out) == (5, "")
    assert f"torchperfd: wrote {file} (" in err
    page = file.read_text(encoding="utf-8")
    shown = block(page)
    assert [entry["rank"] for entry in shown["ranks"]] == [0, 1]
    assert [entry["rank"] for entry in shown["failed"]] == [2]
    assert all(entry["picture"]["lanes"] for entry in shown["ranks"])
    assert f"<title>{tmp_path.name}, 2 ranks · torchperfd</title>" in page


def test_page_and_json_can_be_had_at_once(
    analyze: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    code, out, _ = analyze(SMALL, "--html", file, "--json")
    assert code == 0
    entry = json.loads(out)["ranks"][0]
    assert "picture" not in entry
    shown = block(file.read_text())["ranks"][0]
    assert {key: shown[key] for key in ("rank", "trace", "breakdown", "steps")} == {
        key: entry[key] for key in ("rank", "trace", "breakdown", "steps")
    }


def test_a_page_that_cannot_be_written_is_one_line(
    analyze: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    file = tmp_path / "none" / "page.html"
    code, out, err = analyze(SMALL, "--html", file)
    assert (code, out) == (1, "")
    assert (
        err.splitlines()[-1]
        == f"torchperfd: cannot write {file}: No such file or directory; name another file"
    )


def test_the_maker_of_traces_writes_what_the_command_reads(
    analyze: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    trace = tmp_path / 'a "quoted" <name>.json'
    trace.write_text(document([event(HOSTILE, 0, 100)]))
    file = tmp_path / "page.html"
    code, _, _ = analyze(trace, "--html", file)
    assert code == 0
    assert "<title>a &quot;quoted&quot; &lt;name&gt;.json · torchperfd</title>" in file.read_text()


def frame(name: str, start: int, end: int, thread: int) -> str:
    return event(name, start, end, cat="python_function", thread=thread)


def test_flame_graph_has_neither_own_threads_nor_the_runner() -> None:
    every_thread = ["threading.py(1002): _bootstrap", "threading.py(1045): _bootstrap_inner"]
    stacks = {
        1: [
            "<frozen runpy>(198): _run_module_as_main",
            "<frozen runpy>(88): _run_code",
            "torchperfd/model/own_commands.py(56): <module>",
            "torchperfd/__main__.py(20): main",
            "/usr/lib/python3/site-packages/torchperfd/launch/runner.py(141): _run",
            "torchperfd/launch/script.py(54): execute",
            "torchperfd/launch.py(141): _run",  # where it was before it had a package
            "train.py(13): <module>",
            "train.py(10): main",
            "<frozen runpy>(198): run_path",
        ],
        2: [*every_thread, "torchperfd/flusher.py(244): _run", "train.py(1): never"],
        3: [
            *(*every_thread, "threading.py(982): run", "grpc/_channel.py(1725): channel_spin"),
            *("threading.py(331): wait", "<built-in method acquire of _thread.lock object at 0x7f>"),
        ],
        4: [*every_thread, "loader.py(9): prefetch", "torchperfd/hooks/loader.py(58): ahead"],
        5: ["/home/me/torchperfd_demo/train.py(3): work"],
    }
    events = [
        frame(name, 1000 * depth, 1_000_000 - 1000 * depth, thread)
        for thread, names in stacks.items()
        for depth, name in enumerate(names)
    ]
    flame = draw(trace_of(events), 1 << 20).flame
    names = [flame.names[name] for name in flame.name.tolist()]
    assert sorted(name for name in names if name.startswith("thread ")) == [
        "thread 1",
        "thread 4",
        "thread 5",
    ]
    assert {"train.py(13): <module>", "train.py(10): main", "<frozen runpy>(198): run_path"} <= set(names)
    assert {"loader.py(9): prefetch", "torchperfd/hooks/loader.py(58): ahead"} <= set(names)
    assert not {name for name in names if "launch" in name or "__main__" in name or "grpc" in name}
    assert "torchperfd/flusher.py(244): _run" not in names
    roots = {flame.names[name] for name, parent in zip(flame.name, flame.parent, strict=True) if parent == 0}
    assert roots == {"train.py(13): <module>"}
