"""Memory snapshots: the calls of torch, their order, and the files; CUDA's side is a fake."""

import hashlib
import json
import pickle
import sys
from typing import Any

import pytest
import torch
from tests.unit.client.captured_loop import step, train_until

import torchperfd
from torchperfd.captures import driver
from torchperfd.captures.state import CaptureOptions
from torchperfd.errors import CaptureError


class FakeMemory:
    """Stands in for ``torch.cuda.memory``; like torch, it forgets the history when recording ends."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.history: list[str] | None = None

    def _record_memory_history(self, enabled: str | None, **options: Any) -> None:
        self.calls.append((enabled, options))
        self.history = None if enabled is None else ["alloc"]

    def _snapshot(self) -> dict[str, Any]:
        self.calls.append(("snapshot",))
        return {"segments": [], "device_traces": [self.history]}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeMemory:
    """A process that seems to have initialised CUDA."""
    memory = FakeMemory()
    monkeypatch.setattr(torch.cuda, "memory", memory)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: memory.history is not None, raising=False)
    return memory


def captured(client: torchperfd.Client, **options: Any) -> Any:
    step()
    capture = client.capture(kind="memory", **options)
    train_until(capture)
    return capture


@pytest.mark.parametrize(("with_stack", "context"), [(False, "alloc"), (True, "all")])
def test_a_snapshot_is_written_as_torchs_viewer_reads_it(
    cuda: FakeMemory, client: torchperfd.Client, with_stack: bool, context: str
) -> None:
    capture = captured(client, steps=3, with_stack=with_stack)
    path = capture.wait()
    assert path.name == "rank0.memory.pickle"
    content = path.read_bytes()
    assert pickle.loads(content) == {"segments": [], "device_traces": [["alloc"]]}
    assert content[:2] == b"\x80\x04", "torch's viewer reads no newer protocol"
    options = {"context": context, "stacks": "python", "max_entries": driver.MAX_MEMORY_EVENTS}
    assert cuda.calls == [("all", options), ("snapshot",), (None, {})]
    manifest = json.loads((path.parent / "rank0.manifest.json").read_text())
    assert manifest["sha256"] == hashlib.sha256(content).hexdigest()
    assert manifest["options"]["kind"] == "memory"
    assert sorted(each.name for each in path.parent.iterdir()) == ["rank0.manifest.json", path.name]


def test_a_cancelled_snapshot_ends_the_recording(cuda: FakeMemory, client: torchperfd.Client) -> None:
    step()
    capture = client.capture(steps=1000, kind="memory")
    train_until(capture, "running")
    assert cuda.history is not None
    capture.cancel()
    step()
    step()
    assert cuda.history is None
    with pytest.raises(CaptureError, match="cancelled"):
        capture.wait()


def test_without_cuda_it_is_refused(client: torchperfd.Client) -> None:
    with pytest.raises(CaptureError, match="no CUDA in this process"):
        captured(client, steps=1).wait()


def test_a_script_that_records_itself_is_left_alone(cuda: FakeMemory, client: torchperfd.Client) -> None:
    cuda.history = ["its own"]
    with pytest.raises(CaptureError, match="records the history of CUDA memory itself"):
        captured(client, steps=1).wait()
    assert cuda.history == ["its own"]
    assert cuda.calls == []


def test_a_snapshot_that_fails_ends_the_recording(
    cuda: FakeMemory, client: torchperfd.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(cuda, "_snapshot", broken)
    with pytest.raises(CaptureError, match="out of luck"):
        captured(client, steps=1).wait()
    assert cuda.history is None


def test_before_torch_is_imported_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert driver.memory_unusable() == "the process has not imported torch yet"


def test_there_are_no_other_kinds() -> None:
    with pytest.raises(ValueError, match="kind must be one of trace, memory, not 'stacks'"):
        CaptureOptions(kind="stacks")
