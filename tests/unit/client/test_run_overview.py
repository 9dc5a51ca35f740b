"""The overview of a run: its tables, its verdict and the memory of each rank."""

import json
from typing import Any

import pytest
from tests.support.accounts import uneven_account
from tests.support.run_documents import run_file

from torchperfd.document.terminal import render
from torchperfd.document.text import text_width
from torchperfd.model.formatting import duration
from torchperfd.model.host_memory import HostMemory
from torchperfd.model.source_lines import SyncWait
from torchperfd.model.totals import CudaMemory, GcTotals, PhaseTotals
from torchperfd.report.overview import overview
from torchperfd.report.rank import RankReport, run_document
from torchperfd.report.record import RunFileError
from torchperfd.steps.phases import BACKWARD, COLLECTIVE_WAIT, DATA, FORWARD, PhaseNames
from torchperfd.steps.totals import KindTotals, Totals
from torchperfd_cli.commands._run_overview import MAX_TABLES, RunOverview, read_overview

MS = 10**6


def read(document: dict[str, Any]) -> RunOverview:
    return read_overview(json.dumps(document).encode(), "run.json")


def kind(steps: int, **ms: int) -> KindTotals:
    """Steps whose phases take so many milliseconds each, alternately a little more and less."""
    totals = KindTotals(steps=steps, samples=32 * steps, tokens=64 * steps)
    for name, each in ms.items():
        slot = {"data": DATA, "forward": FORWARD, "backward": BACKWARD, "wait": COLLECTIVE_WAIT}[name]
        squares = steps * ((each * MS) ** 2 + (0.1 * each * MS) ** 2)
        totals.phases[slot] = PhaseTotals(steps, steps * each * MS, squares, steps * MS, steps)
        totals.ns += steps * each * MS
    totals.squares = 1.01 * totals.ns**2 / steps
    return totals


def report(rank: int = 0) -> RankReport:
    """A rank with every figure that a table has."""
    totals = Totals(
        train=kind(101, data=20, forward=30, backward=50, wait=5 * rank),
        validate=kind(10, data=30, forward=20),
        warmup=kind(1, data=20, forward=30, backward=50, wait=5 * rank),
        began_ns=1_700_000_000 * 10**9,
        ended_ns=1_700_000_012 * 10**9,
        checkpoint=PhaseTotals(2, 600 * MS, 2 * (300.0 * MS) ** 2),
        background_saves=PhaseTotals(1, 900 * MS, (900.0 * MS) ** 2),
        gc=(GcTotals(5, 500 * MS), GcTotals(), GcTotals(1, 100 * MS)),
        epoch=PhaseTotals(1, 11_000 * MS, (11_000.0 * MS) ** 2),
        cuda=CudaMemory(10**9, 2 * 10**9, 3 * 10**9),
        host_memory=HostMemory(441 << 20, 1398 << 20),
        flops_per_step=3e13,
        peak_flops=9e14,
        overhead=0.002,
        sync_waits=(SyncWait("train.py", 57, "item", 400 * MS),),
    )
    return RankReport(rank, totals, PhaseNames())


def document_of(*ranks: RankReport, verdict: dict[str, Any] | None = None) -> dict[str, Any]:
    facts = run_file("ddp", steps=2, seconds={"data": 1})
    return facts | run_document("ddp", list(ranks), verdict) | {"world_size": len(ranks)}


VERDICT = {
    "cause": "slow rank",
    "summary": "rank 1 is slow",
    "evidence": "rank 1 does 20 ms more work in each step",
    "line": {
        "stage": "forward",
        "stage_share": 0.9,
        "file": "m.py",
        "line": 3,
        "function": "f",
        "share": 0.8,
    },
    "rank": 1,
    "node": "node-1",
    "cost_seconds_per_step": 0.02,
    "step_seconds": 0.1,
    "window_seconds": 30.0,
    "fix": "see what rank 1 does",
    "saves_seconds": 0.02,
    "others": [
        {"cause": "input-bound", "summary": "", "evidence": "20 ms of data", "cost_seconds_per_step": 0.02},
        {"cause": "garbage collection", "summary": "", "evidence": "", "cost_seconds_per_step": 0.001},
    ],
}


def test_overview_has_the_tables_that_the_run_had() -> None:
    ranks = [report(0), report(1)]
    overview = read(document_of(*ranks))
    assert [each.to_text() for each in overview.reports] == [each.to_text() for each in ranks]
    tables = overview.to_page()["tables"]
    assert [table["rank"] for table in tables] == [0, 1]
    shown = {row["cells"][1] for row in tables[0]["rows"]}
    assert {"fit", "validate", "first step", "epoch", "backward"} <= shown
    assert any("checkpoints between steps: 2" in fact for fact in tables[0]["facts"])


def test_overview_card_is_that_of_the_runs_end() -> None:
    card = read(document_of(report(0), report(1), verdict=VERDICT)).card
    first, second = card.causes
    assert (first.where, first.cost, second.cause) == ("rank 1 on node-1", "20% of the step", "input-bound")
    assert first.why == "rank 1 does 20 ms more work in each step (last 30 s)"
    assert first.line.startswith("m.py:3 in f: 80% of loading (forward 90%)")
    assert first.gain == "100 ms → about 80 ms a step, 1.2 times as fast"


def test_overview_text_and_page_show_the_same() -> None:
    overview = read(document_of(report(0), report(1), verdict=VERDICT))
    text, page = render(overview.document()), overview.to_page()
    for words in (page["headline"], page["card"]["causes"][0]["parts"][0][1], page["remarks"][0]):
        assert " ".join(words.split()) in " ".join(text.split())
    assert [row["own_seconds"] for row in page["ranks"]] == pytest.approx([0.1, 0.1])
    assert [row["is_named"] for row in page["ranks"]] == [False, True]
    assert (page["rank"], page["tables"][0]["rank"]) == (1, 1)
    assert dict(page["environment"])["torch"] == "2.13.0"
    assert ("when", duration(60)) == ("when", dict(page["facts"])["when"].split("for ")[1])


