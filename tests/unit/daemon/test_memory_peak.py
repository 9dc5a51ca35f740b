"""The peak of a memory snapshot and who held it, by hand and by brute force, and the names of places."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.daemon.memory_snapshots import MIB, block, event, frames, segment, write

from torchperfd.document.terminal import render
from torchperfd_daemon import memory
from torchperfd_daemon.memory.model import Frame
from torchperfd_daemon.memory.sums import place_text

UNWIND = (
    "torch::unwind::unwind()",
    "torch::CapturedTraceback::gather(bool, bool, bool)",
    "c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::malloc(signed char, unsigned long)",
    "at::detail::empty_cuda(c10::ArrayRef<long>, c10::TensorOptions const&)",
)
AUTOGRAD = (
    "torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)",
    "execute_native_thread_routine",
)


@pytest.fixture
def devices(tmp_path: Path) -> Any:
    """Return a function that writes a snapshot of segments and events by device, and summarises it."""

    def summarised(segments: list[Any], *traces: list[Any]) -> Any:
        whole = {"segments": segments, "device_traces": list(traces)}
        return memory.summarise(memory.load(write(tmp_path / "a.pickle", whole))).devices

    return summarised


def held(device: Any) -> list[tuple[str, int]]:
    return [(each.place.text, each.size // MIB) for each in device.peak.stacks]


def test_peak_is_when_most_was_held_and_names_who(devices: Any) -> None:
    """Activations that are gone at the end, between two parts that stay."""
    base = 1 << 40
    (device,) = devices(
        [segment(block(20 * MIB, frames=frames(9)), block(44 * MIB, "inactive"), address=base)],
        [
            event("segment_alloc", base, 512 * MIB),
            event("alloc", base, 20 * MIB, frames(9)),
            event("alloc", base + 100 * MIB, 300 * MIB, frames(57), time_us=7),
            event("free_requested", base + 100 * MIB, 300 * MIB, frames(60)),
            event("free_completed", base + 100 * MIB, 300 * MIB, frames(60)),
            event("alloc", base + 100 * MIB, 40 * MIB, frames(61)),
            event("free", base + 100 * MIB, 40 * MIB),
        ],
    )
    assert (device.peak.size, device.peak.before, device.sums.active) == (320 * MIB, 0, 20 * MIB)
    assert (device.peak.time_us, device.peak.event, device.peak.events) == (7, 2, 6)
    assert held(device) == [("model.py:57 in forward", 300), ("model.py:9 in forward", 20)]
    assert [advice.text for advice in device.advice] == [
        "look at model.py:57 in forward: it holds 94% of the memory at the peak, 300 MiB in 1 block"
    ]


def test_history_that_begins_in_the_middle_is_replayed(devices: Any) -> None:
    """Two blocks are older than the history: one that is released in it, and one that is kept."""
    base = 1 << 40
    kept, new = block(5 * MIB, frames=frames(3)), block(7 * MIB, frames=frames(4))
    (device,) = devices(
        [segment(kept, new, address=base)],
        [
            event("free_completed", 1 << 50, 90 * MIB, frames(8)),
            event("alloc", base + 5 * MIB, 7 * MIB, frames(4)),
        ],
    )
    assert (device.peak.size, device.peak.before, device.peak.event) == (95 * MIB, 95 * MIB, 0)
    assert held(device) == [
        ("allocated before recording began (parameters?)", 90),
        ("model.py:3 in forward", 5),
    ]


@pytest.mark.parametrize("again", [True, False])
def test_stack_of_a_release_counts_if_it_is_repeated(devices: Any, again: bool) -> None:
    """With context="alloc" torch repeats the stack of the allocation, with "all" it records the release's."""
    (device,) = devices(
        [],
        [
            event("free_completed", 1 << 50, 90 * MIB, frames(8)),
            event("alloc", 1 << 51, MIB, frames(4)),
            event("free_completed", 1 << 51, MIB, frames(4 if again else 5)),
        ],
    )
    expected = "model.py:8 in forward" if again else "allocated before recording began (parameters?)"
    assert held(device) == [(expected, 90)]


def test_memory_awaiting_a_stream_is_held_until_it_is_released(devices: Any) -> None:
    where = 1 << 40
    events = [event("alloc", where, 8 * MIB), event("free_requested", where, 8 * MIB)]
    more = [event("alloc", 1 << 41, 5 * MIB), event("free_completed", 1 << 41, 5 * MIB)]
    (device,) = devices([], [*events, *more, event("free_completed", where, 8 * MIB)])
    assert device.peak.size == 13 * MIB
    # Without its completion, and if it is not in use at the end, it ended when that was requested.
    (device,) = devices([], [*events, *more])
    assert device.peak.size == 8 * MIB
    pending = segment(block(8 * MIB, "active_pending_free"), address=where)
    (device,) = devices([pending], [*events, *more])
    assert device.peak.size == 13 * MIB


def test_peak_of_each_device_is_its_own(devices: Any) -> None:
    first, second = devices(
        [segment(block(2 * MIB), address=1 << 40, device=1)],
        [event("alloc", 1 << 40, 9 * MIB), event("free", 1 << 40, 9 * MIB), {"action": "oom", "size": MIB}],
        [event("alloc", 1 << 40, 2 * MIB)],
    )
    assert (first.device, first.peak.size, first.peak.is_end) == (0, 9 * MIB, False)
    assert (second.device, second.peak.size, second.peak.is_end) == (1, 2 * MIB, True)


