"""What keys do in ``top``: order, filter, selection and pages, and what the screen shows of them."""

import io
import os
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from tests.support.golden import check_golden

from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_cli.commands import _top_input
from torchperfd_cli.commands._top_charts import Throughput, ages, letters, sparkline, step_seconds
from torchperfd_cli.commands._top_input import (
    DOWN,
    ENTER,
    ESCAPE,
    GONE,
    PAGE_DOWN,
    UP,
    WHEEL_DOWN,
    WHEEL_UP,
    Click,
    Event,
    Events,
    OrderTarget,
    RankTarget,
    parse_events,
    target_at,
)
from torchperfd_cli.commands._top_screen import draw
from torchperfd_cli.commands._top_state import Action, Frame, GpuView, NodeView, Page, TopState
from torchperfd_daemon.views import live

MS = 10**6


def rank_steps(rank: int, run: str = "bert-17", ranks: int = 8) -> control_pb2.RankSteps:
    """Return thirty steps of 100 ms, in which rank 5 has 40 ms more to do and the others wait for it."""
    own = {"data": 10, "forward": 40 if rank == 5 else 20, "backward": 50 if rank == 5 else 30}
    phases = {**own, "collective_wait": 100 - sum(own.values())}
    wobble = np.array([1 + 0.02 * ((step * 7 + rank * 3) % 5 - 2) for step in range(30)])
    columns = {name: (wobble * ms * MS).astype("<i8") for name, ms in phases.items()}
    duration = np.asarray(sum(columns.values()))
    return control_pb2.RankSteps(
        status=control_pb2.RankStatus(
            identity=session_pb2.RankIdentity(
                run=run, rank=rank, world_size=ranks, node=f"node-{rank // 4}", pid=4000 + rank
            ),
            state=session_pb2.RUN_STATE_TRAINING,
            connected=True,
            steps=1000,
            last_step_unix_seconds=1000.0 - 0.25,
        ),
        first_step=970,
        count=30,
        end_ns=np.arange(30, dtype="<i8").tobytes(),
        duration_ns=duration.astype("<i8").tobytes(),
        phases=[session_pb2.PhaseColumn(phase=name, ns=column.tobytes()) for name, column in columns.items()],
    )


def frame(ranks: int = 8, runs: tuple[str, ...] = ("bert-17",), gpus: int = 2) -> Frame:
    steps = [rank_steps(rank, run, ranks) for run in runs for rank in range(ranks)]
    verdicts = {
        run: control_pb2.Verdict(
            cause="slow rank",
            run=run,
            rank=5,
            node="node-1",
            evidence="40 ms of each 100 ms step more than its peers need",
            cost_seconds_per_step=0.04,
            step_seconds=0.1,
            fix="give this rank as much work as its peers",
            next_command=f"torchperfd capture --run {run} --steps 5",
        )
        for run in runs
    }
    each = tuple(GpuView(str(number), "H100", 0.5, 2.0**36, 2.0**37, 300.0, 60.0) for number in range(gpus))
    return Frame(
        "node-0",
        "12:00:00",
        NodeView(0.8, 2.0**33, 2.0**34, each),
        live.runs(steps),
        verdicts,
        step_seconds=step_seconds(steps),
        samples_per_second=dict.fromkeys(runs, (1200.0, 1280.0, 1240.0)),
        ages=ages(steps, 1000.0),
        steps=steps,
    )


def screen(shown: Frame, state: TopState, width: int = 80, height: int = 24) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, height=height).print(draw(shown, height, state))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def pressed(keys: list[str], shown: Frame) -> TopState:
    state = TopState()
    for key in keys:
        assert state.press(key, state.arrange(shown)) is Action.NONE
    return state


def order_of(state: TopState, shown: Frame) -> list[int]:
    [run] = state.arrange(shown).runs
    return [rank.rank for rank in run.ranks]


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        ("q", ["q"]),
        ("\x1b[A\x1b[B", [UP, DOWN]),
        ("\x1bOA", [UP]),
        ("\x1b[6~s", [PAGE_DOWN, "s"]),
        ("\x1b", [ESCAPE]),
        ("\r\n", [ENTER, ENTER]),
        ("\x7fé", [_top_input.BACKSPACE, "é"]),
        ("\x1b[1;5Cq", ["q"]),
        ("\x1b[", []),
        ("\x1b[<0;12;5M\x1b[<0;12;5m", [Click(11, 4)]),
        ("\x1b[<64;1;1M\x1b[<65;200;50Mq", [WHEEL_UP, WHEEL_DOWN, "q"]),
        ("\x1b[<2;1;1M\x1b[<16;1;1M\x1b[<35;1;1M", []),
    ],
)
def test_parse_events_names_what_a_terminal_sends(sent: str, keys: list[Event]) -> None:
    assert parse_events(sent) == keys


