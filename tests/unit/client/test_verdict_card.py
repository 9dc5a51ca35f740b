"""The verdict card, as text and as HTML, and the end of ``torchperfd run`` that it opens."""

import re
from dataclasses import replace

import pytest
from tests.support.accounts import uneven_account, with_account
from tests.support.golden import check_golden

from torchperfd.document.terminal import Page
from torchperfd.launch.run_report import Closing, closing_card, closing_text, percentiles_of
from torchperfd.launch.script import Script
from torchperfd.model.card import VerdictCard, card_of
from torchperfd.model.source_lines import SyncWait
from torchperfd.model.totals import CudaMemory, PhaseTotals
from torchperfd.report.ending import Ending, explain_error
from torchperfd.report.promise import CHANGED, PromiseOutcome
from torchperfd.report.rank import RankReport
from torchperfd.steps.phases import BACKWARD, COLLECTIVE_WAIT, DATA, FORWARD, ZERO_GRAD, PhaseNames
from torchperfd.steps.totals import KindTotals, Totals
from torchperfd.v1 import control_pb2, session_pb2

MS = 10**6
RUN = "train-77cf3"
CONTENTION = control_pb2.Verdict(
    cause="CPU contention",
    run=RUN,
    rank=1,
    node="node-a",
    evidence="30 ms of each 214 ms step ready to run without a processor",
    cost_seconds_per_step=0.030,
    step_seconds=0.214,
    fix="end the other programs on this node",
    next_command="torchperfd doctor",
)
SMALL = control_pb2.Verdict(cause="checkpoint", cost_seconds_per_step=0.002, step_seconds=0.214)
STARVED = control_pb2.Verdict(
    cause="input-bound",
    run=RUN,
    rank=-1,
    evidence="164 ms of each 214 ms step waiting for data",
    window_seconds=10,
    cost_seconds_per_step=0.164,
    step_seconds=0.214,
    saves_seconds=0.150,
    fix="DataLoader(..., num_workers=4, persistent_workers=True)",
    next_command=f"torchperfd capture --run {RUN} --steps 5",
    others=[CONTENTION, SMALL],
)
HANG = control_pb2.Verdict(
    cause="hang", run=RUN, rank=3, node="node-b", evidence="rank 3 is stopped", stalled_seconds=41
)
OUTCOME = PromiseOutcome(
    "train-3f2a",
    CHANGED,
    cause="input-bound",
    fix="num_workers=4",
    promised_ratio=-0.46,
    before_seconds=0.0856,
    after_seconds=0.0505,
    ratio=-0.41,
)
HEALTHY = control_pb2.Verdict(cause="none", run=RUN, rank=-1, evidence="nothing stands out")
GROWTH = control_pb2.Verdict(
    cause="memory pressure",
    run=RUN,
    rank=-1,
    evidence="memory grows by 8.2 MiB/s and is full in 39 min; host memory of rank 0",
    step_seconds=0.214,
    fix="see which objects are kept",
)
BUSY = with_account(STARVED, uneven_account())
BUSY.note = (
    "busy node: everything takes 3.5 times as long; 71% of that wait is for your own 24 threads,"
    " and 2 threads would save up to 41 ms of each step"
)
UNSURE = control_pb2.Verdict.FromString(BUSY.SerializeToString())
UNSURE.account.replayed_seconds = 2 * UNSURE.account.step_seconds
ONE_CAUSE = control_pb2.Verdict.FromString(UNSURE.SerializeToString())
del ONE_CAUSE.others[:]
LOCATED = control_pb2.Verdict.FromString(STARVED.SerializeToString())
LOCATED.line.CopyFrom(
    control_pb2.SlowLine(
        stage="fetch",
        stage_share=0.75,
        file="/job/<data>.py",
        line=37,
        function="__getitem__",
        share=0.6,
    )
)
ENDLESS = control_pb2.Verdict.FromString(STARVED.SerializeToString())
ENDLESS.fix = "DataLoader(..., " + "x" * 120 + ")"
FAILED = control_pb2.Verdict.FromString(HEALTHY.SerializeToString())
FAILED.failure = "rank 1: ValueError: bad"
UNSEEN = control_pb2.Verdict(cause="unknown", run=RUN, rank=-1, evidence="no rank is slow by itself")
GROWING = control_pb2.Verdict.FromString(STARVED.SerializeToString())
GROWING.others.append(GROWTH)
QUIETLY_GROWING = control_pb2.Verdict.FromString(HEALTHY.SerializeToString())
QUIETLY_GROWING.others.append(GROWTH)
DEAD_WORKER = explain_error("RuntimeError: DataLoader worker (pid 9) is killed by signal: Bus error. ", None)


