"""Changes torch in a trial process, and records what the script is made of."""

import contextlib
import functools
import inspect
import os
import sys
import sysconfig
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from torchperfd import errors
from torchperfd.hooks.thread_frames import line_of
from torchperfd.model.process import available_cpus
from torchperfd_cli.tune.trial import (
    AMP,
    COMPILE,
    LOADER,
    MATMUL,
    OPTIMIZER,
    THREADS,
    ZERO_GRAD,
    Change,
    ScriptFacts,
    ScriptLoader,
    ScriptOptimizer,
    Site,
)

MAX_LOSSES: Final = 10
_MAX_BATCHES: Final = 16
_MAX_ZEROING: Final = 64
_OTHERS: Final = (
    str(Path(__file__).parents[1]) + os.sep,
    str(Path(errors.__file__).parent) + os.sep,
    sysconfig.get_paths()["stdlib"] + os.sep,
    "<",
)


class Gate:
    """Holds the training thread while another process is measured."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._is_open.set()
        self._is_waiting = threading.Event()

    def close(self, timeout: float) -> bool:
        """Hold the training thread; return whether it has come here within so many seconds."""
        self._is_waiting.clear()
        self._is_open.clear()
        return self._is_waiting.wait(timeout)

    def open(self) -> None:
        """Let it go on."""
        self._is_open.set()

    def pass_through(self) -> None:
        """Wait here while the gate is closed; on the training thread."""
        if not self._is_open.is_set():
            self._is_waiting.set()
            self._is_open.wait()


class TorchPatches:
    """Applies changes, and records.

    Attributes:
        gate: Where training can be held; at the begin of a backward pass.
        losses: The first scalars on which ``backward`` was called; on their device.
    """

    def __init__(self, changes: Iterable[Change]) -> None:
        self._values = {each.target: dict(each.values) for each in changes}
        self._pid = os.getpid()
        self.gate = Gate()
        self.losses: list[torch.Tensor] = []
        self._batches: list[int] = []
        self._sampler: object = None
        self._loaders: dict[int, ScriptLoader] = {}
        self._drawn: list[ScriptLoader] = []
        self._optimizers: list[ScriptOptimizer] = []
        self._constructing: set[int] = set()
        self._zeroing: list[Site] = []
        self._zeroing_seen = 0
        self._threads = torch.get_num_threads()
        self._threads_site: Site | None = None
        self._precision = torch.get_float32_matmul_precision()
        self._depth = 0
        self._is_compiled = False

    def install(self) -> None:
        """Change torch; called right after its import."""
        torch.manual_seed(0)
        self._patch_loaders()
        self._patch_optimizers()
        self._patch_zero_grad(torch.optim.Optimizer)
        self._patch_zero_grad(torch.nn.Module)
        self._patch_threads()
        self._patch_losses()
        self._patch_backward()
        precision = self._values.get(MATMUL, {}).get("precision")
        if precision is not None:
            torch.set_float32_matmul_precision(precision)
            _replacing(torch, "set_float32_matmul_precision")(lambda _precision: None)
        if AMP in self._values or COMPILE in self._values:
            self._patch_calls()

    def facts(self) -> ScriptFacts:
        return ScriptFacts(
            loaders=tuple(self._drawn),
            optimizers=tuple(self._optimizers),
            zeroing=tuple(self._zeroing),
            threads=self._threads,
            threads_site=self._threads_site,
            cpus=available_cpus(),
            uses_cuda=bool(torch.cuda.is_initialized()),  # type: ignore[no-untyped-call]
            matmul_precision=self._precision,
        )

    def loss_values(self) -> tuple[float, ...]:
        """Return the first losses; waits for the device that has them."""
        return tuple(float(loss) for loss in list(self.losses))

    def batch_sums(self) -> tuple[int, ...]:
        return tuple(self._batches)

    @property
    def _is_here(self) -> bool:
        """Whether this is the process that trains, and not a forked worker."""
        return os.getpid() == self._pid

    def _patch_loaders(self) -> None:
        values = self._values.get(LOADER)
        signature = inspect.signature(DataLoader.__init__)
        make, iterate, batches_of = DataLoader.__init__, DataLoader.__iter__, BatchSampler.__iter__

        @_replacing(DataLoader, "__init__")
        def init(loader: Any, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(loader, *args, **kwargs)
            given = bound.arguments
            workers = given.get("num_workers", 0)
            is_iterable = isinstance(given.get("dataset"), IterableDataset)
            facts = ScriptLoader(
                site=calling_site(),
                name=type(loader).__name__,
                workers=workers,
                prefetch=given.get("prefetch_factor") or (2 if workers else 0),
                is_persistent=given.get("persistent_workers", False),
                is_pinned=given.get("pin_memory", False),
                is_iterable=is_iterable,
            )
            if values and not is_iterable:
                given.update(_loader_arguments(given, values))
            make(*bound.args, **bound.kwargs)
            self._loaders[id(loader)] = facts

        @_replacing(DataLoader, "__iter__")
        def begin(loader: Any) -> Any:
            facts = self._loaders.get(id(loader))
            if facts is not None and facts not in self._drawn and torch.is_grad_enabled():
                self._drawn.append(facts)
            return iterate(loader)

        @_replacing(BatchSampler, "__iter__")
        def draw(sampler: Any) -> Iterator[Any]:
            if self._sampler is None and torch.is_grad_enabled():
                self._sampler = sampler
            for batch in batches_of(sampler):
                if sampler is self._sampler and len(self._batches) < _MAX_BATCHES:
                    self._batches.append(zlib.crc32(repr(batch).encode()))
                yield batch

    def _patch_optimizers(self) -> None:
        for kind in vars(torch.optim).values():
            if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
                names = inspect.signature(kind.__init__).parameters
                if "foreach" in names and "__init__" in vars(kind):
                    self._patch_optimizer(kind)

    def _patch_optimizer(self, kind: Any) -> None:
        values = self._values.get(OPTIMIZER)
        make, signature = kind.__init__, inspect.signature(kind.__init__)
        can_fuse = "fused" in signature.parameters

        @_replacing(kind, "__init__")
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            if id(optimizer) in self._constructing:  # the class below, called by this one
                make(optimizer, *args, **kwargs)
                return
            bound = signature.bind(optimizer, *args, **kwargs)
            given = bound.arguments
            site, name = calling_site(), type(optimizer).__name__
            fused, foreach = given.get("fused"), given.get("foreach")
            if values and (can_fuse or "fused" not in values):
                given["foreach"] = values.get("foreach")
                if can_fuse:
                    given["fused"] = values.get("fused")
            self._constructing.add(id(optimizer))
            try:
                make(*bound.args, **bound.kwargs)
            finally:
                self._constructing.discard(id(optimizer))
            tensors = sum(len(group["params"]) for group in optimizer.param_groups)
            facts = ScriptOptimizer(site, name, can_fuse, True, fused, foreach, tensors)
            if facts not in self._optimizers:
                self._optimizers.append(facts)

    def _patch_zero_grad(self, owner: Any) -> None:
        values, zero = self._values.get(ZERO_GRAD), owner.zero_grad

        @_replacing(owner, "zero_grad")
        def zero_grad(target: Any, set_to_none: bool = True) -> None:
            if not set_to_none and self._zeroing_seen < _MAX_ZEROING:
                self._zeroing_seen += 1
                site = calling_site()
                if site is not None and site not in self._zeroing:
                    self._zeroing.append(site)
            zero(target, set_to_none=set_to_none if values is None else values["set_to_none"])

    def _patch_threads(self) -> None:
        count = self._values.get(THREADS, {}).get("threads")
        set_threads = torch.set_num_threads
        if count is not None:
            set_threads(count)

        @_replacing(torch, "set_num_threads")
        def set_num_threads(number: int) -> None:
            if not self._is_here:  # a worker of a DataLoader sets it to one
                set_threads(number)
                return
            self._threads, self._threads_site = number, calling_site()
            if count is None:
                set_threads(number)

    def _patch_losses(self) -> None:
        losses = self.losses
        original: Any = torch.Tensor.backward

        @_replacing(torch.Tensor, "backward")
        def backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if len(losses) < MAX_LOSSES and tensor.numel() == 1:
                losses.append(tensor.detach().clone())
            return original(tensor, *args, **kwargs)

    def _patch_backward(self) -> None:
        gate, original = self.gate, torch.autograd.backward

        @_replacing(torch.autograd, "backward")
        def backward(*args: Any, **kwargs: Any) -> Any:
            gate.pass_through()
            return original(*args, **kwargs)

    def _patch_calls(self) -> None:
        """Run the outermost modules of a step under autocast; compile the first that has parameters."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        amp, compiles = AMP in self._values, COMPILE in self._values
        original: Any = torch.nn.Module.__call__

        @_replacing(torch.nn.Module, "__call__")
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            outermost = not self._depth and module.training and torch.is_grad_enabled()
            if not outermost or not self._is_here:
                return original(module, *args, **kwargs)
            if compiles and not self._is_compiled and next(module.parameters(), None) is not None:
                self._is_compiled = True
                module.compile()
                if not amp:
                    setattr(torch.nn.Module, "__call__", original)  # noqa: B010 - so that no graph has this function in it
            context = torch.autocast(device, dtype=torch.bfloat16) if amp else contextlib.nullcontext()
            self._depth += 1
            try:
                with context:
                    return original(module, *args, **kwargs)
            finally:
                self._depth -= 1


def calling_site() -> Site | None:
    """Return the innermost line of the calling stack that is the script's own; None without one."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "site-packages" not in name and not name.startswith(_OTHERS):
            return Site(name, line_of(frame))
        frame = frame.f_back  # type: ignore[assignment] # None ends the loop
    return None


def _loader_arguments(given: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a loader that change; those that need workers are dropped where it has none."""
    workers = values.get("num_workers", given.get("num_workers", 0))
    if workers:
        return values
    without = {
        "prefetch_factor": None,
        "persistent_workers": False,
        "timeout": 0,
        "multiprocessing_context": None,
    }
    return values | {name: value for name, value in without.items() if name in given}


def _replacing(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Return a decorator that puts a function in the place of one of a class or a module."""
    return lambda function: setattr(owner, name, functools.wraps(vars(owner)[name])(function))
