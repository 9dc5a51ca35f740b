"""What keys do in ``top``: order, filter, selection and pages, and what the screen shows of them."""

import io
from dataclasses import replace

import pytest
from rich.console import Console
from tests.unit.daemon.top_frames import frame

from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_cli.commands._top_charts import Throughput, letters, sparkline
from torchperfd_cli.commands._top_screen import Drawing
from torchperfd_cli.commands._top_state import (
    BACKSPACE,
    DOWN,
    ENTER,
    ESCAPE,
    PAGE_DOWN,
    UP,
    WHEEL_DOWN,
    WHEEL_UP,
    Action,
    Frame,
    Page,
    TopState,
)


def screen(shown: Frame, state: TopState, width: int = 80, height: int = 24) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, height=height).print(Drawing(shown, height, state))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def pressed(keys: list[str], shown: Frame) -> TopState:
    state = TopState()
    for key in keys:
        assert state.press(key, state.arrange(shown)) is Action.NONE
    return state


def order_of(state: TopState, shown: Frame) -> list[int]:
    [run] = state.arrange(shown).runs
    return [rank.rank for rank in run.ranks]


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


def test_wheel_selects_one_rank_at_a_time_and_scrolls_a_text() -> None:
    shown = frame()
    state = pressed([WHEEL_DOWN, WHEEL_DOWN, WHEEL_DOWN, WHEEL_UP], shown)
    assert state.selected == ("bert-17", 1)
    state.show_text("\n".join(f"line {number}" for number in range(60)))
    state.press(WHEEL_DOWN, shown)
    assert screen(shown, state)[1] == "line 3"


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
    state.press(BACKSPACE, frame())
    assert state.pattern == "qkc"


def test_actions_are_about_the_selected_run() -> None:
    shown = frame(runs=("a", "b"))
    state = TopState()
    assert (state.press("c", shown), state.run(shown)) == (Action.CAPTURE, "a")
    for _ in range(9):
        state.press(DOWN, shown)
    assert (state.press("k", shown), state.run(shown)) == (Action.STACKS, "b")
    assert [TopState().press(key, shown) for key in ("q", "Q")] == [Action.QUIT] * 2
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