def test_snapshot_without_history_has_no_peak(devices: Any) -> None:
    (device,) = devices([segment(block(2 * MIB))], [])
    assert device.peak is None
    assert [each.place.text for each in device.stacks] == ["no stack recorded"]


def test_block_without_a_stack_is_older_than_the_recording(devices: Any) -> None:
    """Only if there was a recording; a recorded one without a stack is of a thread without Python."""
    both = segment(block(3 * MIB, frames=frames(5)), block(9 * MIB))
    (device,) = devices([both], [])
    assert device.stacks[0].place.text == "allocated before recording began (parameters?)"
    (device,) = devices([both], [event("alloc", 0x7F0000000000 + 3 * MIB, 9 * MIB)])
    assert device.stacks[0].place.text == "no Python frame (gradients, by the autograd thread?)"


EVENTS = st.lists(
    st.tuples(st.sampled_from(["alloc", "free"]), st.integers(0, 9), st.integers(1, 50)), max_size=60
)


@given(EVENTS, st.integers(0, 50))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_peak_is_that_of_a_walk_over_the_events(devices: Any, steps: list[Any], cut: int) -> None:
    """Also of a history whose first ``cut`` events torch has dropped."""
    live, lines, events, totals = {}, {}, [], [0]
    for number, (action, slot, size) in enumerate(steps):
        address = slot << 30
        if action == "alloc" and address not in live:
            live[address], lines[address] = size * MIB, number + 1
            events.append(event("alloc", address, size * MIB, frames(number + 1)))
        elif action == "free" and address in live:
            events.append(event("free_completed", address, live.pop(address), frames(1000)))
        else:
            continue
        totals.append(sum(live.values()))
    segments = [
        segment(block(size, frames=frames(lines[address])), address=address) for address, size in live.items()
    ]
    cut = min(cut, len(events))
    found = devices(segments, events[cut:])
    if len(events) == cut:
        assert [device.peak for device in found] == [None] * len(found)
        return
    (device,) = found
    assert device.peak.size == max(totals[cut:])
    assert device.peak.before == totals[cut]
    if device.peak.stack_count <= memory.MAX_STACKS:
        assert sum(each.size for each in device.peak.stacks) == device.peak.size


def stack(*names: str) -> tuple[Frame, ...]:
    return tuple(Frame("??", 0, name) for name in names)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            (
                "at::_ops::mm::call(at::Tensor const&)",
                "torch::autograd::generated::details::mm_mat2_backward(x)",
            ),
            "gradient of mm (autograd thread)",
        ),
        (
            ("torch::autograd::generated::details::div_tensor_other_backward(at::Tensor const&)",),
            "gradient of div",
        ),
        (
            ("at::_ops::neg::call(x)", "torch::autograd::generated::SubBackward0::apply(std::vector<x>&&)"),
            "gradient of sub (autograd thread)",
        ),
        (
            ("at::_ops::zeros::call(x)", "torch::autograd::generated::NativeLayerNormBackward0::apply(x)"),
            "gradient of native_layer_norm (autograd thread)",
        ),
        (("at::_ops::sum_dim_IntList::redispatch(x)",), "gradient of sum_dim (autograd thread)"),
        (("at::_ops::convolution_backward::call(x)",), "gradient of convolution (autograd thread)"),
        (
            ("at::_ops::new_empty_strided::call(x)", "torch::autograd::AccumulateGrad::apply(x)"),
            "gradient of a parameter, kept in .grad (autograd thread)",
        ),
        (("at::_ops::empty_memory_format::call(x)",), "gradient (autograd thread)"),
    ],
)
def test_memory_of_the_autograd_thread_is_a_gradient(names: tuple[str, ...], expected: str) -> None:
    assert place_text(stack(*UNWIND, *names, *AUTOGRAD)).startswith(expected)


@pytest.mark.parametrize(
    ("frames_of", "expected"),
    [
        (stack(*UNWIND), "a C++ thread without a Python frame"),
        (stack(*UNWIND, "at::_ops::cat::call(x)", "start_thread"), "cat (C++, no Python frame)"),
        (stack(*UNWIND, "my::pool::grow(long)"), "?:? in my::pool::grow(long)"),
        ((*stack(*UNWIND), Frame("/a/net.py", 7, "f")), "net.py:7 in f"),
        (
            (*stack(*UNWIND), Frame("C:\\py\\Lib\\site-packages\\torch\\nn\\a.py", 3, "g")),
            "torch/nn/a.py:3 in g",
        ),
        (
            (*stack(*UNWIND), Frame("/usr/lib/python3.12/threading.py", 1012, "_bootstrap")),
            "a C++ thread without a Python frame",
        ),
    ],
)
def test_place_never_names_a_frame_of_a_tool(frames_of: tuple[Frame, ...], expected: str) -> None:
    assert place_text(frames_of).replace("??", "?") == expected


def test_answer_leads_with_the_peak_and_its_holders(devices: Any, tmp_path: Path) -> None:
    where = 1 << 40
    devices([], [event("alloc", where, 4 * MIB, frames(7)), event("free", where, 4 * MIB)])
    text = render(memory.page_document([(None, memory.summarise(memory.load(tmp_path / "a.pickle")))]))
    assert text.splitlines()[0] == (
        "device 0: peak 4 MiB, 0 B at the end; held by model.py:7 in forward 4 MiB (100.0%)"
    )
    assert text.index("at the peak: held by") < text.index("reserved")
