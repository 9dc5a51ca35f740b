"""``ranks``, ``steps``, ``diagnose``, ``whatif`` and ``top`` against a daemon that has ranks in its store."""

import io
import json
from array import array
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tests.support.accounts import uneven_account, with_account
from tests.support.commands import Run
from tests.support.golden import check_golden
from tests.support.served import Served
from tests.unit.daemon.live_runs import CASES, NOW, RANKS, STEPS, train

from torchperfd.document.terminal import render
from torchperfd.model.source_lines import InputStages, SlowLine
from torchperfd.model.verdict_document import verdict_to_document
from torchperfd.v1 import control_pb2
from torchperfd_cli.commands import _top_state as _node_view
from torchperfd_cli.commands import diagnose
from torchperfd_cli.commands._output import NO_RUNS
from torchperfd_cli.commands._top_screen import Drawing
from torchperfd_cli.commands._top_state import Frame
from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.service import node_survey
from torchperfd_daemon.store.model import KindTotal, RankIdentity, StepColumns, Totals
from torchperfd_daemon.store.store import Store
from torchperfd_daemon.views import live as _view
from torchperfd_daemon.views.model import behind_text


@pytest.fixture
def command(command: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command two seconds after the daemon's newest step."""
    monkeypatch.setattr("torchperfd_cli.commands.steps.time", SimpleNamespace(time=lambda: NOW + 2))
    return command


def steps_of(store: Store) -> list[control_pb2.RankSteps]:
    return list(node_survey.newest_steps(store, control_pb2.GetStepsRequest()).ranks)


@pytest.mark.parametrize(
    ("name", "arguments"), [("ranks", ()), ("steps", ("--rank", "2", "--last", "3")), ("whatif", ())]
)
def test_the_tables_are_the_golden_file(
    served: Served, command: Run, name: str, arguments: tuple[str, ...]
) -> None:
    reported = []
    for case in CASES:
        for record in list(served.store.ranks()):
            served.store.forget(record)
        train(served.store, case)
        code, out, err = command(name, *arguments)
        assert (code, err) == (0, "")
        reported.append(f"# {case}\n{out}")
    check_golden(f"{name}.txt", "\n".join(reported))


VERDICTS = {
    "healthy": control_pb2.Verdict(
        cause="none", run="bert-17", rank=-1, evidence="nothing stands out",
        summary="none · nothing stands out",
        next_command="torchperfd capture --run bert-17 --steps 5",
    ),
    "one straggler": control_pb2.Verdict(
        cause="slow rank", run="bert-17", node="node-b", rank=2, phase="forward",
        evidence="20 ms of each 64 ms step more than its peers need", cost_seconds_per_step=0.02,
        step_seconds=0.064,
        summary="slow rank · rank 2 on node-b · 20 ms of each 64 ms step more than its peers need",
        next_command="torchperfd capture --run bert-17 --steps 5",
    ),
    "input-bound": control_pb2.Verdict(
        cause="input-bound", run="bert-17", rank=-1, phase="data", evidence="61 ms of each 104 ms step",
        cost_seconds_per_step=0.061, step_seconds=0.104, summary="input-bound · 61 ms of each 104 ms step",
        next_command="torchperfd capture --run bert-17 --steps 5",
    ),
}  # fmt: skip


def readings() -> list[control_pb2.Reading]:
    def family(name: str, labels: tuple[str, ...], *samples: tuple[float, tuple[str, ...]]) -> Family:
        made = Family(name, "", "gauge", labels)
        for value, names in samples:
            made.add(value, *names)
        return made

    gpu = ("gpu", "gpu_uuid")
    both = ("0", "GPU-a"), ("10", "GPU-b")
    families = [
        family("node_cpu_utilization_ratio", (), (0.25, ())),
        family("node_memory_available_bytes", (), (2**34, ())),
        family("node_memory_total_bytes", (), (2**36, ())),
        family("gpu_info", (*gpu, "model"), *((1, (*each, "H100")) for each in both)),
        family("gpu_utilization_ratio", gpu, (0.5, both[1]), (1.0, both[0])),
        family("gpu_memory_used_bytes", gpu, (75 * 2**30, both[0])),
        family("gpu_memory_total_bytes", gpu, (80 * 2**30, both[0])),
        family(
            "gpu_temperature_celsius", (*gpu, "sensor"), (66, (*both[0], "gpu")), (80, (*both[0], "memory"))
        ),
        family("process_cpu_ratio", ("run",), (9.0, ("bert-17",))),
    ]
    asked = control_pb2.GetReadingsRequest(names=_node_view.READINGS)
    return list(node_survey.readings(families, asked).readings)


def frame(case: str) -> Frame:
    store = Store()
    train(store, case)
    return Frame(
        "node-a",
        "12:00:00",
        _node_view.node(readings()),
        _view.runs(steps_of(store)),
        {"bert-17": VERDICTS[case]},
    )


def drawn(shown: Frame, height: int | None = None, width: int = 100, **how: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=width, **how).print(Drawing(shown, height))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def test_the_frames_of_top_are_the_golden_file() -> None:
    check_golden("top.txt", "\n\n".join(f"# {case}\n{drawn(frame(case))}" for case in CASES) + "\n")


def test_the_verdicts_are_the_golden_file() -> None:
    check_golden(
        "diagnose.txt",
        "\n\n".join(render(diagnose.verdict_document(each)) for each in VERDICTS.values()) + "\n",
    )


def test_bars_are_colours_on_a_terminal_and_letters_without() -> None:
    shown = frame("healthy")
    coloured = drawn(shown, force_terminal=True, color_system="standard")
    plain = drawn(shown, force_terminal=True, color_system="standard", no_color=True)
    assert "\x1b[30;45mb    " in coloured
    assert "\x1b[30;44mf" in coloured
    assert "\x1b[30;45m" not in plain
    assert "\x1b[30;44m" not in plain
    assert "fffff" in plain


def test_first_cause_and_its_rank_are_red() -> None:
    coloured = drawn(frame("one straggler"), force_terminal=True, color_system="standard")
    assert "\x1b[1;31mslow rank" in coloured
    assert "\x1b[1;31m▶ 2" in coloured


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_frame_keeps_to_the_width(width: int) -> None:
    lines = drawn(frame("one straggler"), width=width).splitlines()
    assert max(map(len, lines)) == width, "and fills it"
    assert "▶ 2" in "\n".join(lines)


@pytest.mark.parametrize("height", [10, 14, 15, 16])
def test_ranks_give_way_on_a_low_terminal_the_slow_one_last(height: int) -> None:
    text = drawn(frame("one straggler"), height)
    assert "▶ 2" in text
    if height > 12:
        assert len(text.splitlines()) <= height
    assert ("more ranks" in text) == (height < 15)


def test_what_is_in_trouble_is_said() -> None:
    shown = frame("healthy")
    text = drawn(Frame("node-a", "12:00:00", _node_view.node([]), [], {}, "no daemon answers"))
    assert "! no daemon answers" in text
    assert "no training runs" in text
    assert "nothing is measured of this node yet" in text
    assert "no daemon answers" not in drawn(shown)


def test_top_prints_one_frame_off_a_terminal(served: Served, command: Run) -> None:
    train(served.store, "one straggler")
    code, out, err = command("top")
    assert (code, err) == (0, "")
    assert "bert-17 · 4 of 4 ranks" in out
    assert "▶ 2" in out
    assert "\x1b" not in out
    code, _, err = command("top", "--run", "gone")
    assert (code, err) == (3, "torchperfd: no run gone on this node; `torchperfd ps` lists those there are\n")


def test_ranks_as_json(served: Served, command: Run) -> None:
    train(served.store, "one straggler")
    code, out, err = command("ranks", "--json")
    document = json.loads(out)
    assert (code, err, document["schema"]) == (0, "", "torchperfd.ranks/1")
    [run] = document["runs"]
    assert (run["run"], run["job_name"], run["world_size"], run["waits_measured"]) == (
        "bert-17",
        "bert",
        4,
        True,
    )
    assert [rank["rank"] for rank in run["ranks"]] == [0, 1, 2, 3]
    assert [rank["slow"] is not None for rank in run["ranks"]] == [False, False, True, False]
    slow = run["ranks"][2]
    assert slow["slow"]["phase"] == "forward"
    assert slow["slow"]["phase_excess_seconds"] == pytest.approx(0.02, rel=0.05)
    assert slow["behind_seconds"] == pytest.approx(0.02, rel=0.05)
    assert slow["behind_ratio"] == pytest.approx(slow["behind_seconds"] / 0.042, rel=0.05)
    for rank in run["ranks"]:
        assert (rank["state"], rank["steps"], rank["window_steps"]) == ("training", 1000, STEPS)
        assert sum(rank["phase_seconds"].values()) == pytest.approx(rank["step_seconds"])
        assert rank["own_seconds"] + rank["phase_seconds"]["collective_wait"] == pytest.approx(
            rank["step_seconds"]
        )


def test_ranks_have_the_account_of_their_step(
    served: Served, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(served.store, "healthy")
    known = with_account(control_pb2.Verdict(cause="none", run="bert-17"), uneven_account())
    answer = control_pb2.DiagnoseResponse(verdicts=[known])
    monkeypatch.setattr("torchperfd_cli.commands._scope.Scope.verdicts", lambda *_: answer)
    assert "of each 85.6 ms: 34 computing, 42 waiting for ranks" in command("ranks")[1]
    [run] = json.loads(command("ranks", "--json")[1])["runs"]
    assert run["account"] == uneven_account().to_document()


def test_diagnose_as_json_has_note_account_and_card() -> None:
    verdict = with_account(control_pb2.Verdict(cause="unknown", run="r", note="busy"), uneven_account())
    document = verdict_to_document(verdict)
    assert (document["note"], document["card"]["note"]) == ("busy", "busy")
    assert document["account"] == uneven_account().to_document()
    assert document["card"]["account"] == [uneven_account().words]
    assert document["card"]["heading"].startswith("no cause yet: 48% is waiting")


def test_without_measured_waits_no_rank_is_called_slow(served: Served, command: Run) -> None:
    train(served.store, "one straggler", measure_waits=False)
    code, out, _ = command("ranks")
    assert code == 0
    assert out.splitlines()[-1] == (
        "no rank waits for another in a collective that is seen, so none can be called slow"
    )
    assert "◀" not in out


def test_a_rank_that_has_gone_is_no_peer(served: Served, command: Run) -> None:
    train(served.store, "one straggler")
    served.store.leave(list(served.store.ranks())[2])
    [run] = json.loads(command("ranks", "--json")[1])["runs"]
    assert [rank["state"] for rank in run["ranks"]] == ["training", "training", "gone", "training"]
    assert run["ranks"][2]["behind_seconds"] is None
    assert all(abs(rank["behind_ratio"]) < 0.02 for rank in run["ranks"] if rank["rank"] != 2)


def test_steps_as_json(served: Served, command: Run) -> None:
    train(served.store, "healthy")
    code, out, _ = command("steps", "--rank", "3", "--last", "10", "--json")
    document = json.loads(out)
    assert (code, document["schema"], document["rank"], document["node"]) == (
        0,
        "torchperfd.steps/1",
        3,
        "node-b",
    )
    assert document["first_step"] == 990
    assert document["end_unix_seconds"][-1] == NOW
    for step, whole in enumerate(document["step_seconds"]):
        assert sum(column[step] for column in document["phase_seconds"].values()) == pytest.approx(whole)
    assert len(document["step_seconds"]) == len(document["end_unix_seconds"]) == 10


def test_steps_need_one_rank_that_is_there(served: Served, command: Run) -> None:
    train(served.store, "healthy")
    assert command("steps", "--rank", "9") == (
        3,
        "",
        "torchperfd: no rank 9 on this node; `torchperfd ps` lists those there are\n",
    )
    train(served.store, "healthy", run="gpt-2")
    code, _, err = command("steps", "--rank", "1")
    assert (code, err) == (3, "torchperfd: 2 runs have a rank 1: bert-17, gpt-2; choose one with --run\n")
    assert command("steps", "--rank", "1", "--run", "gpt-2")[0] == 0
    served.store.join(RankIdentity("new", 7))
    assert command("steps", "--rank", "7") == (0, "", "rank 7 has made no training step yet\n")


def test_diagnose_prints_the_daemons_verdict(served: Served, command: Run) -> None:
    train(served.store, "input-bound")
    code, out, err = command("diagnose", "--json")
    document = json.loads(out)
    assert (code, err, document["schema"]) == (0, "", "torchperfd.diagnosis/1")
    [verdict] = document["verdicts"]
    assert (verdict["run"], verdict["cause"], verdict["phase"]) == ("bert-17", "input-bound", "data")
    assert verdict["cost_seconds_per_step"] == pytest.approx(0.061, rel=0.1)
    text = command("diagnose", "--run", "bert-17")[1]
    for words in (verdict["cause"], verdict["evidence"], verdict["next_command"]):
        assert words in text


def test_diagnose_shows_the_slow_line(served: Served, command: Run) -> None:
    train(served.store, "input-bound")
    line = SlowLine("fetch", 0.75, "/job/data.py", 37, "__getitem__", "decode", 0.5, 20, True)
    other = Verdict(
        Cause.SLOW_RANK, "bert-17", "a", 1, "data", "waits", 0.01, "", step_seconds=0.1, line=line
    )
    stages = InputStages(2, 30, 0.05, 0.02, idle=0.1)
    served.verdicts["bert-17"] = replace(other, cause=Cause.INPUT_BOUND, others=(other,), stages=stages)
    [verdict] = json.loads(command("diagnose", "--json")[1])["verdicts"]
    assert verdict["line"] == asdict(line) == verdict["others"][0]["line"]
    assert verdict["input_stages"] == asdict(stages)
    assert verdict["others"][0]["input_stages"] is None
    text = " ".join(command("diagnose")[1].split())
    assert text.count(f" why waits line {line.words} ") == 2


def test_whatif_as_json(served: Served, command: Run) -> None:
    train(served.store, "one straggler")
    code, out, err = command("whatif", "--json")
    document = json.loads(out)
    assert (code, err, document["schema"]) == (0, "", "torchperfd.whatif/1")
    [run] = document["runs"]
    assert (run["ranks"], run["world_size"], run["steps"], run["synchronous"]) == (4, 4, STEPS, True)
    assert run["since_step"] is None
    best = run["answers"][0]
    assert (best["removed"], best["rank"], best["phase"]) == ("rank excess", 2, "forward")
    assert best["gain_seconds"] == pytest.approx(0.02, abs=0.05 * run["step_seconds"])
    assert best["speedup"] == pytest.approx(run["step_seconds"] / best["step_seconds"])


def test_whatif_of_a_slower_run_uses_the_steps_since_onset(served: Served, command: Run) -> None:
    train(served.store, "one straggler")
    since = steps_of(served.store)[0].first_step + STEPS - 20
    slow = Verdict(Cause.SLOW_RANK, "bert-17", "node-b", 2, "forward", "late", 0.02, "", onset_step=since)
    served.verdicts["bert-17"] = slow
    [run] = json.loads(command("whatif", "--json")[1])["runs"]
    assert (run["steps"], run["since_step"]) == (20, since)
    assert run["answers"][0]["rank"] == 2
    assert f" since step {since}, 20 steps replayed" in command("whatif")[1]


def test_whatif_names_the_causes_it_does_not_model(served: Served, command: Run) -> None:
    train(served.store, "one straggler")
    data = Verdict(Cause.INPUT_BOUND, "bert-17", "", None, "data", "waits", 0.01, "", step_seconds=0.1)
    late = Verdict(Cause.GPU_SHARED, "bert-17", "node-b", 2, "", "late", 0.01, "", step_seconds=0.1)
    starved = replace(data, cause=Cause.CPU_CONTENTION, cost_seconds_per_step=0.043, others=(data, late))
    served.verdicts["bert-17"] = starved
    [run] = json.loads(command("whatif", "--json")[1])["runs"]
    assert run["not_modelled"] == [{"cause": "CPU contention", "seconds_per_step": 0.043}]
    words = (
        "not modelled: CPU contention (43 ms of each 100 ms step); `torchperfd diagnose` has what to change"
    )
    assert words in " ".join(command("whatif")[1].split())
    served.verdicts["bert-17"] = data
    assert "not modelled" not in command("whatif")[1]


def test_first_steps_of_a_run_are_not_its_baseline(served: Served, command: Run) -> None:
    for number, slow in ((0, 80), (1, 130)):
        rank = served.store.join(RankIdentity("bert-17", number, 2))
        own_ms = [980] * 20 + [80] * 40 + [slow] * 30
        step_ms = [1000] * 20 + [100] * 40 + [150] * 30
        forward, duration, wait = (
            array("q", [ms * 10**6 for ms in column])
            for column in (own_ms, step_ms, [a - b for a, b in zip(step_ms, own_ms, strict=True)])
        )
        columns = StepColumns(duration[:], duration, {"forward": forward, "collective_wait": wait})
        served.store.add_steps(rank, columns)
    late = Verdict(Cause.SLOW_RANK, "bert-17", "node-b", 1, "forward", "late", 0.05, "", onset_step=60)
    served.verdicts["bert-17"] = late
    [run] = json.loads(command("whatif", "--json")[1])["runs"]
    reported = {each["removed"]: each["step_seconds"] for each in run["answers"]}
    assert run["step_seconds"] == pytest.approx(0.15)
    assert reported["growth"] == pytest.approx(0.1)
    assert reported["rank excess"] == pytest.approx(0.1)


def test_whatif_says_which_ranks_it_cannot_see(served: Served, command: Run) -> None:
    train(served.store, "one straggler")
    served.store.leave(next(served.store.ranks()))
    assert command("whatif")[1].splitlines()[-1] == (
        "3 of 4 ranks are on this node; a wait for the others counts as exchange"
    )


def test_whatif_needs_steps_that_all_ranks_have_made(served: Served, command: Run) -> None:
    train(served.store, "healthy")
    served.store.join(RankIdentity("bert-17", RANKS, RANKS + 1))
    code, out, err = command("whatif")
    assert (code, out) == (5, "")
    assert "bert-17 have fewer than 12 training steps in common" in err


@pytest.mark.parametrize("name", ["ranks", "diagnose", "whatif"])
def test_no_runs_is_said_on_stderr(command: Run, name: str) -> None:
    assert command(name) == (0, "", f"{NO_RUNS}\n")
    code, out, _ = command(name, "--json")
    assert (code, [*json.loads(out).values()][1]) == (0, [])
    code, _, err = command(name, "--run", "gone")
    assert code == 3
    assert "no run gone on this node" in err


@pytest.mark.parametrize("name", ["ranks", "diagnose"])
def test_watching_goes_on_until_ctrl_c(
    served: Served, command: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    train(served.store, "healthy")
    turns = iter([None, None])

    def sleep(seconds: float) -> None:
        if next(turns, KeyboardInterrupt) is KeyboardInterrupt:
            raise KeyboardInterrupt

    monkeypatch.setattr("torchperfd_cli.commands._output.time", SimpleNamespace(sleep=sleep))
    code, out, err = command(name, "--watch", "--json")
    assert (code, err) == (0, "")
    assert len([json.loads(line) for line in out.splitlines()]) == 3
    turns = iter([None])
    code, out, _ = command(name, "--watch")
    frames = out.rstrip("\n").split("\n\n")
    assert (code, len(frames)) == (0, 2)
    assert frames[0] == frames[1]


@pytest.mark.parametrize("name", ["ranks", "diagnose", "whatif", "top"])
def test_run_prefix_is_enough_for_live_commands(served: Served, command: Run, name: str) -> None:
    train(served.store, "healthy", run="f50ba658-ca32-4ac8-9d27-b5ddb200a20b")
    train(served.store, "healthy", run="bert-17")
    code, out, _ = command(name, "--run", "f50ba")
    assert code == 0
    assert "f50ba658-ca32-4ac8-9d27-b5ddb200a20b" in out
    assert "bert-17" not in out.replace("--run", "")


def test_top_as_json(served: Served, command: Run) -> None:
    train(served.store, "input-bound")
    code, out, err = command("top", "--json")
    assert (code, err) == (0, "")
    reported = json.loads(out)
    assert reported["schema"] == "torchperfd.top/1"
    assert (reported["node"]["name"], reported["node"]["gpus"]) == ("node-a", [])
    [run] = reported["runs"]
    assert (run["run"], len(run["ranks"])) == ("bert-17", 4)
    assert run["verdict"]["cause"] == "input-bound"
    assert run["verdict"]["others"] == []


@pytest.mark.parametrize(
    ("ratio", "text"), [(0.034, "+3.4%"), (-0.5, "-50.0%"), (4.9, "+490.0%"), (40.305, "41 times")]
)
def test_work_behind_peers_is_a_factor_from_six_on(ratio: float, text: str) -> None:
    assert behind_text(ratio) == text


def test_ranks_are_of_the_present_or_of_the_last_steps(served: Served, command: Run) -> None:
    record = served.store.join(RankIdentity("bert-17", 0, 1, node="node-a", pid=7))
    durations = array("q", [10**8] * 80 + [10**9] * 12)
    ends = array("q", [int(NOW * 1e9) - sum(durations[step + 1 :]) for step in range(len(durations))])
    served.store.add_steps(record, StepColumns(ends, durations, {"forward": durations}))
    record.totals = Totals(train=KindTotal(1000, sum(durations)))
    _, present, _ = command("ranks", "--json")
    _, newest, _ = command("ranks", "--last", "80", "--json")
    steps = [json.loads(each)["runs"][0]["step_seconds"] for each in (present, newest)]
    assert steps == pytest.approx([1.0, (12 + 6.8) / 80])
