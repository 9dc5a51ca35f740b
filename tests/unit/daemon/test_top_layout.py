"""How `top` fits a terminal: verdicts first, then the ranks that they name, and nothing false."""

import io
from dataclasses import replace

import pytest
from rich.console import Console
from tests.support.accounts import uneven_account, with_account
from tests.support.golden import check_golden

from torchperfd.model.host_memory import HostMemory
from torchperfd.v1 import control_pb2
from torchperfd_cli.commands._top_screen import Drawing
from torchperfd_cli.commands._top_state import Frame, GpuView, NodeView
from torchperfd_daemon.diagnosis.detect.straggler import Straggler
from torchperfd_daemon.views.model import RankView, RunView

WORDS = "40 ms of each 140 ms step lost to a device clock lowered by power or heat"


def rank(number: int, *, slow: bool = False, state: str = "training") -> RankView:
    late = Straggler(number, "forward", 0.04, 0.04, 0.1, 9.0) if slow else None
    phases = {"data": 0.02, "forward": 0.08, "collective_wait": 0.04}
    return RankView(number, "n", 1, state, 0.0, "", 100, 64, 0.14, phases, 0.0, 0.0, late)


def run(name: str, ranks: int = 8, slow: tuple[int, ...] = ()) -> RunView:
    shown = tuple(rank(number, slow=number in slow) for number in range(ranks))
    return RunView(name, "job", ranks, True, False, False, shown)


def verdict(name: str, culprit: int = -1, cause: str = "GPU throttling") -> control_pb2.Verdict:
    return control_pb2.Verdict(
        cause=cause,
        run=name,
        rank=culprit,
        node="node-1",
        evidence=f"{WORDS} (end)",
        cost_seconds_per_step=0.0 if cause == "none" else 0.04,
        step_seconds=0.14,
        next_command="torchperfd doctor",
    )


def lines(
    runs: list[RunView],
    verdicts: list[control_pb2.Verdict],
    width: int = 80,
    height: int | None = 24,
    gpus: int = 0,
) -> list[str]:
    each = [GpuView(str(number), "H100", 0.5, 2.0**36, 2.0**37, 300.0, 60.0) for number in range(gpus)]
    view = NodeView(0.5, 2.0**33, 2.0**34, tuple(each))
    frame = Frame("node-1", "12:00:00", view, runs, {each.run: each for each in verdicts})
    out = io.StringIO()
    Console(file=out, width=width, height=height or 100).print(Drawing(frame, height))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def unwrapped(text: list[str]) -> str:
    return " ".join(" ".join(text).replace("│", " ").split())


def test_top_rank_of_verdict_is_shown_though_not_slow() -> None:
    shown = lines([run("a")], [verdict("a", 5)], width=100, height=14)
    assert any(line.startswith("│    5  training") for line in shown)
    assert "more ranks, none of them slow" in unwrapped(shown)


def test_top_rank_of_second_cause_is_shown() -> None:
    first = verdict("a", 5)
    first.others.append(verdict("a", 7, "garbage collection"))
    shown = lines([run("a")], [first], width=100, height=16)
    numbers = {line.split()[1] for line in shown if " training " in line}
    assert {"5", "7"} <= numbers
    assert "also: garbage collection · rank 7" in unwrapped(shown)
    assert "29% of the step" in unwrapped(shown)


@pytest.mark.parametrize("height", [12, 14, 18, 24, 40])
def test_top_slow_ranks_are_never_among_the_hidden(height: int) -> None:
    shown = lines([run("a", 8, slow=(1, 6))], [verdict("a", 1)], height=height)
    assert len(shown) <= height
    assert sum("▶" in line for line in shown) == 2


