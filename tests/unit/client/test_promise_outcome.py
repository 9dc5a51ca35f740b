"""What a change has given beside what the run before it promised: judged from pairs of kept reports."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.support.run_documents import PREDICTED, kept_run

from torchperfd.launch import earlier_runs
from torchperfd.launch.earlier_runs import EarlierRuns, settings_of, source_document
from torchperfd.launch.options import KeepingOptions
from torchperfd.model.loader_facts import LoaderFacts
from torchperfd.report.previous_runs import outcome_of
from torchperfd.report.promise import MINUS, PromiseOutcome, promises_of, short_fix
from torchperfd.report.rank import RankReport
from torchperfd.report.record import RunRecord, record_of
from torchperfd.report.store import MAX_HEADS, RunStore
from torchperfd.steps.phases import PhaseNames
from torchperfd.steps.totals import Totals

WORK = {"forward": 0.010, "backward": 0.015, "optimizer": 0.0056}
MODEL = {"forward": 0.035, "backward": 0.030, "optimizer": 0.015}
SLOW = {**WORK, "data": 0.055}
FAST = {**WORK, "data": 0.0199}
UNPREDICTED = {**PREDICTED, "saves_seconds": None, "cost_seconds_per_step": 0.0394, "fix": "do less"}
HEALTHY = {"cause": "none", "summary": "healthy"}
PROMISED = "promised -46 % by num_workers=4"


def before(**more: Any) -> dict[str, Any]:
    named: dict[str, Any] = {"run": "before", "verdict": PREDICTED}
    return kept_run(SLOW, **(named | more))


def after(seconds: dict[str, float] = FAST, **more: Any) -> dict[str, Any]:
    named: dict[str, Any] = {"run": "after", "code": "new", "workers": 4}
    return kept_run(seconds, **(named | more))


def judged(new: dict[str, Any], *earlier: dict[str, Any]) -> PromiseOutcome | None:
    return outcome_of(record_of(new), [(each["run"], record_of(each)) for each in earlier])


def words(new: dict[str, Any], *earlier: dict[str, Any]) -> str:
    outcome = judged(new, *earlier)
    return outcome.words.replace(MINUS, "-") if outcome is not None else "nothing"


def scaled(seconds: dict[str, float], factor: float) -> dict[str, float]:
    return {name: factor * each for name, each in seconds.items()}


def failed(document: dict[str, Any]) -> dict[str, Any]:
    return document | {"exit": {"state": "failed", "code": 1, "error": "ValueError"}}


ENDED: dict[str, Any] = {"exit": {"state": "interrupted", "code": 130}}
DEVICE: dict[str, Any] = {"environment": {"cpus": 8, "threads": 4, "device": "H100"}}
ELSEWHERE: dict[str, Any] = {"source": {"path": "ffff", "code": "new", "arguments": "12"}}
UNSEEN = {**PREDICTED, "unseen_ranks": 2}
SECOND = {**UNPREDICTED, "cause": "CPU contention", "others": [PREDICTED]}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "gain given": (before(), after(), f"your change: -41 % (85.6 → 50.5 ms), {PROMISED}"),
    "none": (before(), after(SLOW), f"your change: no change beyond noise, {PROMISED}"),
    "worse": (
        before(),
        after({**WORK, "data": 0.070}),
        f"your change: +18 % (85.6 → 101 ms), {PROMISED}",
    ),
    "a cost that was named": (
        before(verdict=UNPREDICTED),
        after(),
        "your change: -41 % (85.6 → 50.5 ms); the cause that was named cost 46 %",
    ),
    "fix of a further cause": (
        before(verdict=SECOND),
        after(),
        f"your change: -41 % (85.6 → 50.5 ms), {PROMISED}",
    ),
    "first cause": (
        before(verdict=SECOND),
        after(workers=0),
        "your change: -41 % (85.6 → 50.5 ms); the cause that was named cost 46 %",
    ),
    "other batch": (
        before(),
        after(scaled(FAST, 2), batch=64),
        f"your change: -41 % (2.67 → 1.58 ms a sample), {PROMISED}",
    ),
    "last batch of an epoch": (
        before(),
        after(batch=31),
        f"your change: -41 % (85.6 → 50.5 ms), {PROMISED}",
    ),
    "machine's speed alone": (
        before(),
        after(scaled(SLOW, 1.5)),
        "your change: +50 % (85.6 → 128 ms) in all phases alike: the machine's speed, or the whole script, "
        + PROMISED,
    ),
    "machine's speed as well": (
        kept_run({**MODEL, "data": 0.030}, run="before", verdict=PREDICTED),
        after(scaled({**MODEL, "data": 0.002}, 1.5)),
        f"your change: -25 % (165 → 123 ms, at the machine's present speed), {PROMISED}",
    ),
    "other arguments": (
        before(),
        after(source={"path": "abcd", "code": "c0de", "arguments": "99"}, workers=0),
        f"your change: -41 % (85.6 → 50.5 ms), {PROMISED}",
    ),
    "setting alone": (
        before(),
        after(code="c0de"),
        f"your change: -41 % (85.6 → 50.5 ms), {PROMISED}",
    ),
    "code not known": (
        before(code=""),
        after(code="", workers=0),
        f"your change: -41 % (85.6 → 50.5 ms), {PROMISED}",
    ),
    "other host": (before(), after(host="node-2"), f"your change: -41 % (85.6 → 50.5 ms), {PROMISED}"),
    "interrupted": (before(**ENDED), after(**ENDED), f"your change: -41 % (85.6 → 50.5 ms), {PROMISED}"),
    "unseen ranks": (
        before(verdict=UNSEEN),
        after(),
        f"your change: -41 % (85.6 → 50.5 ms), as far as ranks were seen, {PROMISED}",
    ),
    "nothing changed": (before(), after(code="c0de", workers=0), ""),
    "other world size": (before(), after(world_size=2), "nothing"),
    "other device": (before(), after(**DEVICE), "nothing"),
    "other script": (before(), after(**ELSEWHERE), "nothing"),
    "crashed": (before(), failed(after()), "nothing"),
    "crashed before": (failed(before()), after(), "nothing"),
    "too few steps": (before(), after(steps=8), "nothing"),
    "too few steps before": (before(steps=8), after(), "nothing"),
    "no promise": (before(verdict=HEALTHY), after(), "nothing"),
    "hang": (before(verdict={"cause": "hang", "stalled_seconds": 41.0}), after(), "nothing"),
    "older version": (before(source=None), after(), "nothing"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_outcome_of_a_pair_of_runs(name: str) -> None:
    earlier, new, expected = PAIRS[name]
    assert words(new, earlier) == expected


def test_outcome_has_numbers_and_their_error() -> None:
    outcome = judged(after(), before())
    assert outcome is not None
    assert (outcome.run, outcome.cause, outcome.fix) == ("before", "input-bound", "num_workers=4")
    assert (outcome.ratio, outcome.promised_ratio) == pytest.approx((-0.41, -0.46), abs=0.001)
    assert 0 < outcome.ratio_margin < 0.05
    assert outcome.details.replace(MINUS, "-").startswith("compared with before: -41.0 % ± ")


def test_outcome_is_read_as_it_was_written() -> None:
    outcome = judged(after(), before())
    assert outcome is not None
    assert record_of(after() | {"promise": outcome.to_dict()}).outcome == outcome


def test_unchanged_run_is_named_in_its_report_only() -> None:
    outcome = judged(after(code="c0de", workers=0), before())
    assert outcome is not None
    assert (outcome.words, outcome.details, outcome.cells) == ("", "no change since before", ("", ""))


def test_promise_that_was_answered_is_closed() -> None:
    first, second = before(), after()
    second |= {"promise": judged(second, first).to_dict()}  # type: ignore[union-attr]
    third = after(SLOW, run="third", code="newer")
    assert words(third, second, first) == "nothing"
    assert words(third, kept_run(SLOW, run="between", code="other"), first).endswith(PROMISED)


def test_outcome_skips_runs_that_cannot_answer() -> None:
    crashed = failed(after(run="crashed"))
    assert words(after(), crashed, before(run="other", world_size=4), before()).endswith(PROMISED)


@pytest.mark.parametrize(
    ("fix", "short"),
    [
        ("DataLoader(..., num_workers=4, persistent_workers=True)", "num_workers=4"),
        ("torch.set_num_threads(2) (now 24)", "torch.set_num_threads(2)"),
        ("fewer, larger batches: these are cheap to make", "fewer"),
        ("group batches by length: pads less", "group batches by length"),
        ("move the sum at train.py:57 out of the loop", ""),
        ("", ""),
    ],
)
def test_short_fix_is_the_setting_or_the_first_words(fix: str, short: str) -> None:
    assert short_fix(fix) == short


def test_promises_leave_out_what_costs_next_to_nothing() -> None:
    small = {"cause": "checkpoint", "cost_seconds_per_step": 0.002, "step_seconds": 0.1}
    unknown = {"cause": "unknown", "cost_seconds_per_step": 0.05, "step_seconds": 0.1}
    assert promises_of({**small, "others": [unknown]}, None) == ()


def test_earlier_runs_are_found_by_their_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("pass")
    began = time.time() + 10
    source = source_document(str(script), ("--lr", "1"), began)
    store = RunStore(str(tmp_path / "runs"))
    document = before() | {"source": source}
    store.keep({"schema": document["schema"], "run": "before", "source": source} | document)
    store.keep(before(run="other"))
    new = after()
    reader = EarlierRuns(KeepingOptions(str(tmp_path / "runs")), str(script), ("--lr", "2"), began)
    outcome = reader.add_to(new, loader_report(LoaderFacts(workers=4, batch_size=32)), 60)
    assert outcome is not None
    assert outcome.run == "before"
    assert new["settings"] == {"num_workers": 4, "batch_size": 32}
    assert new["source"]["path"] == source["path"]
    assert new["source"]["arguments"] != source["arguments"]
    assert new["promise"]["words"] == outcome.words


def test_earlier_runs_of_a_missing_directory_are_none(tmp_path: Path) -> None:
    new = after()
    reader = EarlierRuns(KeepingOptions(str(tmp_path / "none")), str(tmp_path / "train.py"), (), 0.0)
    assert reader.add_to(new, loader_report(None), 60) is None
    assert (new["promise"], new["settings"], new["source"]["code"]) == (None, {}, None)


def test_earlier_runs_that_take_too_long_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, released = threading.Event(), threading.Event()

    def hang(*_: object) -> Iterator[tuple[str, bytes]]:
        reading.set()
        released.wait(60)
        return iter(())

    monkeypatch.setattr(RunStore, "newest_with", hang)
    new = after(source=None)
    reader = EarlierRuns(KeepingOptions(str(tmp_path)), str(tmp_path / "train.py"), (), 0.0)
    assert reading.wait(60)
    assert reader.add_to(new, loader_report(None), 0.0) is None
    # The next run is compared with this one all the same.
    assert new["source"]["path"]
    assert new["promise"] is None
    released.set()
    reading_ended = [each for each in threading.enumerate() if each.name == "torchperfd-earlier-runs"]
    for thread in reading_ended:
        thread.join(60)


def test_store_reads_the_heads_of_the_newest_runs_only(tmp_path: Path) -> None:
    store = RunStore(str(tmp_path))
    for number in range(MAX_HEADS + 2):
        store.keep({"run": f"run-{number}", "source": {"path": "abcd"}, "ranks": []})
        os.utime(tmp_path / f"run-{number}.json", (1_790_000_000 + number,) * 2)
    marker = b'"path":"abcd"'
    found = [run_id for run_id, _ in store.newest_with(marker, 3, 1000)]
    assert found == [f"run-{number}" for number in (65, 64, 63)]
    assert len(list(store.newest_with(marker, 1000, 1000))) == MAX_HEADS
    assert list(store.newest_with(marker, 3, 10)) == []
    assert list(store.newest_with(b'"path":"ffff"', 3, 1000)) == []


def test_code_digest_follows_the_users_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, module = tmp_path / "train.py", tmp_path / "data.py"
    script.write_text("import data")
    module.write_text("ITEMS = 1")
    planted = ModuleType("data")
    planted.__file__ = str(module)
    monkeypatch.setitem(sys.modules, "data", planted)
    # Beside other tests this process has more modules of its own than a script has.
    monkeypatch.setattr(earlier_runs, "_MAX_FILES", 1 << 20)
    monkeypatch.setattr(earlier_runs, "_MAX_SOURCE_BYTES", 1 << 28)
    for name, other in list(sys.modules.items()):
        path = getattr(other, "__dict__", {}).get("__file__")
        if isinstance(path, str) and not Path(path).exists():
            monkeypatch.delitem(sys.modules, name)
    later = time.time() + 10
    first = source_document(str(script), (), later)
    assert source_document(str(script), (), later) == first
    module.write_text("ITEMS = 2")
    second = source_document(str(script), (), later)
    assert second["code"] not in (None, first["code"])
    assert second["path"] == first["path"]
    # Written while the run went on: what it imported is not known.
    assert source_document(str(script), (), 0.0)["code"] is None
    monkeypatch.setattr(earlier_runs, "_MAX_FILES", 0)
    assert source_document(str(script), (), later)["code"] is None


def loader_report(loader: LoaderFacts | None) -> RankReport:
    return RankReport(0, Totals(loader=loader), PhaseNames())


def test_settings_of_a_rank_without_a_loader_are_none() -> None:
    assert settings_of(loader_report(None)) == {}


def test_record_of_damaged_outcome_is_an_error() -> None:
    for damaged in ({"run": "a", "state": "odd"}, {"run": "a", "state": "noise", "ratio": True}):
        with pytest.raises(ValueError, match=r"state|number"):
            record_of(after() | {"promise": damaged})
    assert isinstance(record_of(after()), RunRecord)
