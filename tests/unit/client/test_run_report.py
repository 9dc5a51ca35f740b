"""The phase table and the ``torchperfd.run/1`` document, of one and the same account."""

import csv
import json
import re
from dataclasses import asdict
from html.parser import HTMLParser
from unicodedata import east_asian_width

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.golden import check_golden

from torchperfd.model.formatting import duration, size
from torchperfd.model.loader_facts import LoaderFacts
from torchperfd.model.source_lines import InputStages, SyncWait
from torchperfd.model.totals import CudaMemory, GcTotals, PhaseTotals
from torchperfd.report.phase_table import rate
from torchperfd.report.rank import RankReport, run_document
from torchperfd.steps.phases import DATA, FORWARD, OTHER, PhaseNames
from torchperfd.steps.totals import KindTotals, Totals

MS = 10**6


def phase(calls: int, ns: int, of_each: list[float] | None = None) -> PhaseTotals:
    """Return a phase whose calls took the given times, over and over; all the same by default."""
    times = of_each or [ns / calls]
    return PhaseTotals(calls, ns, calls * sum(each * each for each in times) / len(times))


@pytest.fixture
def report() -> RankReport:
    """A training step of 5 s, one hundred of 10 ms, two of validation, and half a second between."""
    names = PhaseNames()
    augment = names.slot("augment <b>|*all*| the images, slowly")
    train = KindTotals(steps=101, ns=6000 * MS, samples=3232)
    train.phases[DATA] = phase(101, 1300 * MS)
    train.phases[DATA].squares = (1000.0 * MS) ** 2 + 50 * (2.0 * MS) ** 2 + 50 * (4.0 * MS) ** 2
    train.phases[FORWARD] = PhaseTotals(202, 4500 * MS, 2 * (2000.0 * MS) ** 2 + 200 * (2.5 * MS) ** 2)
    train.phases[augment] = phase(1, 199_999_500)
    train.phases[OTHER] = phase(101, 505)
    train.phases[OTHER].ns = 500
    train.squares = (5000.0 * MS) ** 2 + 50 * (8.0 * MS) ** 2 + 50 * (12.0 * MS) ** 2
    warmup = KindTotals(steps=1, ns=5000 * MS, samples=32, squares=(5000.0 * MS) ** 2)
    warmup.phases[DATA] = phase(1, 1000 * MS)
    warmup.phases[FORWARD] = phase(2, 4000 * MS)
    validate = KindTotals(steps=2, ns=3 * MS, squares=2 * (1.5 * MS) ** 2)
    validate.phases[FORWARD] = phase(2, 3 * MS)
    return RankReport(3, Totals(train, validate, warmup, began_ns=1000, ended_ns=1000 + 6503 * MS), names)


@pytest.fixture
def full(report: RankReport) -> RankReport:
    """The same on a GPU, in two epochs, with every figure that a report can have."""
    totals = report.totals
    totals.train.tokens, totals.warmup.tokens = 101 * 8192, 8192
    totals.train.skipped, totals.train.micro_batches = 3, 202
    totals.train.phases[FORWARD].device_ns, totals.train.phases[FORWARD].device_calls = 4180 * MS, 192
    totals.warmup.phases[FORWARD].device_ns, totals.warmup.phases[FORWARD].device_calls = 3800 * MS, 2
    totals.epoch = phase(2, 6500 * MS, [1000.0 * MS, 5500.0 * MS])
    totals.train_pass = phase(2, 6400 * MS, [980.0 * MS, 5420.0 * MS])
    totals.validate_pass = phase(1, 50 * MS)
    totals.checkpoint = phase(2, 250 * MS)
    totals.gc = (GcTotals(40, 5 * MS), GcTotals(4, 10 * MS), GcTotals(1, 100 * MS))
    totals.loader_ready = 2
    totals.cuda = CudaMemory(allocated_bytes=5 * 2**30, reserved_bytes=6 * 2**30, peak_bytes=5_888_802_816)
    totals.sync_waits = (
        SyncWait("/home/a/train.py", 57, "item", 180 * MS),
        SyncWait("/home/a/log.py", 7, "cpu", 20 * MS),
    )
    totals.flops_per_step, totals.peak_flops = 2e12, 989e12
    totals.overhead, totals.degradation_level = 0.00312, 1
    return RankReport(3, totals, report.names)


