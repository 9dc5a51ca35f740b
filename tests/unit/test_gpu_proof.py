"""The GPU proof: what its checks conclude from events, times and advice, and its page."""

from typing import Any

import pytest
from benchmarks.gpu_proof import page
from benchmarks.gpu_proof.analysed_capture import in_order, is_within, place_of, saving_ms
from benchmarks.gpu_proof.captured_training import busy_us
from benchmarks.gpu_proof.checks import CHECKS
from benchmarks.gpu_proof.checks.device_times import traced_ns
from benchmarks.gpu_proof.checks.input_pipeline import workers_advised
from benchmarks.gpu_proof.outcome import Bound, Outcome

from torchperfd_daemon.analysis import Advice


def annotation(name: str, start: float, end: float) -> dict[str, Any]:
    return {"cat": "user_annotation", "name": f"gpu_proof:{name}", "ts": start, "dur": end - start}


def kernel(number: int, launched: float, start: float, end: float) -> list[dict[str, Any]]:
    return [
        {"cat": "cuda_runtime", "ts": launched, "dur": 1, "args": {"correlation": number}},
        {"cat": "kernel", "ts": start, "dur": end - start, "args": {"correlation": number}},
    ]


def test_busy_device_is_in_the_phase_whose_work_it_does() -> None:
    events = [
        annotation("forward", 0, 10),
        annotation("backward", 10, 20),
        *kernel(1, 1, 5, 105),
        *kernel(2, 11, 105, 405),
    ]
    assert traced_ns(events) == {"forward": 105_000.0, "other": 0.0, "backward": 300_000.0}


def test_idle_device_is_in_the_phase_that_the_host_is_in() -> None:
    events = [
        annotation("data", 0, 50),
        annotation("forward", 60, 100),
        annotation("loss", 100, 130),
        *kernel(1, 65, 70, 110),
        *kernel(2, 120, 121, 122),
    ]
    assert traced_ns(events) == {"data": 50_000.0, "other": 10_000.0, "forward": 50_000.0, "loss": 20_000.0}


def test_busy_time_counts_kernels_side_by_side_once() -> None:
    events = [*kernel(1, 0, 0, 10), *kernel(2, 0, 5, 20), *kernel(3, 0, 30, 31), *kernel(4, 0, 31, 33)]
    assert busy_us(events) == 23


def found(*bounds: Bound) -> dict[str, Any]:
    outcome = Outcome(["what", "a|b"], [["x", "1 | 2"]], list(bounds), ["A note."])
    return {"title": "A check", "outcome": outcome.to_json(), "seconds": 1.5}


@pytest.mark.parametrize(("held", "fine"), [(True, True), (None, True), (False, False)])
def test_only_what_failed_to_hold_is_not_fine(held: bool | None, fine: bool) -> None:
    assert page.is_fine(found(Bound("it holds", held=True), Bound("so does this", held))) is fine


def test_check_that_ended_early_is_not_fine() -> None:
    result = {"title": "A check", "error": "exit code 3", "seconds": 1.5}
    assert not page.is_fine(result)
    assert page.check_lines(result)[-1] == "**Not met**: the check ended early, exit code 3."


def test_page_counts_rows_that_agree() -> None:
    outcome = Outcome(["value", "verdict"], [["a", "agrees"], ["b", "differs"], ["c", "agrees"]])
    lines = page.check_lines({"title": "A check", "outcome": outcome.to_json()})
    assert lines[4:-1] == ["| b | differs |", "", "Rows left out: 2 (agrees)."]


def test_page_has_a_section_per_card_and_says_what_did_not_hold() -> None:
    machine = {"device": "NVIDIA H200", "torch": "2.11.0", "python": "3.12.3", "cuda": "13.0"}
    result = found(Bound("held", held=True), Bound("failed", held=False), Bound("absent", held=None))
    document = {"machine": machine, "date": "2026-11-26", "checks": dict.fromkeys(CHECKS[:1], result)}
    lines = page.text(iter([document])).splitlines()
    assert lines[lines.index("## NVIDIA H200") :] == [
        "## NVIDIA H200",
        "",
        "torch 2.11.0, CUDA 13.0, Python 3.12.3, 2026-11-26.",
        "",
        "### A check",
        "",
        "| what | a\\|b |",
        "|---|---|",
        "| x | 1 \\| 2 |",
        "",
        "1 of 3 limits are met.",
        "",
        "- **Not met**: failed",
        "- **Not shown**: absent",
        "",
        "A note.",
        "",
        f"**Not shown**, since not run on this card: {', '.join(CHECKS[1:])}.",
    ]


def advice(rule: str, saves_ms: float = 1.0, setting: str = "") -> Advice:
    return Advice(rule, "", saves_ms * 1e6, 0.1, "", setting)


WORKERS = advice("loader-workers", 5.5, "DataLoader(..., num_workers=12, persistent_workers=True)")


def test_place_of_counts_from_one() -> None:
    found = [advice("pin-memory"), WORKERS]
    assert place_of("loader-workers", found) == 2
    assert place_of("float64", found) is None


def test_saving_of_absent_rule_is_zero() -> None:
    assert saving_ms("loader-workers", [WORKERS]) == 5.5
    assert saving_ms("float64", [WORKERS]) == 0


def test_in_order_names_rules_and_savings() -> None:
    assert in_order([WORKERS, advice("pin-memory")]) == "loader-workers 5.50 ms, pin-memory 1.00 ms"
    assert in_order([]) == "no advice"


@pytest.mark.parametrize(
    ("predicted", "measured", "expected"),
    [(4, 5, True), (6, 5, True), (3, 5, False), (7, 5, False), (0, 0, False), (1, -1, False)],
)
def test_prediction_is_judged_by_measured_saving(predicted: float, measured: float, expected: bool) -> None:
    assert is_within(predicted, measured) is expected


def test_workers_advised_only_by_first_advice() -> None:
    assert workers_advised((WORKERS,)) == 12
    assert workers_advised((advice("pin-memory"), WORKERS)) is None
    assert workers_advised((advice("loader-workers", setting="num_workers=2 * num_workers"),)) == 2
    assert workers_advised(()) is None