@pytest.mark.parametrize(
    ("verdict", "healthy", "remark"),
    [
        (None, False, "no daemon has answered, so nothing compared the steps"),
        ({"cause": "none", "summary": "x", "evidence": "steps are even"}, True, "steps are even"),
        ({"cause": "unknown", "summary": "too few steps", "evidence": ""}, False, "too few steps"),
    ],
)
def test_overview_without_a_cause_says_why(
    verdict: dict[str, Any] | None, healthy: bool, remark: str
) -> None:
    card = read(document_of(report(), verdict=verdict)).card
    assert (card.causes, card.is_healthy, card.remark) == ((), healthy, remark)


def test_overview_of_an_older_report_is_shown() -> None:
    document = run_file("old", steps=20, seconds={"forward": 0.03, "data": 0.01})
    older = {name: document[name] for name in ("schema", "run", "ranks", "verdict")}
    overview = read(older)
    assert overview.card.causes[0].cause == "input_bound"
    assert overview.card.causes[0].why == "the input takes 25 % of the step"
    assert "40 ms a step" in render(overview.document())


def test_overview_of_a_run_without_steps_is_shown() -> None:
    overview = read(document_of(RankReport(0, Totals(), PhaseNames())))
    assert "no training step was seen" in render(overview.document())
    page = overview.to_page()
    assert (page["phases"], page["ranks"], page["headline"]) == ([], [], "")


def test_overview_page_of_many_ranks_has_some_tables() -> None:
    ranks = [report(rank) for rank in range(MAX_TABLES + 6)]
    page = read(document_of(*ranks, verdict=VERDICT)).to_page()
    assert len(page["ranks"]) == len(ranks)
    assert len(page["tables"]) + page["tables_left_out"] == len(ranks)
    assert 1 in {table["rank"] for table in page["tables"]}


def test_overview_first_step_beyond_all_steps_is_damage() -> None:
    document = document_of(report())
    document["ranks"][0]["warmup"]["steps"] = 500
    with pytest.raises(RunFileError, match="first step is no part of its steps"):
        read(document)


def test_overview_shows_the_account_that_was_kept() -> None:
    verdict = VERDICT | {"note": "busy node", "account": uneven_account().to_document()}
    overview = read(document_of(report(), report(1), verdict=verdict))
    assert overview.record.account == overview.card.account == uneven_account()
    assert overview.card.note == "busy node"
    text = render(overview.document())
    assert "where a step goes" in text
    assert "  wait for data          3.10  beside the step, costs nothing" in text
    page = overview.to_page()
    assert page["card"]["account"][0] == uneven_account().words
    assert [row["kind"] for row in page["account"]][:2] == ["uneven_work", "computing"]
    assert [row["is_hidden"] for row in page["account"]] == [*[False] * 7, True]


def test_overview_without_an_account_has_no_table_of_it() -> None:
    overview = read(document_of(report(), verdict=VERDICT))
    assert "where a step goes" not in render(overview.document())
    assert overview.to_page()["account"] == []


@pytest.mark.parametrize("damage", [{"parts": [{}]}, {"step_seconds": -1}, {"parts": [{}] * 300}])
def test_overview_of_a_damaged_account_is_an_error(damage: dict[str, Any]) -> None:
    verdict = VERDICT | {"account": uneven_account().to_document() | damage}
    with pytest.raises(RunFileError, match="damaged"):
        read(document_of(report(), verdict=verdict))


def test_page_of_a_failed_run_has_its_failure() -> None:
    document = document_of(report()) | {"exit": {"state": "failed", "error": "ValueError: bad"}}
    card = read(document).to_page()["card"]
    assert (card["failure"], card["heading"]) == ("ValueError: bad", "failed")


MILLISECOND_NS = 10**6


def report_with_memory(rank: int, memory: HostMemory | None) -> RankReport:
    train = KindTotals(steps=10, ns=100 * MILLISECOND_NS)
    train.phases[BACKWARD] = PhaseTotals(10, 100 * MILLISECOND_NS)
    return RankReport(rank, Totals(train=train, host_memory=memory), PhaseNames())


def test_overview_has_the_memory_of_each_rank() -> None:
    memory = HostMemory(441 << 20, 1398 << 20)
    lines = render(overview([report_with_memory(0, memory), report_with_memory(1, None)], {})).splitlines()
    assert lines[1].endswith("RSS / peak")
    assert lines[2].endswith("441 MiB / 1.37 GiB")
    assert lines[3].endswith("  -")
    assert max(map(len, lines)) <= 80


def test_overview_of_ranks_is_aligned_for_wide_names() -> None:
    names = PhaseNames()
    train = KindTotals(steps=10, ns=100 * MILLISECOND_NS)
    train.phases[names.slot("资料の拡張")] = PhaseTotals(10, 100 * MILLISECOND_NS)
    ranks = [RankReport(rank, Totals(train=train), names) for rank in (0, 1)]
    _, *table, _, _ = render(overview(ranks, {}, named=[1])).splitlines()
    assert len({text_width(line) for line in table}) == 1
    assert table[2].startswith("  ▶    1")


def test_overview_of_one_rank_has_its_memory() -> None:
    memory = HostMemory(441 << 20, 1398 << 20)
    assert "memory 441 MiB resident, 1.37 GiB at the peak" in render(
        overview([report_with_memory(0, memory)], {})
    )
    assert "memory: 441 MiB resident · 1.37 GiB at the peak" in report_with_memory(0, memory).to_text()
