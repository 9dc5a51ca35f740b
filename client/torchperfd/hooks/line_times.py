"""Lines of the script at which its training thread waits: in collectives of its own, and for its device.

Collectives are timed: how many, how long, at which line. Waits for the device are found by samples of the
thread's stack.
"""

import random
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final

from torchperfd.hooks.thread_frames import called_name, line_at, line_of
from torchperfd.model.source_lines import SyncWait, TimedLine
from torchperfd.safety.logs import Faults
from torchperfd.steps.totals import KindTotals

if TYPE_CHECKING:
    from torch import Tensor, nn

WAIT: Final = "wait"
BETWEEN_RANKS: Final = frozenset({"send", "recv", "recv_anysource"})
"""Methods of ``ProcessGroup`` that are no collectives."""

_PASSED: Final = frozenset(
    {"torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", "contextlib"}
)
"""Modules between a call of the script and a method of ``ProcessGroup``."""
_OF_THE_MODEL: Final = ("torch.nn", "torch.optim", "torch.autograd", "torch.utils", "torch.distributed")
_MEASURING: Final = ("torchmetrics", "torcheval", "ignite.metrics")
_TRAINING_STEP: Final = "training_step"
"""Lightning calls it within a forward, or within an optimizer's step."""
_MAX_CALLING_FRAMES: Final = 200
_MAX_LINES: Final = 256
_MAX_TENSORS: Final = 64
_SIZES_READ: Final = 64
_REPORTED_LINES: Final = 8
_MAX_NAME: Final = 1000
_MAX_BYTES: Final = 64 << 10
"""Larger ones carry more than metrics: a script that averages gradients by itself needs them."""


@dataclass(slots=True)
class _Site:
    code: CodeType
    offset: int
    calls: int = 0
    ns: int = 0
    is_own: bool = True


class ScriptCollectives:
    """Counts and times them. Fixed memory, and about a microsecond for each."""

    def __init__(self) -> None:
        # By the id of a code object, which the site keeps alive: its hash takes longer than a collective.
        self._sites: dict[tuple[int, int], _Site] = {}
        self._models: Sequence[weakref.ref[nn.Module]] = ()

    def install(self, models: "Sequence[weakref.ref[nn.Module]]") -> None:
        """Begin.

        Args:
            models: Those that are trained; the collection may change.
        """
        self._models = models

    def note(self, name: str, arguments: tuple[Any, ...], began_ns: int) -> None:
        """A method of ``ProcessGroup`` or ``Work`` has returned; called by what replaces it.

        Args:
            name: The method's.
            arguments: Its own, without the object.
            began_ns: When it was called, on the performance counter.
        """
        took = perf_counter_ns() - began_ns
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__") in _PASSED:
            frame = frame.f_back
        if frame is None:
            return
        code, offset = frame.f_code, frame.f_lasti
        key = id(code), offset
        site = self._sites.get(key)
        if site is None:
            if len(self._sites) >= _MAX_LINES:
                return
            is_own = _is_of_script(frame) and not self._is_gradient(arguments)
            site = self._sites[key] = _Site(code, offset, is_own=is_own)
        if not site.is_own or name in BETWEEN_RANKS or not self._is_training():
            return
        if name != WAIT:
            site.calls += 1
            # Each size takes some microseconds to read.
            if (site.calls < _SIZES_READ or site.calls % _SIZES_READ == 0) and _bytes(arguments) > _MAX_BYTES:
                site.is_own = False
        site.ns += took

    def longest(self) -> tuple[TimedLine, ...]:
        """Return the lines with most time in such collectives, the longest first; on the flushing thread."""
        sites = [site for site in list(self._sites.values()) if site.is_own and site.ns]
        sites.sort(key=lambda site: -site.ns)
        return tuple(
            TimedLine(
                site.code.co_filename[-_MAX_NAME:],
                line_at(site.code, site.offset),
                called_name(site.code, site.offset).removeprefix("."),
                site.calls,
                site.ns,
            )
            for site in sites[:_REPORTED_LINES]
        )

    def _is_training(self) -> bool:
        """Return whether any model is in training mode; True while none is known."""
        known = False
        for reference in self._models:
            model = reference()
            if model is not None:
                if model.training:
                    return True
                known = True
        return not known

    def _is_gradient(self, arguments: tuple[Any, ...]) -> bool:
        """Return whether a call is for a model's gradients, or as many numbers; asked once for each line."""
        tensors = list(_tensors(arguments))
        places = {tensor.data_ptr() for tensor in tensors}
        total = sum(tensor.numel() for tensor in tensors)
        models = [model for reference in self._models if (model := reference()) is not None]
        for model in models:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            if trained and sum(parameter.numel() for parameter in trained) == total:
                return True
            gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
            if any(gradient.data_ptr() in places for gradient in gradients):
                return True
        return False


def _is_of_script(frame: FrameType) -> bool:
    """Return whether a call belongs to the script, and neither to a model's work nor to torch's own."""
    if _is_within(frame, ("torch",)):
        return False
    above: FrameType | None = frame
    for _ in range(_MAX_CALLING_FRAMES):
        if above is None:
            return True
        if above.f_code.co_name == _TRAINING_STEP or _is_within(above, _MEASURING):
            return True
        if _is_within(above, _OF_THE_MODEL):
            return False
        above = above.f_back
    return False


def _is_within(frame: FrameType, packages: tuple[str, ...]) -> bool:
    module = str(frame.f_globals.get("__name__"))
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _bytes(arguments: tuple[Any, ...]) -> int:
    return sum(tensor.nbytes for tensor in _tensors(arguments))


def _tensors(arguments: tuple[Any, ...]) -> "Iterator[Tensor]":
    """Yield the tensors of a call, in lists of any depth as the methods take them; at most some."""
    parts, left = list(arguments[:2]), _MAX_TENSORS
    while parts and left:
        part, left = parts.pop(), left - 1
        if isinstance(part, (list, tuple)):
            parts += part[:_MAX_TENSORS]
        elif hasattr(part, "data_ptr"):
            yield part


_SAMPLE_S: Final = (0.05, 0.15)
"""Between samples, at random: training steps have a period as well."""
_LATE_S: Final = 0.002
"""A sample that is later than this had to wait for the interpreter: the training thread ran Python."""
_MAX_WAITING_FRAMES: Final = 64
_MAX_SAMPLES: Final = 10_000

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
        for _ in range(_MAX_WAITING_FRAMES):
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
        return found.f_code.co_filename[-_MAX_NAME:], line_of(found), call.removeprefix(".")

    def _is_torch(self, frame: FrameType, part: str = "") -> bool:
        return bool(self._torch) and frame.f_code.co_filename.startswith(self._torch + part)

    def _called(self, frame: FrameType) -> str:
        key = frame.f_code, frame.f_lasti
        name = self._names.get(key)
        if name is None:
            if len(self._names) >= _MAX_LINES:
                self._names.clear()
            name = self._names[key] = called_name(*key)
        return name