def rank_report(rank: int = 0, data_ms: float = 186, wait_ms: float = 0) -> RankReport:
    """Return the report of 128 steps, 186 ms of which wait for data, after a first one of 300 ms."""
    steps = {DATA: data_ms, BACKWARD: 15, FORWARD: 11, ZERO_GRAD: 0.5, COLLECTIVE_WAIT: wait_ms}
    train, warmup = KindTotals(steps=129, samples=129 * 32), KindTotals(steps=1, samples=32, ns=300 * MS)
    for slot, each_ms in steps.items():
        if each_ms:
            train.phases[slot] = PhaseTotals(129, int(128 * each_ms * MS))
            train.ns += train.phases[slot].ns
    train.ns += warmup.ns
    train.phases[DATA].ns += warmup.ns
    warmup.phases[DATA] = PhaseTotals(1, warmup.ns)
    validate = KindTotals(steps=30, ns=30 * 43 * MS)
    began = 10**15
    totals = Totals(train, validate, warmup, began_ns=began, ended_ns=began + train.ns + validate.ns)
    totals.checkpoint = PhaseTotals(4, 22 * MS)
    return RankReport(rank, totals, PhaseNames())


def run_answer(verdict: control_pb2.Verdict) -> control_pb2.GetRunResponse:
    found = [("", 211, 240), ("data", 185, 198), ("backward", 15, 19), ("forward", 10.9, 14)]
    percentiles = [
        control_pb2.PhasePercentiles(phase=name, p50_ns=int(p50 * MS), p95_ns=int(p95 * MS))
        for name, p50, p95 in found
    ]
    account = control_pb2.RankAccount(identity=session_pb2.RankIdentity(rank=0), percentiles=percentiles)
    return control_pb2.GetRunResponse(run=RUN, ranks=[account], verdict=verdict)


def closing_of(
    reports: list[RankReport],
    verdict: control_pb2.Verdict | None,
    *,
    ending: Ending | None = None,
    advice: str = "",
    capture_id: str = "",
    outcome: str = "",
) -> Closing:
    """Return the end of a run; without a verdict, no daemon has answered."""
    answer = None if verdict is None else run_answer(verdict)
    card = closing_card(
        RUN, reports, answer, ending=ending, advice=advice, capture_id=capture_id, outcome=outcome
    )
    return Closing(RUN, reports, card, percentiles_of(answer, 0), [("report", "out/run.json")])


def validating() -> RankReport:
    """Return a report whose training waits for no data, and whose validation does."""
    report = rank_report(data_ms=3)
    report.totals.validate.phases[DATA] = PhaseTotals(30, 30 * 39 * MS)
    return report


def tuned(script: Script | None) -> VerdictCard:
    """Return a card of two causes whose fix names the script."""
    fix = "`torchperfd tune SCRIPT` tries settings"
    other = control_pb2.Verdict(cause="CPU contention", fix=fix, cost_seconds_per_step=0.5, step_seconds=1)
    first = control_pb2.Verdict(
        cause="input-bound", fix=fix, cost_seconds_per_step=0.5, step_seconds=1, others=[other]
    )
    first.script = script.command if script else ""
    return card_of(first)


def test_card_has_small_cause_behind_a_large_one() -> None:
    """Of what a lack of processors leaves of the step, the second cause takes half."""
    behind = control_pb2.Verdict(cause="script code", cost_seconds_per_step=0.04, step_seconds=1.0)
    first = control_pb2.Verdict(
        cause="CPU contention", rank=-1, cost_seconds_per_step=0.92, step_seconds=1.0, others=[behind]
    )
    assert [each.cause for each in card_of(first).causes] == ["CPU contention", "script code"]


