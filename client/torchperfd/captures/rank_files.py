"""Rank files: what one rank writes into a capture's folder, its trace and its manifest.

The launches and kernels in a trace are counted, to warn of a trace without kernels.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from torchperfd._version import __version__
from torchperfd.captures.files import TURN_S, CaptureFolder, Handover, HandoverError
from torchperfd.captures.state import CaptureOutcome, CaptureState
from torchperfd.captures.tracer import LostTraceError, Tracer
from torchperfd.hooks.accelerator import read_cuda_memory
from torchperfd.model.capture_options import CaptureKind
from torchperfd.model.identity import Identity
from torchperfd.safety.logs import log
from torchperfd.v1.contract import MIN_KERNELS_PER_LAUNCH

_LAUNCH_NAMES: Final = (b'"name": "cudaLaunchKernel', b'"name": "cuLaunchKernel', b'"name": "hipLaunchKernel')
_KERNEL_CATEGORY: Final = b'"cat": "kernel"'


class LaunchCounter:
    """Reads a Chrome trace as Kineto writes it, in pieces; each field of an event is within one line.

    Attributes:
        launches: Launches of one kernel each. One that launches a CUDA graph is none of these.
        kernels: Kernels, those of CUDA graphs included.
    """

    def __init__(self) -> None:
        self.launches = 0
        self.kernels = 0
        self._rest = b""

    def add(self, piece: bytes) -> None:
        """Count the lines of the next piece; the last one may continue in the piece after it."""
        lines, newline, rest = piece.rpartition(b"\n")
        if not newline:
            self._rest += piece
            return
        self._count(self._rest + lines)
        self._rest = rest

    def end(self) -> None:
        """Count what follows the last line's end."""
        self._count(self._rest)
        self._rest = b""

    def _count(self, lines: bytes) -> None:
        self.launches += sum(map(lines.count, _LAUNCH_NAMES))
        self.kernels += lines.count(_KERNEL_CATEGORY)


def warn_of_missing_kernels(capture_id: str, launches: int, kernels: int) -> None:
    """Write a warning to the log if a trace lacks kernels."""
    memory = read_cuda_memory()
    text = missing_kernels_warning(
        launches, kernels, holds_device_memory=memory is not None and memory.allocated_bytes > 0
    )
    if text:
        log.warning("capture %s: %s", capture_id, text)


def missing_kernels_warning(launches: int, kernels: int, *, holds_device_memory: bool = False) -> str:
    """Return that kernels are missing, and why that may be, as one line; '' if they are all there.

    Args:
        holds_device_memory: Whether the process has tensors on a device, which it then works with.
    """
    if holds_device_memory and not launches and not kernels:
        return (
            "the trace has nothing of the device, though the process has tensors there: did another profiler"
            " use CUPTI before, in this process or beside it? Capture again"
        )
    if kernels >= MIN_KERNELS_PER_LAUNCH * launches:
        return ""
    return (
        f"the trace has {launches:,} launches and only {kernels:,} kernels: does another profiler (nsys, ncu,"
        " DCGM) use CUPTI, or was a CUDA graph captured meanwhile?"
    )


_TAIL_BYTES: Final = 8192
_ATTEMPTS: Final = 6
_RETRY_S: Final = 2.0
"""Between attempts to reach a daemon that may be restarting."""
_BELOW_DESCRIPTOR: Final = re.compile(r"/proc/self/fd/\d+/")
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')


class NotWrittenError(Exception):
    """There is no trace; the message has the reason, in one line."""


@dataclass(frozen=True, slots=True)
class WrittenTrace:
    """A trace on disk.

    Attributes:
        export_seconds: How long torch wrote it and freed its memory.
    """

    bytes: int
    sha256: str
    export_seconds: float
    launches: int = 0
    kernels: int = 0


