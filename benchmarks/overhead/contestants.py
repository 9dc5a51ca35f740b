"""The contestants: how each is switched on and off, and the loop of each."""

import gc
import time
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Final

import torch
import torch.autograd
from benchmarks.overhead.switch import Switch, calls_into
from benchmarks.overhead.workload import ACTIONS, WARM_STEPS, Workload
from torch.utils.data import DataLoader

_CONNECT_S: Final = 10.0


class NotInEffectError(Exception):
    """A contestant was on and did not see every step, or was off and still there."""


class Contestant:
    """Nobody: the control, whose difference is the noise of the measurement."""

    distribution = ""
    """What to install, where that is not the benchmark's own environment."""
    switch: Switch
    """While attached, what takes off and puts on what it changes in torch; only of those that do."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def version(self) -> str:
        """Return what is measured, for the table's foot."""
        return ""

    def attach(self) -> None:
        """Begin a round, on."""

    def detach(self) -> None:
        """End a round."""

    def on(self) -> None:
        """Instrument the steps that follow."""

    def off(self) -> None:
        """Do not."""

    def train(self, loader: DataLoader[Any]) -> None:
        self.workload.plain(loader)

    def check(self, steps: int) -> None:
        """Check that of this round all ``steps`` were seen that were trained while on, and no other."""


class _Patching(Contestant):
    """A contestant that changes torch."""

    package = ""

    def attach(self) -> None:
        self.switch = Switch(self.workload.model, self.workload.optimizer)
        self.begin()
        self.train(self.workload.warm_loader)  # some hooks come with the first step
        self.switch.learn()
        self.off()
        directory = str(Path(import_module(self.package).__file__ or "").parent)
        # A collection may fall anywhere, and who listens to those does so on either side.
        gc.disable()
        try:
            called = calls_into(directory, lambda: self.workload.plain(self.workload.warm_loader))
        finally:
            gc.enable()
        if called:
            raise NotInEffectError(f"{self.package} runs while it is off: {sorted(called)}")
        self.on()

    def begin(self) -> None:
        """Attach for real."""

    def on(self) -> None:
        self.switch.on()

    def off(self) -> None:
        self.switch.off()


class _Torchperfd(_Patching):
    """All automatic phases, connected to a daemon; attached and detached in every round."""

    package = "torchperfd"

    def version(self) -> str:
        return f"torchperfd {metadata.version('torchperfd')}"

    def begin(self) -> None:
        import torchperfd

        self._untouched = torch.autograd.backward
        self.client = torchperfd.attach(job="overhead")
        deadline = time.monotonic() + _CONNECT_S
        while not self.client.connected:
            if time.monotonic() > deadline:
                raise NotInEffectError("torchperfd found no daemon")
            time.sleep(0.01)

    def detach(self) -> None:
        self.client.detach()
        if torch.autograd.backward is not self._untouched:
            raise NotInEffectError("torchperfd left a hook behind")

    def check(self, steps: int) -> None:
        seen = self.client.report().to_dict()["train"]
        phases = [*ACTIONS[1:], *(["collective_wait"] if self.workload.replicated else [])]
        calls = {phase: seen["phases"].get(phase, {}).get("calls") for phase in phases}
        steps += WARM_STEPS
        if seen["steps"] != steps or set(calls.values()) != {steps}:
            raise NotInEffectError(f"torchperfd saw {seen['steps']} of {steps} steps, in phases {calls}")


class _TraceMl(_Patching):
    """Automatic mode and ``trace_step``, under ``traceml run`` with its aggregator.

    It offers no way back: it attaches in the first round and stays.
    """

    distribution = "traceml-ai==0.5.0"
    package = "traceml_ai"
    _attached = False

    def version(self) -> str:
        return f"traceml-ai {metadata.version('traceml-ai')}"

    def attach(self) -> None:
        if self._attached:
            self.on()
        else:
            self._traceml = import_module(self.package)
            super().attach()
            self._attached = True
        self._first_step = self._steps()

    def begin(self) -> None:
        self._traceml.init(mode="auto")

    def detach(self) -> None:
        self.off()

    def train(self, loader: DataLoader[Any]) -> None:
        self.workload.in_steps(loader, self._traceml.trace_step)

    def check(self, steps: int) -> None:
        seen = self._steps() - self._first_step
        if seen != steps:
            raise NotInEffectError(f"TraceML saw {seen} of {steps} steps")

    def _steps(self) -> int:
        return int(import_module("traceml_ai.runtime.state").get_trace_session_state().step)