def test_card_renders_as_golden_file() -> None:
    cards = {
        "two causes, a third below 5 %": card_of(STARVED),
        "hang": card_of(HANG),
        "healthy": card_of(HEALTHY),
        "healthy, as was promised": replace(card_of(HEALTHY), outcome=OUTCOME.words),
        "failed, with what its steps lost": replace(card_of(STARVED), failure="ValueError: bad"),
        "failed, healthy before": replace(card_of(HEALTHY), failure="ValueError: bad"),
        "failed, with a remedy": VerdictCard(RUN, failure="a worker died", remedy="num_workers=0"),
        "two causes on a busy node": card_of(BUSY),
        "no cause yet": card_of(with_account(UNSEEN, uneven_account())),
        "memory grows": card_of(GROWING),
        "memory grows in a run without a cause": card_of(QUIETLY_GROWING),
        "no daemon": VerdictCard(RUN, remark="no daemon has answered, so nothing compared the steps"),
        "line of the script": card_of(LOCATED),
        "replay not certain": card_of(UNSURE),
        "replay not certain, one cause": card_of(ONE_CAUSE),
        "failed, from the verdict": card_of(FAILED),
        "not known": card_of(UNSEEN),
        "validation waits for data": closing_of([validating()], HEALTHY).card,
        "script unknown": tuned(None),
        "script with a space": tuned(Script("a b/train.py", (), is_module=False)),
        "script with options": tuned(Script("main.py", ("--scale", "4", "--name", "x y"), is_module=False)),
        "script as a module": tuned(Script("jobs.train", ("test.x",), is_module=True)),
    }
    text = "\n\n".join(f"# {name}\n{card}\n{card.summary}" for name, card in cards.items())
    endless = card_of(ENDLESS).to_text(width=60)
    check_golden("card.txt", f"{text}\n\n# setting longer than a line, width 60\n{endless}\n")
    check_golden("card.html", "".join(card.to_html() for card in cards.values()))


def test_closing_renders_as_golden_file() -> None:
    ranks = [rank_report(0, data_ms=6, wait_ms=180), rank_report(1), rank_report(2, data_ms=8, wait_ms=178)]
    many = [rank_report(rank, data_ms=6 + rank % 7, wait_ms=200) for rank in range(64)]
    slow = control_pb2.Verdict()
    slow.CopyFrom(STARVED)
    slow.rank, slow.node = 1, "node-a"
    ends = {
        "one rank": closing_of([rank_report()], STARVED),
        "three ranks, one of them slow": closing_of(ranks, slow, capture_id="20261127-120000-abcdef"),
        "64 ranks": closing_of(many, slow),
        "a promise that was kept": closing_of([rank_report()], STARVED, outcome=OUTCOME.words),
        "a rank that has not trained": closing_of([RankReport(0, Totals(), PhaseNames())], STARVED),
        "no daemon": closing_of([rank_report()], None),
        "no step, with advice": closing_of(
            [RankReport(0, Totals(), PhaseNames())], None, advice="call client.step()"
        ),
        "dead worker": closing_of([rank_report()], STARVED, ending=Ending("failed", DEAD_WORKER)),
    }
    text = "\n".join(f"# {name}{closing_text(each)}" for name, each in ends.items())
    check_golden("closing.txt", text)
    assert max(map(len, text.splitlines())) <= 80


def test_card_keeps_every_cause_that_costs_no_time() -> None:
    """A hang, memory that grows: none of them has a share of the step, all of them end the run."""
    names = [cause.cause for cause in card_of(GROWING).causes]
    unsure = control_pb2.Verdict.FromString(GROWING.SerializeToString())
    unsure.others.add(cause="unknown", rank=-1, evidence="too early")
    assert [cause.cause for cause in card_of(unsure).causes] == names
    assert names == ["input-bound", "CPU contention", "memory pressure"]
    assert [cause.cause for cause in card_of(QUIETLY_GROWING).causes] == ["memory pressure"]
    assert "MEMORY PRESSURE · grows by 8.2 MiB/s, full in 39 min" in card_of(GROWING).to_text()


def test_closing_has_the_account_of_waits_as_a_table() -> None:
    answered = with_account(UNSEEN, uneven_account())
    text = closing_text(closing_of([rank_report(0), rank_report(1)], answered))
    check_golden("closing_account.txt", text)
    assert max(map(len, text.splitlines())) <= 80