class RankFiles:
    """The files of one rank.

    Args:
        directory: The capture's folder; made when missing.
        kind: ``trace`` or ``memory``.
        max_bytes: Largest trace that is kept; 0 for any.
    """

    def __init__(self, directory: Path, rank: int, kind: str, max_bytes: int) -> None:
        self._directory = directory
        self._stem = f"rank{rank}"
        self._kind = kind
        self._max_bytes = max_bytes

    @property
    def trace(self) -> str:
        return f"{self._stem}.{'memory.pickle' if self._kind == CaptureKind.MEMORY else 'json'}"

    @property
    def has_trace(self) -> bool:
        return (self._directory / self.trace).is_file()

    @property
    def _manifest(self) -> str:
        return f"{self._stem}.manifest.json"

    def prepare(self) -> str:
        """Make the folder, and remove what an attempt before this one left; return why not, or ''."""
        try:
            with CaptureFolder.opened(self._directory) as folder:
                folder.remove(self._manifest)
                folder.check_writable(self.trace)
        except OSError as error:
            return f"cannot write to {self._directory}: {error.strerror or error}"
        return ""

    def write_trace(self, trace: Tracer, refusal: Callable[[], str]) -> WrittenTrace:
        """Write a trace, whole or not at all.

        Args:
            trace: It has been stopped.
            refusal: Returns why the trace is no longer wanted, or ''.

        Raises:
            NotWrittenError: It cannot be written, or must not be kept.
        """
        try:
            with CaptureFolder.opened(self._directory) as folder:
                # torch picks the format by the name's end, so the part needs the final one too.
                part = folder.new_name(self.trace)
                began = time.perf_counter()
                trace.export(folder.path_of(part))
                export_seconds = time.perf_counter() - began
                with folder.open(part) as file:
                    # torch makes it as the umask has it.
                    os.fchmod(file.fileno(), 0o600)
                    reason = refusal() or self._unkept(file)
                    if reason:
                        raise NotWrittenError(reason)
                    written = _measure_trace(file, export_seconds)
                reason = refusal()
                if reason:
                    raise NotWrittenError(reason)
                folder.rename(part, self.trace)
                folder.remove_hidden(self._stem)
        except NotWrittenError:
            raise
        except LostTraceError as error:
            raise NotWrittenError(str(error)) from error
        except Exception as error:  # a full disk, a directory taken away
            # Not the path that torch was given: it means something in this process only.
            reason = _BELOW_DESCRIPTOR.sub(f"{self._directory}/", str(error))
            raise NotWrittenError(f"cannot write the trace: {reason}") from error
        return written

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Write the rank's manifest.

        Raises:
            OSError: It cannot be written.
        """
        with CaptureFolder.opened(self._directory) as folder:
            folder.write(self._manifest, (json.dumps(manifest, indent=2) + "\n").encode())

    def write_summary(self, text: str) -> str:
        """Write what people read of the trace; return the file's name.

        Raises:
            OSError: It cannot be written.
        """
        name = f"{self._stem}.{self._kind}.txt"
        with CaptureFolder.opened(self._directory) as folder:
            folder.write(name, text.encode())
        return name

    def hand_over(
        self, to: Callable[[], Handover | None], names: Sequence[str] = (), *, turn_seconds: float = TURN_S
    ) -> None:
        """Have a service take the trace, the manifest and further files over.

        Args:
            to: Returns the service's newest session; None while there is none.
            names: The further files.
            turn_seconds: Longest wait for the service to begin.

        Raises:
            NotWrittenError: It has not taken them; they stay where they are.
        """
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_RETRY_S)
            try:
                with contextlib.ExitStack() as opened:
                    folder = opened.enter_context(CaptureFolder.opened(self._directory))
                    files = {
                        name: opened.enter_context(folder.open(name)).fileno()
                        for name in (self.trace, self._manifest, *names)
                    }
                    service = to()
                    if service is None:
                        raise HandoverError("no daemon is connected", may_pass=True)
                    service.send(self._directory.name, files, turn_seconds)
                    return
            except HandoverError as error:
                reason, may_pass = str(error), error.may_pass
            except OSError as error:
                reason, may_pass = str(error.strerror or error), False
            if not may_pass:
                break
        raise NotWrittenError(
            f"the daemon has not taken the {self._kind}: {reason}; it is in {self._directory}"
        )

    def remove(self) -> None:
        """Delete the files; the folder, too, if nothing else is in it."""
        if self._directory.is_dir():
            with contextlib.suppress(OSError):
                with CaptureFolder.opened(self._directory) as folder:
                    folder.remove_hidden(self._stem)
                    for name in (self.trace, self._manifest):
                        folder.remove(name)
                self._directory.rmdir()

    def remove_leftovers(self) -> None:
        # Else the folder would be made for that.
        if self._directory.is_dir():
            with contextlib.suppress(OSError), CaptureFolder.opened(self._directory) as folder:
                folder.remove_hidden(self._stem)

    def _unkept(self, file: BinaryIO) -> str:
        """Return why what was written must not be kept, or ''."""
        size = os.fstat(file.fileno()).st_size
        if self._max_bytes and size > self._max_bytes:
            return (
                f"the {self._kind} has {size:,} bytes, {self._max_bytes:,} are allowed;"
                " capture fewer steps or raise --captures-max-bytes-each"
            )
        if self._kind == CaptureKind.TRACE and not _is_whole(file):
            # Not every release of Kineto checks whether it could write.
            return f"the trace was cut off after {size:,} bytes; is the disk of {self._directory} full?"
        return ""


def rank_manifest(
    capture_id: str, trigger: str, identity: Identity, state: CaptureState, outcome: CaptureOutcome
) -> dict[str, Any]:
    """Return the manifest of a rank whose part of a capture ends with an outcome."""
    torch = sys.modules.get("torch")
    return {
        "schema": "torchperfd.capture.rank/1",
        "capture_id": capture_id,
        "run": identity.run,
        "job_name": identity.job_name,
        "world_size": identity.world_size,
        "trigger": trigger,
        "rank": identity.rank,
        "node": identity.node,
        "pid": identity.pid,
        "state": "complete" if outcome.ok else "failed",
        "reason": outcome.reason,
        "step_range": [state.start_step, state.start_step + state.options.steps],
        "steps_made": state.steps_made,
        "file": outcome.file,
        "bytes": outcome.bytes,
        "sha256": outcome.sha256,
        "pause_seconds": round(state.pause_seconds, 3),
        "launches": state.launches,
        "kernels": state.kernels,
        "options": asdict(state.options),
        "torchperfd_version": __version__,
        "python_version": identity.python_version,
        "torch_version": str(getattr(torch, "__version__", "")),
    }


def _is_whole(file: BinaryIO) -> bool:
    """Return whether a Chrome trace has its end: what Kineto writes last, in all releases."""
    file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
    tail = file.read()
    _, named, rest = tail.partition(b'"traceName"')
    # One brace closes the object that contains it; those of values after it come in pairs.
    rest = _STRING.sub(b"", rest).rstrip()
    return bool(named) and rest.endswith(b"}") and rest.count(b"}") == rest.count(b"{") + 1


def _measure_trace(file: BinaryIO, export_seconds: float) -> WrittenTrace:
    digest, counter = hashlib.sha256(), LaunchCounter()
    size = 0
    file.seek(0)
    while chunk := file.read(1 << 20):
        digest.update(chunk)
        counter.add(chunk)
        size += len(chunk)
    counter.end()
    return WrittenTrace(size, digest.hexdigest(), export_seconds, counter.launches, counter.kernels)
