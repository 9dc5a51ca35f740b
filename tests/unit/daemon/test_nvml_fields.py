"""The fields whose numbers have meant different things in different drivers."""

import pytest

from torchperfd_daemon.collectors.nvml_counters import FieldValue, slowdown_ns

OLD = {number: FieldValue(number, 64) for number in (251, 252, 253)}
NEW = {number: FieldValue(number, 64) for number in (269, 270, 271)}
FLAGS_IN_OLD_PLACE = {number: FieldValue(1, 32) for number in (251, 252, 253)}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (OLD, (251, 252, 253)),
        (NEW, (269, 270, 271)),
        (NEW | FLAGS_IN_OLD_PLACE, (269, 270, 271)),
        (OLD | NEW, None),
        (FLAGS_IN_OLD_PLACE, None),
        ({251: OLD[251], 252: OLD[252]}, None),
        ({}, None),
    ],
)
def test_slowdown_is_reported_only_when_unambiguous(
    fields: dict[int, FieldValue], expected: tuple[float, float, float] | None
) -> None:
    assert slowdown_ns(fields) == expected
