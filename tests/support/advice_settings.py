"""Checks that the names in a setting exist in the installed torch: attributes and keyword arguments."""

import ast
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks
import torch.distributed.fsdp
import torch.distributed.optim
import torch.utils.checkpoint
import torch.utils.data
from torch.nn.parallel import DistributedDataParallel

# What the names of a setting stand for; others are the user's own.
_NAMES: Final[dict[str, Any]] = {
    "torch": torch,
    "DataLoader": torch.utils.data.DataLoader,
    "BatchSampler": torch.utils.data.BatchSampler,
    "SequentialSampler": torch.utils.data.SequentialSampler,
    "RandomSampler": torch.utils.data.RandomSampler,
    "DistributedDataParallel": DistributedDataParallel,
    "model": DistributedDataParallel,
    "layer": torch.distributed.fsdp.FSDPModule,
    "optimizer": torch.optim.Optimizer,
    "work": torch.distributed.Work,
    **dict.fromkeys(("x", "batch", "loss", "host", "tensor", "output"), torch.Tensor),
}
_VARIABLES: Final = frozenset({"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"})
_SPLIT: Final = re.compile(r"; |, or |, and | in place of |  #")
_OTHER: Final = ("torchrun ", "if ", "nonzero")


def unknown_names(setting: str) -> list[str]:
    """Return the names in a setting that the installed torch does not have, and code that does not parse."""
    if setting.startswith("{"):
        json.loads(setting)
        return []
    return [problem for part in _SPLIT.split(setting) for problem in _of_part(part.strip())]


def _of_part(part: str) -> Iterator[str]:
    variable = re.fullmatch(r"([A-Z_]{8,})=\S+", part)
    if variable:
        if variable[1] not in _VARIABLES:
            yield variable[1]
        return
    if part.startswith(_OTHER):
        return
    words = part.split(" ")
    for length in range(len(words), 0, -1):
        text = " ".join(words[:length])
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield from _of_call(node)
            elif isinstance(node, ast.Attribute) and _resolved(node) is _MISSING:
                yield ast.unparse(node)
        return
    yield part


_MISSING: Final = object()
_USERS: Final = object()


def _resolved(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name):
            return _NAMES.get(name, _USERS)
        case ast.Attribute(value=value, attr=attribute):
            owner = _resolved(value)
            return owner if owner in (_USERS, _MISSING) else getattr(owner, attribute, _MISSING)
    return _USERS


def _of_call(node: ast.Call) -> Iterator[str]:
    function = _resolved(node.func)
    keywords = [each.arg for each in node.keywords if each.arg]
    if function in (_USERS, _MISSING) or not keywords:
        return
    try:
        accepted = inspect.signature(function).parameters
    except (TypeError, ValueError):
        # A function of torch's own C++ has its arguments in its docstring alone.
        known = [each for each in keywords if each in (function.__doc__ or "")]
    else:
        kinds = {each.kind for each in accepted.values()}
        known = keywords if inspect.Parameter.VAR_KEYWORD in kinds else [e for e in keywords if e in accepted]
    yield from (f"{ast.unparse(node.func)}({each}=…)" for each in keywords if each not in known)
