"""What gpu-proof computes without a GPU: the trace's device times, its busy time, and the page."""

from typing import Any

import pytest
from benchmarks.gpu_proof import page
from benchmarks.gpu_proof.captured_training import busy_us
from benchmarks.gpu_proof.checks import CHECKS
from benchmarks.gpu_proof.checks.device_times import traced_ns
from benchmarks.gpu_proof.outcome import Bound, Outcome


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
        "| --- | --- |",
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