def test_top_has_the_memory_of_the_rank_that_grows() -> None:
    large, growing = (
        HostMemory(held * 2**30, 9 * 2**30, 2**30, growth, 9.0, (2**30, held * 2**30))
        for held, growth in ((8, 0.0), (3, 2.0**21))
    )
    shown = run("a", 3)
    ranks = [
        replace(rank, host_memory=memory)
        for rank, memory in zip(shown.ranks, (large, growing, None), strict=True)
    ]
    drawn = lines([replace(shown, ranks=tuple(ranks))], [], width=140, height=None)
    (line,) = (each for each in drawn if "at first" in each)
    assert (
        "▃█ 3 GiB resident · 9 GiB at the peak · 1 GiB at first, growing by 120 MiB a minute  rank 1" in line
    )
    assert "at the peak" not in unwrapped(lines([shown], [], height=None))


def test_top_three_runs_of_eight_ranks_fit_80x24() -> None:
    names = ("a", "b", "c")
    shown = lines([run(name) for name in names], [verdict(name, 5) for name in names])
    assert len(shown) <= 24
    assert unwrapped(shown).count("(end)") == 3


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 12), (60, 12), (120, 40), (80, 8)])
@pytest.mark.parametrize("gpus", [0, 1, 8, 16])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_top_verdicts_fit_whole_in_any_terminal(count: int, gpus: int, width: int, height: int) -> None:
    runs = [run(f"run-{number}") for number in range(count)]
    shown = lines(runs, [verdict(each.run, 3) for each in runs], width, height, gpus)
    assert len(shown) <= height
    text = unwrapped(shown)
    whole = text.count("(end)")
    hidden = count - whole
    assert whole >= 1
    if hidden:
        assert f"{hidden} more run{'s' if hidden > 1 else ''}, {hidden} of them with a verdict" in text
        assert height == 8 or width == 60


def test_top_ill_runs_come_before_healthy_ones_where_room_lacks() -> None:
    runs = [run(f"run-{number}") for number in range(6)]
    verdicts = [verdict(each.run, -1, "none") for each in runs[:5]] + [verdict("run-5", 2)]
    text = unwrapped(lines(runs, verdicts, height=10))
    assert "✗ GPU throttling · rank 2" in text
    assert "more runs, none of them with a verdict" in text


def test_top_without_height_shows_all() -> None:
    shown = lines([run("a", 64)], [verdict("a", 5)], height=None)
    assert sum(" training " in line for line in shown) == 64


def grown(name: str) -> control_pb2.Verdict:
    """A verdict with an account and a note, beside which memory grows."""
    shown = with_account(verdict(name, 5), uneven_account())
    shown.note = "busy node: everything takes 3.5 times as long; 71% of that wait is for your own 24 threads"
    shown.others.add(
        cause="memory pressure", rank=-1, evidence="memory grows by 8.2 MiB/s and is full in 39 min"
    )
    return shown


def test_top_shows_each_verdict_as_golden_file() -> None:
    starved = verdict("a", -1, "input-bound")
    starved.fix = "DataLoader(..., num_workers=4)"
    starved.line.CopyFrom(
        control_pb2.SlowLine(
            stage="fetch", stage_share=0.9, share=0.8, file="train.py", line=37, function="__getitem__"
        )
    )
    failed = grown("a")
    failed.failure = "rank 1: ValueError: bad"
    unknown = control_pb2.Verdict(cause="unknown", run="a", rank=-1, evidence="no rank is slow")
    hang = control_pb2.Verdict(cause="hang", run="a", rank=1, node="n", stalled_seconds=23, evidence="x")
    screens = {
        "line and fix": lines([run("a", 2)], [starved]),
        "hang": lines([run("a", 2)], [hang]),
        "no cause yet": lines([run("a", 2)], [with_account(unknown, uneven_account())]),
        "failed": lines([run("a", 2)], [failed], height=40),
        "failed, 8 lines": lines([run("a")], [failed], height=8),
    }
    text = "\n".join(lines([run("a")], [grown("a")], height=40)) + "\n"
    text += "".join("\n".join((f"\n# {name}", *each, "")) for name, each in screens.items())
    check_golden("top_account.txt", text)


@pytest.mark.parametrize("height", [8, 12, 24, 40])
def test_top_always_shows_memory_that_grows(height: int) -> None:
    text = unwrapped(lines([run("a")], [grown("a")], height=height))
    assert "also: memory pressure · grows by 8.2 MiB/s, full in 39 min" in text