@pytest.mark.parametrize("layout", ["text", "markdown", "csv", "html"])
def test_each_layout_is_its_golden_file(full: RankReport, layout: str) -> None:
    suffix = {"text": "txt", "markdown": "md"}.get(layout, layout)
    rendered = getattr(full, f"to_{layout}")().rstrip("\n") + "\n"
    check_golden(f"report.{suffix}", rendered)


def eight_ms(steps: int) -> KindTotals:
    """Return steps of 8 ms in all, each of them a forward."""
    kind = KindTotals(steps=steps, ns=8 * MS)
    kind.phases[FORWARD] = phase(steps, 8 * MS)
    return kind


def test_reports_of_few_steps_are_their_golden_file() -> None:
    names = PhaseNames()
    lossy = RankReport(0, Totals(eight_ms(4)), names, dropped=1234)
    instant = Totals(KindTotals(steps=2))
    instant.train.phases[OTHER].calls = 2
    empty = RankReport(7, Totals(), names)
    cases = {
        "steps that were lost": lossy.to_text(),
        "steps that were lost, markdown": lossy.to_markdown(),
        "steps that were lost, html": lossy.to_html(),
        "degraded, cost unknown": RankReport(0, Totals(eight_ms(4), degradation_level=2), names).to_text(),
        "steps that took no time": RankReport(0, instant, names).to_text(),
        "only totals, of an older client": RankReport(1, Totals(eight_ms(4)), names).to_text(),
        "a single step": RankReport(1, Totals(eight_ms(1), warmup=eight_ms(1)), names).to_text(),
        "only validation": RankReport(0, Totals(validate=eight_ms(2)), names).to_text(),
        "no steps": empty.to_text(),
        "no steps, markdown": empty.to_markdown(),
        "no steps, html": empty.to_html(),
        "no steps, csv": empty.to_csv(),
    }
    text = "\n".join(f"# {name}\n{shown.rstrip()}\n" for name, shown in cases.items())
    check_golden("report_cases.txt", text)


def test_the_document_is_its_golden_file(full: RankReport) -> None:
    only_totals = RankReport(1, Totals(eight_ms(4)), PhaseNames())
    reports = [full, only_totals, RankReport(0, Totals(), PhaseNames())]
    document = json.dumps(run_document("bert-17", reports, {"cause": "input"}))
    # The last digit of a sum differs between versions of Python.
    rounded = json.loads(document, parse_float=lambda digits: float(f"{float(digits):.9g}"))
    check_golden("report.json", json.dumps(rounded, indent=1) + "\n")


@pytest.mark.parametrize(("data_ns", "shown"), [(60 * MS, True), (40 * MS, False)])
def test_report_has_the_stages_of_a_loop_that_waits(data_ns: int, shown: bool) -> None:
    train = KindTotals(steps=100, ns=1000 * MS, samples=100)
    train.phases[DATA], train.phases[FORWARD] = phase(100, data_ns), phase(100, 1000 * MS - data_ns)
    stages = InputStages(2, 40, 0.004, 0.001, idle=0.1)
    own = RankReport(0, Totals(train, loader=LoaderFacts(workers=2, stages=stages)), PhaseNames())
    assert (f"\n  input: {stages.words}\n" in f"{own.to_text()}\n") is shown
    assert own.to_dict()["input_stages"] == asdict(stages)


def test_it_prints_and_shows_itself(report: RankReport) -> None:
    assert str(report) == report.to_text()
    assert report._repr_html_() == report.to_html()


def test_report_account_is_its_totals(report: RankReport) -> None:
    assert report.account is report.totals


