"""Where the training thread waits for its device: what a frame calls, and what samples add up to."""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch
from benchmarks.simulated_device.device import Device
from torch.utils.data import DataLoader, Dataset

from torchperfd.hooks.line_times import SyncWaits
from torchperfd.hooks.thread_frames import called_name
from torchperfd.model.source_lines import SyncWait
from torchperfd.safety.logs import Faults
from torchperfd.steps.totals import KindTotals


def caller_of_method() -> FrameType:
    """Return the frame that has called the method which calls this."""
    return sys._getframe(2)


class Probe:
    """Notes, in each of its methods, what the frame that called it is calling."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def _note(self, frame: FrameType) -> None:
        self.names.append(called_name(frame.f_code, frame.f_lasti))

    def item(self) -> float:
        self._note(caller_of_method())
        return 1.0

    def same(self, _: object = None) -> "Probe":
        return self

    def __bool__(self) -> bool:
        self._note(caller_of_method())
        return True

    def __float__(self) -> float:
        self._note(caller_of_method())
        return 1.0


def call_once(t: Probe) -> None:
    t.item()


def call_in_chain(t: Probe) -> None:
    t.same(t.same()).item()


def call_over_lines(t: Probe) -> None:
    (
        t
        .same(1)
        .item()
    )  # fmt: skip


def call_on_item(t: Probe) -> None:
    {"loss": t}["loss"].item()


def call_in_arguments(t: Probe) -> None:
    print(t.item(), max(2.0, t.same(t).item()), end="", file=None if t is None else sys.stderr)


def call_in_format(t: Probe) -> str:
    return f"loss {t.item():.2f}, {float(t)}"


def call_in_list(t: Probe) -> list[float]:
    return [each.item() for each in (t, t)]


def choose(t: Probe) -> int:
    return 1 if t else 2


def repeat(t: Probe) -> None:
    while not t:
        pass


def call_later(t: Probe) -> None:
    item = t.item
    item()


@pytest.mark.parametrize(
    ("run", "names"),
    [
        (call_once, [".item"]),
        (call_in_chain, [".item"]),
        (call_over_lines, [".item"]),
        (call_on_item, [".item"]),
        (call_in_arguments, [".item", ".item"]),
        (call_in_format, [".item", "float"]),
        (call_in_list, [".item", ".item"]),
        (choose, ["bool"]),
        (repeat, ["bool"]),
        (call_later, [""]),
    ],
)
def test_called_name_of_a_waiting_frame_is_its_call(run: Callable[[Probe], object], names: list[str]) -> None:
    probe = Probe()
    run(probe)
    assert probe.names == names


def test_called_name_of_more_names_than_fit_a_byte() -> None:
    many = "\n".join(f"    t.same(t.name{number} if t is None else None)" for number in range(300))
    namespace: dict[str, Callable[[Probe], object]] = {}
    exec(compile(f"def long(t):\n{many}\n    t.item()\n", "long.py", "exec"), namespace)
    probe = Probe()
    namespace["long"](probe)
    assert probe.names == [".item"]


def test_called_name_of_no_instruction_is_empty() -> None:
    assert called_name(call_once.__code__, -1) == called_name(call_once.__code__, 1_000_000) == ""


class Sampled:
    """A tensor's stand-in that samples the stack within its own calls."""

    def __init__(self, waits: SyncWaits, ns: int = 1000) -> None:
        self._waits = waits
        self._ns = ns

    def synchronize(self) -> None:
        self._waits.add(sys._getframe(1), self._ns)

    def item(self) -> None:
        self._waits.add(sys._getframe(1), self._ns)

    def matmul(self) -> None:
        self._waits.add(sys._getframe(1), self._ns)


@pytest.fixture
def waits() -> Iterator[SyncWaits]:
    sampler = SyncWaits(Faults())
    yield sampler
    sampler.stop(10.0)