def test_closing_after_a_dead_worker_keeps_memory_growth() -> None:
    ending = Ending("failed", explain_error("DataLoader worker (pid 9) is killed by signal: Killed. ", None))
    card = closing_card(RUN, [rank_report()], run_answer(GROWING), ending=ending)
    assert [cause.cause for cause in card.causes] == ["memory pressure"]


def test_closing_full_has_every_rank_table() -> None:
    reports = [rank_report(0), rank_report(1)]
    text = closing_text(closing_of(reports, STARVED), full=True)
    assert all(report.to_text() in text for report in reports)
    assert max(map(len, reports[0].to_text().splitlines())) > 80
    narrow = closing_text(closing_of(reports, STARVED), Page(80), full=True)
    assert max(map(len, narrow.splitlines())) <= 80


@pytest.mark.parametrize("verdict", [STARVED, HANG, HEALTHY, CONTENTION], ids=lambda each: each.cause)
def test_closing_command_never_needs_the_run(verdict: control_pb2.Verdict) -> None:
    verdict = control_pb2.Verdict.FromString(verdict.SerializeToString())
    verdict.next_command = verdict.next_command or f"torchperfd stacks --run {RUN}"
    assert closing_of([rank_report()], verdict).card.next_command in ("", "torchperfd doctor")
    card = closing_of([rank_report()], verdict, capture_id="20261127-120000-abcdef").card
    assert card.next_command == "torchperfd analyze 20261127-120000-abcdef"


def test_closing_leaves_waits_of_training_to_the_verdict() -> None:
    assert closing_of([rank_report()], CONTENTION).card.also == ()


def test_closing_ignores_a_short_validation_and_devices() -> None:
    report = rank_report()
    report.totals.validate.phases[DATA] = PhaseTotals(30, 30 * 39 * MS)
    fit = report.totals.train.ns + report.totals.validate.ns
    assert report.totals.validate.ns < 0.05 * fit, "too little validation to count"
    assert closing_of([report], HEALTHY).card.also == ()
    report = validating()
    report.totals.cuda = CudaMemory(1, 2, 3)
    assert closing_of([report], HEALTHY).card.also == ()


def test_closing_names_the_failure_whatever_was_seen() -> None:
    """A rollout of a reinforcement learner counts as validation; the script fails in its first step."""
    validated = Totals(validate=KindTotals(steps=1, ns=3 * MS), began_ns=1, ended_ns=4 * MS)
    failed = Ending("failed", "TypeError: no")
    card = closing_card(RUN, [RankReport(0, validated, PhaseNames())], run_answer(HEALTHY), ending=failed)
    assert card.failure == "the script failed before its first training step: TypeError: no"
    trained = closing_card(RUN, [rank_report()], run_answer(STARVED), ending=failed)
    assert trained.failure == "TypeError: no"
    assert trained.causes == card_of(STARVED).causes


def test_card_colours_say_nothing_that_words_do_not() -> None:
    for card in (card_of(STARVED), card_of(HANG), card_of(HEALTHY), VerdictCard(RUN, remark="?")):
        coloured = card.to_text(colour=True)
        assert "\x1b[" in coloured
        assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == card.to_text()


def test_document_of_a_failed_run_is_bad() -> None:
    document = card_of(FAILED).to_dict()
    assert (document["state"], document["title"]) == ("bad", "failed")


def test_card_escapes_names_in_html() -> None:
    verdict = control_pb2.Verdict(cause="hang", evidence="<script>alert(1)</script>", rank=-1)
    assert "<script" not in card_of(verdict).to_html()


@pytest.mark.parametrize(("wait_ms", "is_named"), [(20, True), (1, False)])
def test_closing_names_the_line_that_waits(wait_ms: int, is_named: bool) -> None:
    totals = rank_report().totals
    totals.sync_waits = (SyncWait("/home/ada/train.py", 57, "item", 129 * wait_ms * MS),)
    report = RankReport(0, totals, PhaseNames())
    text = closing_text(closing_of([report], HEALTHY))
    words = f"sync_wait: {wait_ms} ms a step wait for the device, most of it in item() at train.py:57"
    assert (words in " ".join(text.split())) == is_named, "named from one percent of the step on"
    assert max(map(len, text.splitlines())) <= 80