def test_the_text_fits_a_terminal_and_is_aligned(report: RankReport) -> None:
    names = PhaseNames()
    for name in ("資料の拡張", "a phase whose name goes on for 64 characters, which is permitted"):
        report.totals.train.phases[names.slot(name)] = phase(3, 7 * MS)
    text = RankReport(0, report.totals, names).to_text()
    lines = text.splitlines()[1:]
    widths = [sum(2 if east_asian_width(c) in "WF" else 1 for c in line) for line in lines]
    assert len(set(widths)) == 1
    assert widths[0] <= 100
    assert "a phase whos…s permitted " in text


def test_device_column_takes_its_width_from_longest_names(full: RankReport) -> None:
    lines = full.to_text().splitlines()
    assert "On device" in lines[1]
    assert "augmen…slowly" in full.to_text()
    assert "between steps " in full.to_text(), "our own words are never cut"
    assert max(map(len, lines)) < 100


def test_text_fits_a_terminal_of_80_columns(full: RankReport) -> None:
    text = full.to_text(80)
    assert max(map(len, text.splitlines())) <= 80
    assert [line for line in text.splitlines() if line.startswith("  ── train ─")]
    found, expected = (
        re.findall(r"\d[\d.,]* (?:[nµm]?s|min|%)", " ".join(each.split())) for each in (text, full.to_text())
    )
    assert found == expected
    assert full.to_text(400) == full.to_text()


def test_words_of_the_script_mean_nothing_in_any_layout(report: RankReport) -> None:
    assert "<b>" not in report.to_html()
    assert "augment &lt;b&gt;|*all*| the images" in report.to_html()
    assert r"augment &lt;b&gt;\|\*all\*\| the images" in report.to_markdown()
    rows = list(csv.DictReader(report.to_csv().splitlines()))
    assert "augment <b>|*all*| the images, slowly" in [row["action"] for row in rows]
    parser = HTMLParser()
    parser.feed(report.to_html())
    assert "<script" not in report.to_html()
    assert "<style" not in report.to_html()
    assert "http" not in report.to_html()


def test_rows_of_fit_and_of_each_kind_add_up(report: RankReport) -> None:
    fit, *parts = [row for row in report.table.rows if row.phase == "fit"]
    assert fit.share == 1.0
    assert sum(row.seconds_total for row in parts) == pytest.approx(fit.seconds_total)
    assert sum(row.share for row in parts) == pytest.approx(1.0)
    for kind in ("train", "validate"):
        whole = next(row for row in parts if row.action == kind)
        phases = [row for row in report.table.rows if row.phase == kind]
        assert sum(row.seconds_total for row in phases) == pytest.approx(whole.seconds_total)
        assert [row.seconds_total for row in phases] == sorted(
            (row.seconds_total for row in phases), reverse=True
        )


def test_the_first_step_is_in_no_mean(report: RankReport) -> None:
    rows = {(row.phase, row.action): row for row in report.table.rows}
    first, train, data = rows["fit", "first step"], rows["fit", "train"], rows["train", "data"]
    assert (first.calls, first.mean_seconds, first.std_seconds) == (1, 5.0, None)
    assert [train.calls, train.mean_seconds, train.std_seconds] == pytest.approx([100, 0.01, 0.002])
    assert [data.calls, data.mean_seconds, data.std_seconds] == pytest.approx([100, 0.003, 0.001])
    assert train.samples_per_second == pytest.approx(3200)
    assert data.samples_per_second == pytest.approx(3200 / 0.3)


def test_passes_are_a_group_of_their_own(full: RankReport) -> None:
    epoch, train, validate = (row for row in full.table.rows if row.phase == "epoch")
    assert (epoch.action, epoch.calls, epoch.mean_seconds, epoch.seconds_total) == ("epoch", 2, 3.25, 6.5)
    assert epoch.std_seconds == pytest.approx(2.25)
    assert epoch.share == pytest.approx(6.5 / 6.503)
    assert (train.action, train.calls, train.mean_seconds) == ("train", 2, 3.2)
    assert (validate.action, validate.calls, validate.std_seconds) == ("validate", 1, None)


