"""What is left when CUDA runs out of memory, and which exception the script sees; the allocator is played."""

import json
import logging
import os
import pickle
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchperfd
from torchperfd.captures import out_of_memory
from torchperfd.errors import CaptureError
from torchperfd.hooks.cuda import forget_stacks
from torchperfd.v1 import control_pb2

GB = 10**9
SNAPSHOT: dict[str, Any] = {"segments": [], "device_traces": []}


class Allocator:
    """Has no memory; calls its observers like torch's, and raises afterwards."""

    def __init__(self) -> None:
        self.observers: list[Callable[[int, int, int, int], None]] = []
        self.recording: list[tuple[Any, ...]] = []
        self.error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self.queued: list[Callable[[], None]] = []
        self.is_initialized = True

    def _record_memory_history(self, enabled: str | None, **options: Any) -> None:
        self.recording.append((enabled, options))

    def _snapshot(self) -> dict[str, Any]:
        return SNAPSHOT

    def when_initialized(self, call: Callable[[], None]) -> None:
        if self.is_initialized:
            call()
        else:
            self.queued.append(call)

    def allocate(self) -> None:
        for observe in self.observers:
            observe(0, 2 * GB, 80 * GB, GB)
        raise self.error


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    allocator = Allocator()
    monkeypatch.setattr(torch.cuda, "memory", allocator)
    monkeypatch.setattr(torch.cuda, "_lazy_call", allocator.when_initialized)
    monkeypatch.setattr(
        torch._C, "_cuda_attach_out_of_memory_observer", allocator.observers.append, raising=False
    )
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False)
    monkeypatch.setattr(out_of_memory, "analysis_of", lambda path, timeout: f"a summary of {path.name}\n")
    yield allocator
    forget_stacks()


@pytest.fixture
def captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHPERFD_CAPTURES_DIR", str(tmp_path / "captures"))
    return tmp_path / "captures"


def files(captures: Path) -> list[str]:
    return sorted(path.name for path in captures.rglob("*") if path.is_file())


def fails(cuda: Allocator) -> None:
    """An allocation fails, and the script sees torch's very own exception."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        cuda.allocate()
    assert caught.value is cuda.error
    assert caught.value.__context__ is None


def test_first_failure_leaves_a_snapshot_and_its_summary(cuda: Allocator, captures: Path) -> None:
    client = torchperfd.attach(on_oom=True)
    assert cuda.recording == [("state", {"context": "state", "stacks": "python"})]
    fails(cuda)
    assert files(captures) == ["rank0.manifest.json", "rank0.memory.pickle", "rank0.memory.txt"]
    (folder,) = captures.iterdir()
    assert pickle.loads((folder / "rank0.memory.pickle").read_bytes()) == SNAPSHOT
    assert (folder / "rank0.memory.txt").read_text() == "a summary of rank0.memory.pickle\n"
    manifest = json.loads((folder / "rank0.manifest.json").read_text())
    assert (manifest["trigger"], manifest["state"]) == ("out of memory", "complete")
    assert manifest["failed_allocation"] == {"device": 0, "wanted": 2 * GB, "total": 80 * GB, "free": GB}
    fails(cuda)
    assert len(list(captures.iterdir())) == 1
    client.detach()
    assert cuda.recording[-1] == (None, {})


def test_all_ranks_sizes_are_in_the_summary(
    cuda: Allocator, captures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = control_pb2.GetRunResponse()
    for rank, allocated in ((0, 70), (1, 30)):
        account = run.ranks.add()
        account.identity.rank = rank
        account.account.cuda.allocated_bytes = allocated * GB
        account.account.cuda.reserved_bytes = 75 * GB
        account.account.cuda.peak_bytes = 71 * GB
    run.ranks.add().identity.rank = 2  # without CUDA
    client = torchperfd.attach(on_oom=True)
    monkeypatch.setattr(client.parts.stream, "get_run", lambda name, seconds: run)
    fails(cuda)
    (summary,) = captures.rglob("rank0.memory.txt")
    assert summary.read_text().splitlines()[1:] == [
        "",
        "all ranks at that moment, in GB",
        "RANK  ALLOCATED  RESERVED   PEAK",
        "   0      70.00     75.00  71.00",
        "   1      30.00     75.00  71.00",
    ]


def test_without_the_switch_nothing_is_watched(cuda: Allocator, client: torchperfd.Client) -> None:
    assert cuda.observers == []
    assert cuda.recording == []
    torchperfd.attach(on_oom=True)  # as a script does under `torchperfd run`
    assert len(cuda.observers) == 1


def test_watching_begins_when_cuda_is_initialised(cuda: Allocator, captures: Path) -> None:
    cuda.is_initialized = False
    torchperfd.attach(on_oom=True)
    assert cuda.observers == []
    for call in cuda.queued:
        call()
    fails(cuda)
    assert "rank0.memory.pickle" in files(captures)


def test_history_of_the_scripts_own_is_left_alone(
    cuda: Allocator, captures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True)
    client = torchperfd.attach(on_oom=True)
    fails(cuda)
    client.detach()
    assert cuda.recording == []
    assert "rank0.memory.pickle" in files(captures)


def test_detached_client_leaves_nothing(cuda: Allocator, captures: Path) -> None:
    torchperfd.attach(on_oom=True).detach()
    fails(cuda)
    assert not captures.exists()


def test_torch_without_an_observer_is_said_and_trains(
    cuda: Allocator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(torch._C, "_cuda_attach_out_of_memory_observer")
    assert torchperfd.attach(on_oom=True).attached
    assert "nothing will be left when CUDA's memory runs out" in caplog.text


def test_summary_that_fails_leaves_the_snapshot(
    cuda: Allocator, captures: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(path: Path, timeout: float) -> str:
        raise CaptureError("out of luck")

    monkeypatch.setattr(out_of_memory, "analysis_of", broken)
    torchperfd.attach(on_oom=True)
    fails(cuda)
    assert files(captures) == ["rank0.manifest.json", "rank0.memory.pickle"]
    assert "rank0.memory.pickle" in caplog.text


def test_injected_failures_leave_no_half_written_file(
    cuda: Allocator, captures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every system call on files fails once, at each place where it is made; a hundred failures in all."""
    monkeypatch.setattr(cuda, "_snapshot", lambda: {"segments": [{"filler": "x" * 100_000}]})
    logging.getLogger("torchperfd").setLevel(logging.CRITICAL)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for number in range(100):
        client = torchperfd.attach(on_oom=True)
        try:
            if number % 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (number * 900, hard))  # a full disk
            else:
                fail_at(monkeypatch, ("open", "rename", "mkdir")[number % 3], number // 6)
            fails(cuda)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            monkeypatch.setattr(os, "open", OPEN)
            monkeypatch.setattr(os, "rename", RENAME)
            monkeypatch.setattr(os, "mkdir", MKDIR)
            client.detach()
            cuda.observers.clear()
        for path in captures.rglob("*.pickle"):
            pickle.loads(path.read_bytes())
        for path in captures.rglob("*.json"):
            json.loads(path.read_text())
        assert [name for name in files(captures) if name.startswith(".")] == []
    logging.getLogger("torchperfd").setLevel(logging.NOTSET)


OPEN, RENAME, MKDIR = os.open, os.rename, os.mkdir


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str, at: int) -> None:
    """Have one of the next calls of a function fail."""
    real, calls = getattr(os, name), iter(range(10**6))

    def function(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, function)
