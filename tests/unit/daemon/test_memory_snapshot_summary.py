"""The sums of memory snapshots, by hand and by brute force, and the advice."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.daemon.memory_snapshots import (
    ACTIVATIONS,
    KERNEL,
    LINEAR,
    MIB,
    OPTIMIZER,
    block,
    fragmented,
    segment,
    write,
)

from torchperfd.document.terminal import render
from torchperfd_daemon import memory
from torchperfd_daemon.memory.model import Frame
from torchperfd_daemon.memory.sums import place_text, user_frame


@pytest.fixture
def summarise(tmp_path: Path) -> Any:
    """Return a function that writes a snapshot, reads it and returns its summary."""
    return lambda snapshot: memory.summarise(memory.load(write(tmp_path / "a.pickle", snapshot)))


def test_sums_of_a_device_are_as_by_hand(summarise: Any) -> None:
    (device,) = summarise(fragmented()).devices
    sums = device.sums
    assert (sums.segments, sums.blocks) == (3, 4)
    assert sums.reserved == 200 * MIB
    assert sums.allocated == 119 * MIB + MIB // 2
    assert sums.active == 120 * MIB
    assert sums.free == sums.split_free == 80 * MIB
    assert sums.split_share == 0.4
    assert sums.rounding == 1024
    assert sums.largest_free == 40 * MIB
    assert {name: each.reserved for name, each in device.classes.items()} == {
        "small": 2 * MIB,
        "large": 198 * MIB,
    }
    assert [(each.size, each.blocks) for each in device.stacks] == [
        (118 * MIB + MIB // 2, 2),
        (MIB + MIB // 2, 2),
    ]
    assert (device.failure.size, device.failure.device_free) == (50 * MIB, 3 * MIB)


STATES = ("active_allocated", "active_awaiting_free", "active_pending_free", "inactive")
blocks = st.lists(
    st.builds(
        block,
        st.integers(0, 1 << 40),
        st.sampled_from(STATES),
        st.sampled_from([ACTIVATIONS, OPTIMIZER, [KERNEL], []]),
        st.integers(0, 1 << 10),
    ),
    min_size=1,
    max_size=8,
)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.booleans(), st.sampled_from([(0, 0), (0, 1)]), blocks), max_size=8
    )
)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_sums_are_those_over_all_blocks(summarise: Any, segments: list[Any]) -> None:
    for _, _, _, those in segments:
        for each in those:
            each["requested_size"] = min(each["requested_size"], each["size"])
    raw = [
        segment(*those, device=device, is_expandable=expandable, segment_pool_id=pool)
        for device, expandable, pool, those in segments
    ]
    summary = summarise({"segments": raw})
    assert [device.device for device in summary.devices] == sorted({each["device"] for each in raw})
    for device in summary.devices:
        mine = [each for each in raw if each["device"] == device.device]
        every = [each for one in mine for each in one["blocks"]]
        sums = device.sums
        assert sums.reserved == sum(each["size"] for each in every)
        assert sums.allocated == sum(each["size"] for each in every if each["state"] == STATES[0])
        assert sums.active == sum(each["active_size"] for each in mine)
        assert sums.requested == sum(each["requested_size"] for each in mine)
        assert sums.free == sum(each["size"] for each in every if each["state"] == "inactive")
        assert sums.split_free == sum(
            each["total_size"] - each["active_size"]
            for each in mine
            if each["active_size"] and not each["is_expandable"]
        )
        assert sums.private == sum(each["total_size"] for each in mine if any(each["segment_pool_id"]))
        assert sum(each.reserved for each in device.classes.values()) == sums.reserved
        assert sum(each.size for each in device.stacks) == sums.active
        assert sum(each.blocks for each in device.stacks) == sums.blocks
        assert sums.largest_free <= sums.free


def test_free_blocks_that_touch_are_one_piece(summarise: Any) -> None:
    pieces = [
        block(size * MIB, state)
        for size, state in [(3, "inactive"), (4, "inactive"), (1, STATES[0]), (5, "inactive")]
    ]
    (device,) = summarise({"segments": [segment(*pieces)]}).devices
    assert device.sums.largest_free == 7 * MIB


def test_summary_keeps_the_ten_largest_stacks(summarise: Any) -> None:
    many = [block(MIB * (each + 1), frames=[{**LINEAR, "line": each}]) for each in range(12)]
    (device,) = summarise({"segments": [segment(*many)]}).devices
    assert [each.size // MIB for each in device.stacks] == list(range(12, 2, -1))
    assert device.stack_count == 12


def test_same_stack_of_many_blocks_is_one_row(summarise: Any) -> None:
    """The file has the stack once or several times, as equal lists."""
    many = [block(MIB, frames=[dict(frame) for frame in ACTIVATIONS]) for _ in range(5)]
    (device,) = summarise({"segments": [segment(*many)]}).devices
    assert [(each.blocks, each.size) for each in device.stacks] == [(5, 5 * MIB)]


@pytest.mark.parametrize(
    ("filename", "is_users"),
    [
        ("/home/ann/bert/model.py", True),
        ("model.py", True),
        ("<ipython-input-3-0a1b>", True),
        ("/tmp/ipykernel_1/2.py", True),
        ("/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", False),
        ("/usr/lib/python3/dist-packages/numpy/core.py", False),
        ("/usr/lib/python3.13t/threading.py", False),
        ("/workspace/pytorch/torch/nn/functional.py", False),
        ("<eval_with_key>.7", False),
        ("<frozen runpy>", False),
        ("/pytorch/aten/src/ATen/native/Linear.cpp", False),
        ("??", False),
        ("", False),
    ],
)
def test_user_frame_is_outside_of_libraries(filename: str, is_users: bool) -> None:
    frame = Frame(filename, 1, "f")
    assert user_frame((frame,)) == (frame if is_users else None)


def test_place_names_the_users_line_and_the_librarys() -> None:
    frames = tuple(
        Frame(str(each["filename"]), int(str(each["line"])), str(each["name"])) for each in ACTIVATIONS
    )
    assert (
        place_text(frames[1:]) == "model.py:42 in forward, within torch/nn/modules/linear.py:125 in forward"
    )
    assert place_text(frames[2:]) == "model.py:42 in forward"
    assert place_text(frames[:2]) == "torch/nn/modules/linear.py:125 in forward"
    assert place_text(frames) == place_text(frames[1:]), "C++ is not where to look"
    assert place_text(frames[:1]) == "Linear.cpp:? in at::native::linear"
    assert place_text(()) == "no stack recorded"


def rules(summary: Any) -> list[str]:
    return [advice.rule for device in summary.devices for advice in device.advice]


def test_fragmentation_is_advised_after_a_failure(summarise: Any) -> None:
    assert rules(summarise(fragmented())) == ["fragmentation", "one-stack"]


@pytest.mark.parametrize("wanted", [81 * MIB, 40 * MIB])
def test_failure_of_another_cause_gets_no_advice(summarise: Any, wanted: int) -> None:
    """More than all that is free, or what fits into one piece."""
    whole = fragmented()
    whole["device_traces"][0][-1]["size"] = wanted
    assert rules(summarise(whole)) == ["one-stack"]


def test_fragmentation_without_failure_gets_no_advice(summarise: Any) -> None:
    assert rules(summarise({**fragmented(), "device_traces": []})) == ["one-stack"]


def test_setting_in_force_is_not_advised(summarise: Any) -> None:
    assert rules(summarise({**fragmented(), "allocator_settings": {"expandable_segments": True}})) == [
        "one-stack"
    ]


def test_memory_of_private_pools_counts_for_nothing(summarise: Any) -> None:
    whole = fragmented()
    whole["segments"][2]["segment_pool_id"] = (0, 1)
    summary = summarise(whole)
    assert rules(summary) == ["one-stack"]
    assert summary.devices[0].sums.private == 98 * MIB + MIB // 2


def test_half_of_the_memory_is_not_one_stack(summarise: Any) -> None:
    halves = [block(MIB, frames=ACTIVATIONS), block(MIB, frames=OPTIMIZER)]
    assert rules(summarise({"segments": [segment(*halves)]})) == []
    assert rules(summarise({"segments": [segment(block(MIB))]})) == [], "without a stack there is no place"


def test_device_without_segments_shows_its_failure(summarise: Any) -> None:
    summary = summarise({"segments": [], "device_traces": [[], [{"action": "oom", "size": MIB}]]})
    (device,) = summary.devices
    assert (device.device, device.sums.reserved, device.failure.size) == (1, 0, MIB)
    assert "last failed allocation: 1 MiB, at no stack recorded" in render(
        memory.page_document([(None, summary)])
    )