class _LightningSimple(Contestant):
    """Lightning's SimpleProfiler: its ``profile()`` around the actions, without a Trainer."""

    distribution = "lightning==2.6.6"

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        _let_torchvision_import()
        self._profiler = import_module("lightning.pytorch.profilers").SimpleProfiler()

    def version(self) -> str:
        return f"lightning {metadata.version('lightning')}"

    def attach(self) -> None:
        self._profiler.recorded_durations.clear()

    def train(self, loader: DataLoader[Any]) -> None:
        self.workload.in_spans(loader, self._profiler.profile)

    def check(self, steps: int) -> None:
        seen = [len(self._profiler.recorded_durations[action]) for action in ACTIONS]
        if set(seen) != {steps}:
            raise NotInEffectError(f"SimpleProfiler saw {seen} of {steps} steps")


class _Callbacks(Contestant):
    """The pattern of fastai and fastxtend: a learner that calls a pair of callbacks at every event."""

    def attach(self) -> None:
        starts: dict[str, float] = {}
        self._times: dict[str, list[float]] = {action: [] for action in ACTIONS}
        self._callbacks = [_Ends(starts, self._times), _Starts(starts, self._times)]

    def train(self, loader: DataLoader[Any]) -> None:
        self.workload.in_events(loader, self._event)

    def check(self, steps: int) -> None:
        seen = [len(times) for times in self._times.values()]
        if set(seen) != {steps}:
            raise NotInEffectError(f"the callbacks saw {seen} of {steps} steps")

    def _event(self, name: str) -> None:
        for callback in sorted(self._callbacks, key=lambda callback: callback.order):
            callback(name)


class _Callback:
    order = 0

    def __init__(self, starts: dict[str, float], times: dict[str, list[float]]) -> None:
        self.starts = starts
        self.times = times

    def __call__(self, event: str) -> None:
        handler = getattr(self, event, None)
        if handler is not None:
            handler()


class _Starts(_Callback):
    order = 10


class _Ends(_Callback):
    order = -10


def _starting(action: str) -> Any:
    def before(self: _Callback) -> None:
        self.starts[action] = time.perf_counter()

    return before


def _ending(action: str) -> Any:
    def after(self: _Callback) -> None:
        self.times[action].append(time.perf_counter() - self.starts[action])

    return after


for _action in ACTIONS:
    setattr(_Starts, f"before_{_action}", _starting(_action))
    setattr(_Ends, f"after_{_action}", _ending(_action))


class _RecordFunction(Contestant):
    """``record_function`` around the actions while no profiler runs."""

    def train(self, loader: DataLoader[Any]) -> None:
        self.workload.in_spans(loader, torch.profiler.record_function)


class _TorchProfiler(Contestant):
    """``torch.profiler`` recording CPU activity; starting and stopping it is not counted."""

    def attach(self) -> None:
        self.on()

    def detach(self) -> None:
        self.off()

    def on(self) -> None:
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self._profiler.start()
        if not torch.autograd.profiler._is_profiler_enabled:
            raise NotInEffectError("torch.profiler does not run")

    def off(self) -> None:
        self._profiler.stop()


def _let_torchvision_import() -> None:
    """Define two operators that torchvision expects and the CPU build of torch lacks."""
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            library.define(schema)  # type: ignore[no-untyped-call]


_libraries: list[torch.library.Library] = []  # an operator lives as long as its library

CONTESTANTS: Final[dict[str, type[Contestant]]] = {
    "nothing (A/A)": Contestant,
    "torchperfd": _Torchperfd,
    "TraceML": _TraceMl,
    "Lightning SimpleProfiler": _LightningSimple,
    "fastxtend-style callbacks": _Callbacks,
    "record_function x7, off": _RecordFunction,
    "torch.profiler, CPU": _TorchProfiler,
}