def test_events_cut_in_two_are_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the wheel turns faster than the screen is drawn."""
    reader, writer = os.pipe()
    with os.fdopen(reader) as stdin, os.fdopen(writer, "wb", buffering=0) as terminal:
        monkeypatch.setattr("sys.stdin", stdin)
        events, found = Events(is_on=True), []
        for part in (b"\x1b[<65;10;2M\x1b[<6", b"5;10;", b"20Mq\xc3", b"\xa9"):
            terminal.write(part)
            found += events.within(0)
        assert found == [WHEEL_DOWN, WHEEL_DOWN, "q", "é"]
        terminal.close()
        assert events.within(0) == [GONE]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
def test_top_screens_are_the_golden_file(width: int, height: int) -> None:
    cases: dict[str, list[str]] = {
        "at first": [],
        "a rank selected": [DOWN, DOWN],
        "details of the rank that the verdict names": [ENTER],
        "sorted, filtered and paused": ["s", "/", *"node-1", ENTER, "p"],
        "typing a filter": ["/", "x"],
        "help": ["?"],
    }
    parts = []
    for name, keys in cases.items():
        lines = screen(frame(), pressed(keys, frame()), width, height)
        assert len(lines) == height, name
        assert max(map(len, lines)) <= width, name
        parts.append(f"# {name}\n" + "\n".join(lines))
    check_golden(f"top_{width}x{height}.txt", "\n\n".join(parts) + "\n")


@pytest.mark.parametrize("keys", [[], [DOWN] * 40, [PAGE_DOWN] * 30, ["s", DOWN]])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 12), (200, 50)])
def test_top_fills_any_screen_and_shows_the_selected_rank(keys: list[str], width: int, height: int) -> None:
    shown = frame(ranks=64, runs=("a", "b", "c"), gpus=8)
    state = pressed(keys, shown)
    lines = screen(shown, state, width, height)
    assert len(lines) == height
    assert any("»" in line for line in lines) == (state.selected is not None)
    if not keys:
        assert any("✗ slow rank" in line for line in lines)


def test_sort_goes_through_all_orders() -> None:
    shown, orders = frame(), []
    state = TopState()
    for _ in range(4):
        orders.append((state.order_name, order_of(state, shown)[0]))
        state.press("s", shown)
    assert [name for name, _ in orders] == ["rank", "step", "own work", "wait"]
    assert dict(orders)["own work"] == 5
    assert (state.order_name, order_of(state, shown)[-1]) == ("rank", 7)
    state.order = 3
    assert order_of(state, shown)[-1] == 5, "it waits least"


def place_of(text: str, shown: Frame, state: TopState, width: int, height: int) -> Click:
    """Return the place of a text on the screen, which is there once."""
    lines = screen(shown, state, width, height)
    [line] = (number for number, each in enumerate(lines) if text in each)
    return Click(lines[line].index(text), line)


def clicked(place: Click, shown: Frame, state: TopState, width: int, height: int) -> None:
    console = Console(file=io.StringIO(), width=width, height=height)
    state.click(target_at(draw(shown, height, state), place.column, place.line, console))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
def test_click_on_a_rank_opens_it_and_another_goes_back(width: int, height: int) -> None:
    shown, state = frame(), TopState()
    clicked(place_of("▶ 5", shown, state, width, height), shown, state, width, height)
    assert (state.page, state.selected) == (Page.RANK, ("bert-17", 5))
    clicked(Click(3, 3), shown, state, width, height)
    assert (state.page, state.selected) == (Page.RUNS, ("bert-17", 5))
    assert any("»▶ 5" in line for line in screen(shown, state, width, height))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
def test_click_on_the_head_of_a_column_sorts(width: int, height: int) -> None:
    shown = frame()
    for head, name in (("VS PEERS", "own work"), ("WAIT", "wait"), ("STEP ", "step"), ("RANK", "rank")):
        state = TopState(order=0 if name != "rank" else 2)
        clicked(place_of(head, shown, state, width, height), shown, state, width, height)
        assert state.order_name == name
    state = TopState(order=2)
    clicked(place_of("STEPS", shown, state, width, height), shown, state, width, height)
    assert state.order_name == "own work", "nothing sorts by the number of steps"


def test_click_between_rows_and_beyond_the_screen_is_nothing() -> None:
    shown, console = frame(), Console(file=io.StringIO(), width=80, height=24)
    drawn = draw(shown, 24, TopState())
    assert [
        target_at(drawn, column, line, console) for column, line in ((0, 0), (5, 23), (900, 9), (0, 99))
    ] == ([None] * 4)
    [row] = {target_at(drawn, column, 12, console) for column in range(2, 70)}
    assert row == RankTarget("bert-17", 1)
    assert target_at(drawn, 3, 10, console) == OrderTarget("rank")


def test_wheel_selects_one_rank_at_a_time_and_scrolls_a_text() -> None:
    shown = frame()
    state = pressed([WHEEL_DOWN, WHEEL_DOWN, WHEEL_DOWN, WHEEL_UP], shown)
    assert state.selected == ("bert-17", 1)
    state.show_text("\n".join(f"line {number}" for number in range(60)))
    state.press(WHEEL_DOWN, shown)
    assert screen(shown, state)[1] == "line 3"


def test_mouse_key_gives_the_mouse_back_to_the_terminal() -> None:
    state = TopState()
    assert state.press("m", frame()) is Action.MOUSE
    assert not state.has_mouse
    assert screen(frame(), state)[-1] == " mouse off, so that it selects text; m switches it on"
    assert state.press("m", frame()) is Action.MOUSE
    assert state.has_mouse
    assert "m mouse" in screen(frame(), state)[-1]


def test_filter_matches_runs_nodes_states_and_ranks() -> None:
    shown = frame()
    for pattern, ranks in (
        ("BERT", [*range(8)]),
        ("node-1", [4, 5, 6, 7]),
        ("train", [*range(8)]),
        ("7", [*range(8)]),
    ):
        state = pressed(["/", *pattern, ENTER], shown)
        assert order_of(state, shown) == ranks, pattern
    assert pressed(["/", *"nothing", ENTER], shown).arrange(shown).runs == []
    assert pressed(["/", "x", ESCAPE], shown).pattern == ""
    assert "no run matches the filter" in "\n".join(screen(shown, pressed(["/", *"zz", ENTER], shown)))


def test_typed_keys_are_no_commands() -> None:
    state = pressed(["/", "q", "k", "c", "?"], frame())
    assert (state.pattern, state.page) == ("qkc?", Page.RUNS)
    state.press(_top_input.BACKSPACE, frame())
    assert state.pattern == "qkc"


def test_actions_are_about_the_selected_run() -> None:
    shown = frame(runs=("a", "b"))
    state = TopState()
    assert (state.press("c", shown), state.run(shown)) == (Action.CAPTURE, "a")
    for _ in range(9):
        state.press(DOWN, shown)
    assert (state.press("k", shown), state.run(shown)) == (Action.STACKS, "b")
    assert [TopState().press(key, shown) for key in ("q", "Q", GONE)] == [Action.QUIT] * 3
    nothing = replace(shown, runs=[])
    assert [TopState().press(key, nothing) for key in ("c", "k", ENTER, DOWN)] == [Action.NONE] * 4


def test_escape_goes_back_step_by_step() -> None:
    shown = frame()
    state = pressed(["/", *"bert", ENTER, DOWN, ENTER], shown)
    assert state.page is Page.RANK
    state.press(ESCAPE, shown)
    assert (state.page, state.selected) == (Page.RUNS, ("bert-17", 0))
    state.press(ESCAPE, shown)
    assert (state.selected, state.pattern) == (None, "bert")
    state.press(ESCAPE, shown)
    assert state.pattern == ""


def test_text_page_scrolls_within_the_text() -> None:
    shown, state = frame(), TopState()
    state.show_text("\n".join(f"line {number}" for number in range(60)))
    assert screen(shown, state)[1] == "line 0"
    state.press(PAGE_DOWN, shown)
    assert screen(shown, state)[1] == "line 10"
    for _ in range(20):
        state.press(PAGE_DOWN, shown)
    assert screen(shown, state)[1] == "line 59"
    state.press(UP, shown)
    assert screen(shown, state)[1] == "line 58"


def test_rank_that_has_gone_is_said_to_be_gone() -> None:
    state = pressed([DOWN, ENTER], frame())
    assert "is not there any more" in "\n".join(screen(frame(runs=("other",)), state))


def test_message_shows_until_the_next_key() -> None:
    state = TopState(message="capturing 5 steps")
    assert screen(frame(), state)[-1] == " capturing 5 steps"
    state.press("x", frame())
    assert "quit" in screen(frame(), state)[-1]


def test_letters_are_never_alike() -> None:
    names = ["data", "backward", "batch_prep", "b", "bb", "other", "collective_wait", "write", "1", "é"]
    found = letters(names)
    assert len(set(found.values())) == len(names)
    assert (found["backward"], found["batch_prep"], found["other"]) == ("b", "a", ".")


def test_sparkline_is_drawn_from_zero() -> None:
    assert sparkline([1, 1, 1], 8) == "███"
    assert sparkline([0, 4, 8], 8) == "▁▅█"
    assert sparkline([0, 0], 8) == "▁▁"
    assert sparkline([], 8) == sparkline([1], 0) == ""
    assert len(sparkline([1.0] * 500, 20)) == 20


class FakeDaemon:
    def __init__(self) -> None:
        self.asked = 0

    def GetRun(self, request: control_pb2.GetRunRequest, timeout: float) -> control_pb2.GetRunResponse:  # noqa: N802
        self.asked += 1
        kinds = [session_pb2.KindAccount(kind=session_pb2.STEP_KIND_TRAIN, steps=10, samples=160)]
        account = control_pb2.RankAccount(account=session_pb2.Account(kinds=kinds))
        return control_pb2.GetRunResponse(run=request.run, ranks=[account, account])


def test_throughput_is_samples_of_all_ranks_per_step() -> None:
    daemon, throughput = FakeDaemon(), Throughput()
    runs = frame().runs
    for now in (100.0, 100.5, 101.0, 105.1):
        throughput.update(daemon, runs, now)
    assert daemon.asked == 2, "not at every frame"
    rates = throughput.rates()["bert-17"]
    assert rates == pytest.approx([32 / runs[0].step_seconds] * 4)
