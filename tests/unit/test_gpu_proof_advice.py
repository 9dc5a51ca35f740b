"""What the GPU checks of advice conclude from pieces of advice and from times."""

import pytest
from benchmarks.gpu_proof.analysed_capture import in_order, is_within, place_of, saving_ms
from benchmarks.gpu_proof.checks.input_pipeline import workers_advised

from torchperfd_daemon.analysis import Advice


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
