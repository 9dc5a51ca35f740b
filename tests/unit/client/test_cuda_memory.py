"""CUDA memory, with an allocator that says what the test has it say."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from torchperfd.device.accelerator import read_cuda_memory
from torchperfd.steps.totals import CudaMemory


class Cuda:
    """``torch.cuda`` of a process with devices; everything else about it is missing."""

    def __init__(self, *devices: dict[str, Any], initialized: bool = True, tells_uuids: bool = True) -> None:
        self._devices = devices
        self._tells_uuids = tells_uuids
        self._initialized = initialized

    def is_initialized(self) -> bool:
        return self._initialized

    def device_count(self) -> int:
        assert self._initialized, "counting devices may load the driver"
        return len(self._devices)

    def get_device_properties(self, device: int) -> SimpleNamespace:
        assert self._initialized
        return SimpleNamespace(**{"uuid": f"GPU-uuid-{device}"} if self._tells_uuids else {})

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        assert self._initialized
        return self._devices[device]


def holds(allocated: int, reserved: int, peak: int) -> dict[str, Any]:
    return {
        "allocated_bytes": {"all": {"current": allocated, "peak": peak, "freed": 7}},
        "reserved_bytes": {"all": {"current": reserved, "peak": 2 * reserved, "freed": 7}},
    }


def use(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)


def test_it_is_what_the_allocator_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, SimpleNamespace(cuda=Cuda(holds(100, 4096, 900))))
    assert read_cuda_memory() == CudaMemory(allocated=100, reserved=4096, peak=900, device_uuid="uuid-0")


def test_a_rank_may_use_any_of_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, SimpleNamespace(cuda=Cuda(holds(0, 0, 0), holds(100, 4096, 900), holds(1, 2, 3))))
    assert read_cuda_memory() == CudaMemory(allocated=101, reserved=4098, peak=903, device_uuid="uuid-1")


def test_device_of_an_older_torch_has_no_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, SimpleNamespace(cuda=Cuda(holds(1, 2, 3), tells_uuids=False)))
    assert read_cuda_memory() == CudaMemory(allocated=1, reserved=2, peak=3)


def test_process_that_holds_no_memory_has_no_device_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, SimpleNamespace(cuda=Cuda(holds(0, 0, 0))))
    assert read_cuda_memory() == CudaMemory(allocated=0, reserved=0, peak=0)


@pytest.mark.parametrize(
    "torch",
    [
        pytest.param(None, id="torch is not imported"),
        pytest.param(SimpleNamespace(), id="torch is being imported"),
        pytest.param(SimpleNamespace(cuda=Cuda(initialized=False)), id="CUDA is not initialised"),
        pytest.param(SimpleNamespace(cuda=Cuda({})), id="the allocator does not count"),
    ],
)
def test_there_is_none(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    use(monkeypatch, torch)
    assert read_cuda_memory() is None


def test_an_error_of_cuda_is_the_scripts_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: int) -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cuda = Cuda(holds(1, 1, 1))
    monkeypatch.setattr(cuda, "memory_stats_as_nested_dict", broken)
    use(monkeypatch, SimpleNamespace(cuda=cuda))
    assert read_cuda_memory() is None


def test_the_installed_torch_has_what_is_asked_of_it() -> None:
    import torch

    assert callable(torch.cuda.memory_stats_as_nested_dict)
    if not torch.cuda.is_available():
        assert read_cuda_memory() is None
