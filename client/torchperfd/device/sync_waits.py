"""The lines at which the training thread waits for its device, by samples of its stack."""

import random
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import FrameType
from typing import Final

from torchperfd.model.source_lines import SyncWait
from torchperfd.safety.logs import Faults
from torchperfd.stacks.thread_frames import called_name, line_of
from torchperfd.steps.totals import KindTotals

_SAMPLE_S: Final = (0.05, 0.15)
"""Between samples, at random: training steps have a period as well."""
_LATE_S: Final = 0.002
"""A sample that is later than this had to wait for the interpreter: the training thread ran Python."""
_MAX_FRAMES: Final = 64
_MAX_LINES: Final = 256
_MAX_SAMPLES: Final = 10_000
_REPORTED_LINES: Final = 8
_LONGEST_NAME: Final = 1000

_SYNCHRONIZE: Final = frozenset({"synchronize", ".synchronize"})
_WAITING_CALLS: Final = frozenset(
    {
        *_SYNCHRONIZE,
        "._cuda_synchronize",
        ".copy_",
        ".cpu",
        ".cuda",
        ".item",
        ".masked_select",
        ".nonzero",
        ".numpy",
        ".to",
        ".tolist",
        ".unique",
        "bool",
        "float",
        "int",
    }
)
"""Calls that wait for the device, as far as names show it; those outside ``_SYNCHRONIZE`` are C functions."""

_LOADER: Final = "utils/data/"

_Line = tuple[str, int, str]
"""File, line and call."""


class SyncWaits:
    """Samples where the training thread is, ten times a second, and adds up the time of waiting calls.

    The calls are not replaced, so that they cost no more than without torchperfd.

    Args:
        faults: Where failures of ours are counted.

    Attributes:
        cpu_seconds: CPU time of the sampling thread.
    """

    def __init__(self, faults: Faults) -> None:
        self.cpu_seconds = 0.0
        self._faults = faults
        self._thread: threading.Thread | None = None
        self._training = 0
        self._torch = ""
        self._stopping = threading.Lock()
        # Its own, since the script may have seeded the module's.
        self._chance = random.Random()
        self._names: dict[tuple[object, int], str] = {}
        # Both in nanoseconds by line: samples since the last flush, and what training steps have waited.
        self._samples: deque[tuple[_Line, int]] = deque(maxlen=_MAX_SAMPLES)
        self._waited: dict[_Line, int] = {}
        self._train_ns = self._validate_ns = 0

    @property
    def is_running(self) -> bool:
        """Whether samples are taken."""
        return self._thread is not None

    def start(self, training: int) -> None:
        """Take samples from now on; does nothing but follow the thread when that has begun.

        Args:
            training: The training thread, as from ``threading.get_ident()``.
        """
        self._training = training
        if self._thread is not None or not training:
            return
        package = getattr(sys.modules.get("torch"), "__file__", None)
        self._torch = f"{Path(package).parent}/" if package else ""
        self._stopping.acquire()
        self._thread = threading.Thread(target=self._run, name="torchperfd-sync-waits", daemon=True)
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """End the thread; what was sampled stays."""
        if self._thread is not None and self._stopping.locked():
            self._stopping.release()
            self._thread.join(timeout)

    def waits(self, train: KindTotals, validate: KindTotals) -> tuple[SyncWait, ...]:
        """Return the longest waits in training steps so far, the longest first; called at each flush.

        What was sampled since the last call belongs to the steps that have ended since. Where some of them
        were validation steps, only the part of training counts.

        Args:
            train: All training steps so far.
            validate: All validation steps so far.
        """
        trained, validated = train.ns - self._train_ns, validate.ns - self._validate_ns
        if trained + validated > 0:
            self._train_ns, self._validate_ns = train.ns, validate.ns
            while self._samples:
                line, ns = self._samples.popleft()
                self._waited[line] = self._waited.get(line, 0) + ns * trained // (trained + validated)
        longest = sorted(self._waited.items(), key=lambda item: -item[1])
        if len(longest) > _MAX_LINES:
            self._waited = dict(longest[: _MAX_LINES // 2])
        return tuple(SyncWait(*line, ns) for line, ns in longest[:_REPORTED_LINES] if ns)

    def add(self, frame: FrameType | None, ns: int) -> None:
        """Count a sample: the training thread was at this frame for so long."""
        line = self._waiting_line(frame)
        if line is not None:
            self._samples.append((line, ns))

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            seconds = self._chance.uniform(*_SAMPLE_S)
            due = time.monotonic() + seconds
            if self._stopping.acquire(timeout=seconds):
                return
            now = time.monotonic()
            try:
                if now - due < _LATE_S:
                    self.add(sys._current_frames().get(self._training), int((now - last) * 1e9))
            except Exception as error:  # noqa: BLE001 - a thread of ours may fail, training may not
                self._faults.note("sync waits", error)
                if self._faults.spent("sync waits"):
                    return
            last = now
            self.cpu_seconds = time.thread_time()

    def _waiting_line(self, frame: FrameType | None) -> _Line | None:
        """Return the script's line that waits for the device; None where the thread does something else."""
        found: FrameType | None = None
        call, innermost = "", frame
        for _ in range(_MAX_FRAMES):
            if frame is None:
                break
            if self._is_torch(frame, _LOADER):
                return None  # a loader's tensors are on the CPU
            name = self._called(frame)
            if name in _SYNCHRONIZE or (frame is innermost and name in _WAITING_CALLS):
                found, call = frame, name
            frame = frame.f_back
        # Within torch's own code, such as `Tensor.__format__`, the script's line is the one that called it.
        while found is not None and found.f_back and self._is_torch(found):
            found = found.f_back
        if found is None:
            return None
        return found.f_code.co_filename[-_LONGEST_NAME:], line_of(found), call.removeprefix(".")

    def _is_torch(self, frame: FrameType, part: str = "") -> bool:
        """Return whether a frame is in torch's own code, or in a part of it."""
        return bool(self._torch) and frame.f_code.co_filename.startswith(self._torch + part)

    def _called(self, frame: FrameType) -> str:
        key = frame.f_code, frame.f_lasti
        name = self._names.get(key)
        if name is None:
            if len(self._names) >= _MAX_LINES:
                self._names.clear()
            name = self._names[key] = called_name(*key)
        return name
