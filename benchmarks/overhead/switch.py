"""Take an instrumentation off torch and put it back within microseconds.

The machine's speed changes every few hundred milliseconds, so that off and on must be a few
milliseconds apart: far less than it takes to attach. A switch therefore remembers what
attaching changed, and proves that nothing of the instrumentation runs while it is off.
"""

import sys
from collections.abc import Callable, Collection, Iterator
from importlib import import_module
from types import FrameType
from typing import Any, Final

import torch
import torch.autograd
import torch.distributed
import torch.optim
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.utils.data import DataLoader, dataloader

HOOKS: Final = "hooks"
"""What stands for all hooks in torch's own registries, where attributes have their names."""

_MISSING: Final = object()


class Switch:
    """What changed of torch, one model and one optimizer since this was made."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        owners = [DataLoader, nn.Module, torch.Tensor, torch.autograd, torch.optim.Optimizer]
        owners += [type(optimizer), dataloader._BaseDataLoaderIter, dataloader._SingleProcessDataLoaderIter]
        owners += [torch.distributed, c10d.ProcessGroup, c10d.Work, c10d.Reducer]
        self._before = [(owner, dict(vars(owner))) for owner in [*owners, model, optimizer]]
        self._registries = [(hooks, dict(hooks)) for hooks in _hook_registries(model, optimizer)]
        self._is_on = False
        self._patches: list[tuple[Any, str, Any, Any]] = []
        self._hooks: list[tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]]] = []

    def learn(self) -> None:
        """What is different by now is what is to be switched, and is on."""
        self._is_on = True
        self._patches = [
            (owner, name, names.get(name, _MISSING), value)
            for owner, names in self._before
            for name, value in dict(vars(owner)).items()
            if callable(value) and names.get(name, _MISSING) is not value
        ]
        self._hooks = [
            (hooks, before, dict(hooks)) for hooks, before in self._registries if dict(hooks) != before
        ]

    @property
    def names(self) -> set[str]:
        """The attributes that are switched, and ``HOOKS`` if there are any."""
        return {name for _, name, _, _ in self._patches} | ({HOOKS} if self._hooks else set())

    def on(self, leave_out: Collection[str] = ()) -> None:
        """Put everything on but what is left out by name, unless it is on already."""
        if self._is_on:
            return
        self._is_on = True
        for owner, name, _, patched in self._patches:
            if name not in leave_out:
                setattr(owner, name, patched)
        for hooks, _, after in self._hooks:
            if HOOKS not in leave_out:
                hooks.clear()
                hooks.update(after)

    def off(self) -> None:
        """Take everything off, unless it is."""
        if not self._is_on:
            return
        self._is_on = False
        for owner, name, original, _ in self._patches:
            if original is not _MISSING:
                setattr(owner, name, original)
            elif name in vars(owner):
                delattr(owner, name)
        for hooks, before, _ in self._hooks:
            hooks.clear()
            hooks.update(before)


def calls_into(directory: str, action: Callable[[], None]) -> set[str]:
    """Return the functions below a directory that an action calls on this thread."""
    called: set[str] = set()

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(directory):
            called.add(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return called


def _hook_registries(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[dict[Any, Any]]:
    for owner in (import_module("torch.optim.optimizer"), nn.modules.module, optimizer, *model.modules()):
        for name, value in vars(owner).items():
            if "hooks" in name and isinstance(value, dict):
                yield value