def line_of(mark: str) -> int:
    """Return the number of the line in this file that ends with a mark."""
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if line.rstrip().endswith(f"# {mark}"))


def test_waits_add_up_by_line_and_call(waits: SyncWaits) -> None:
    tensor = Sampled(waits)
    for _ in range(3):
        tensor.item()  # the loss
        tensor.matmul()
    tensor.synchronize()  # the end
    assert waits.waits(KindTotals(steps=1, ns=10_000), KindTotals()) == (
        SyncWait(__file__, line_of("the loss"), "item", 3000),
        SyncWait(__file__, line_of("the end"), "synchronize", 1000),
    )


def test_waits_count_only_the_part_of_training(waits: SyncWaits) -> None:
    Sampled(waits, 1000).item()
    (wait,) = waits.waits(KindTotals(steps=1, ns=3000), KindTotals(steps=1, ns=1000))
    assert wait.ns == 750
    Sampled(waits, 1000).item()
    waits.waits(KindTotals(steps=1, ns=3000), KindTotals(steps=2, ns=5000))
    assert [each.ns for each in waits.waits(KindTotals(steps=1, ns=3000), KindTotals())] == [750]


def test_waits_are_kept_until_the_step_ends(waits: SyncWaits) -> None:
    Sampled(waits).item()
    assert waits.waits(KindTotals(), KindTotals()) == ()
    (wait,) = waits.waits(KindTotals(steps=1, ns=5000), KindTotals())
    assert wait.ns == 1000


def test_waits_of_many_lines_are_bounded(waits: SyncWaits) -> None:
    tensor = Sampled(waits)
    for number in range(2000):
        exec(compile("\n" * number + "tensor.item()", "many.py", "exec"), {"tensor": tensor})
        waits.waits(KindTotals(steps=number + 1, ns=10 * (number + 1)), KindTotals())
    assert len(waits.waits(KindTotals(steps=2001, ns=30_000), KindTotals())) == 8


def test_waits_within_torch_name_the_line_of_the_script(
    waits: SyncWaits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def item(_: torch.Tensor) -> float:
        waits.add(sys._getframe(1), 1000)
        return 1.0

    waits.start(threading.get_ident())
    monkeypatch.setattr(torch.Tensor, "item", item)
    assert f"{torch.zeros(()):.1f}" == "1.0"  # formatted
    (wait,) = waits.waits(KindTotals(steps=1, ns=1000), KindTotals())
    assert (wait.file, wait.line, wait.call) == (__file__, line_of("formatted"), "item")


def test_waits_ignore_tensors_of_the_loader(waits: SyncWaits) -> None:
    class Samples(Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, _: int) -> int:
            Sampled(waits).item()
            return 0

    waits.start(threading.get_ident())
    assert len(list(DataLoader(Samples()))) == 4
    assert waits.waits(KindTotals(steps=1, ns=1000), KindTotals()) == ()


def test_waits_for_a_device_are_sampled(waits: SyncWaits) -> None:
    device = Device()
    seed = random.getstate()
    waits.start(threading.get_ident())
    waits.start(threading.get_ident())
    steps, found = 0, tuple[SyncWait, ...]()
    while not found:
        device.compute.launch_kernel(0.2)
        device.compute.synchronize()  # the device
        steps += 1
        found = waits.waits(KindTotals(steps=steps, ns=steps * 10**9), KindTotals())
    device.close()
    assert {(wait.file, wait.line, wait.call) for wait in found} == {
        (__file__, line_of("the device"), "synchronize")
    }
    assert random.getstate() == seed
    assert waits.cpu_seconds > 0


def is_sampling() -> bool:
    return "torchperfd-sync-waits" in [thread.name for thread in threading.enumerate()]


def test_waits_end_with_their_thread(waits: SyncWaits) -> None:
    waits.start(0)
    assert not is_sampling()
    waits.start(threading.get_ident())
    assert is_sampling()
    waits.stop(10.0)
    waits.stop(10.0)
    assert not is_sampling()