def test_the_fit_is_never_shorter_than_its_epochs(full: RankReport) -> None:
    full.totals.epoch = phase(1, 7000 * MS)
    rows = {(row.phase, row.action): row for row in RankReport(0, full.totals, full.names).table.rows}
    assert rows["fit", "fit"].seconds_total == rows["epoch", "epoch"].seconds_total == 7.0
    assert rows["fit", "between steps"].seconds_total == pytest.approx(0.997)


def test_rates_and_peak_share_leave_out_the_first_step(full: RankReport) -> None:
    assert full.table.tokens_per_second == pytest.approx(819_200)
    assert full.table.flops_per_second == pytest.approx(200e12)
    assert full.table.flops_utilization == pytest.approx(200 / 989)
    full.totals.peak_flops = None
    text = RankReport(3, full.totals, full.names).to_text()
    assert "compute: 200 TFLOP/s\n" in text
    assert "MFU" not in text


def test_device_time_is_the_mean_of_calls_timed_there(full: RankReport) -> None:
    rows = {(row.phase, row.action): row for row in full.table.rows}
    assert rows["train", "forward"].device_mean_seconds == pytest.approx(0.002)
    assert rows["train", "data"].device_mean_seconds is None
    assert rows["validate", "forward"].device_mean_seconds is None


def test_unknown_values_are_left_out(report: RankReport) -> None:
    assert not [row for row in report.table.rows if row.phase == "epoch"]
    for text in (report.to_text(), report.to_markdown(), report.to_html()):
        for word in (
            "device",
            "tokens",
            "FLOP",
            "MFU",
            "CUDA",
            "overhead",
            "checkpoint",
            "skipped",
            "garbage",
        ):
            assert word not in text, word
    assert report.table.notes == ()


def test_pauses_from_one_percent_of_fit_are_shown(report: RankReport) -> None:
    for ms, reported in ((65, False), (66, True)):
        report.totals.gc = (GcTotals(1, MS), GcTotals(1, (ms - 1) * MS))
        text = RankReport(0, report.totals, report.names).to_text()
        assert (f"garbage collector: {ms} ms" in text) == reported


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (5e-9, "5 ns"),
        (999e-9, "999 ns"),
        (1e-6, "1 µs"),
        (1.234e-6, "1.23 µs"),
        (999e-6, "999 µs"),
        (999.6e-6, "1 ms"),
        (0.0125, "12.5 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (1.0, "1 s"),
        (59.99, "60 s"),
        (99.96, "1 min 40 s"),
        (100.0, "1 min 40 s"),
        (1234.5, "20 min 34 s"),
        (123456.0, "34 h 18 min"),
        (703_000.0, "8 d 3 h"),
        (-0.0125, "-12.5 ms"),
    ],
)
def test_a_duration_has_the_unit_that_reads_best(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(0, 1e7))
def test_a_duration_is_short_and_within_half_a_percent(seconds: float) -> None:
    text = duration(seconds)
    assert re.fullmatch(r"\d+(\.\d+)? (ns|µs|ms|s)|\d+ (min|h|d) \d+ (s|min|h)", text), text
    units = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
    words = text.split()
    reported = sum(float(number) * units[unit] for number, unit in zip(words[::2], words[1::2], strict=True))
    assert reported == pytest.approx(seconds, rel=0.0051, abs=0.51e-9)


@pytest.mark.parametrize(
    ("per_second", "text"),
    [
        (None, "-"),
        (0.0123, "0.0123"),
        (66.04, "66"),
        (99.96, "100"),
        (6834.4, "6,834"),
        (9_999_999.0, "9,999,999"),
        (23_738_740.3, "24M"),
    ],
)
def test_a_rate_is_as_exact_as_it_is_worth(per_second: float | None, text: str) -> None:
    assert rate(per_second) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (2**20, "1 MiB"),
        (1023 * 2**20, "0.999 GiB"),
        (80 * 2**30, "80 GiB"),
        (2**40, "1 TiB"),
    ],
)
def test_a_size_has_the_unit_that_reads_best(count: int, text: str) -> None:
    assert size(count) == text
