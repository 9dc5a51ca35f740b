"""Private names in our own code, and a training loop on a torch that lacks some of torch's.

Run as a program, it takes names one per line, makes each disappear in a process of its own, trains there, and
prints what the client has counted as one line of JSON. A module behind a plus sign is imported ahead of those
that follow.
"""

import ast
import importlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = Path(__file__).parents[3] / "client" / "torchperfd"
_PRIVATE = re.compile(r"_[A-Za-z]\w*")
_DOTTED = re.compile(r"torch(\.\w+)*\._\w+(\.\w+)*")
# Modules of Python's own, and what a method calls its object and its class.
_NOT_TORCH = frozenset({"self", "cls", "sys", "os", "threading"})


def private_names(path: Path) -> Iterator[str]:
    """Yield the private names that a file takes from objects that are not its own, as code or as text."""
    tree = ast.parse(path.read_text())
    slots = {
        id(constant)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__"
        for constant in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _PRIVATE.fullmatch(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in _NOT_TORCH):
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in slots:
            if _PRIVATE.fullmatch(node.value) or _DOTTED.fullmatch(node.value):
                yield from (part for part in node.value.split(".") if _PRIVATE.fullmatch(part))
        elif isinstance(node, ast.ImportFrom | ast.Import):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in (*modules, *(alias.name for alias in node.names)):
                if not any(module.startswith("torchperfd") for module in modules):
                    yield from (part for part in name.split(".") if _PRIVATE.fullmatch(part))


def torchs_names(path: Path) -> Iterator[str]:
    """Yield the private names in a file that are torch's beyond doubt: what it takes from ``torch``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(("torch.", "_torch.")):
            name = ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
            name = node.value
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            name = ".".join([node.module or "", *(alias.name for alias in node.names)])
        elif isinstance(node, ast.Import):
            name = ".".join(alias.name for alias in node.names if alias.name.startswith("torch."))
        else:
            continue
        yield from (part for part in name.split(".") if _PRIVATE.fullmatch(part))


class _WithoutName(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the hooks as if torch called something by another name."""

    def __init__(self, name: str) -> None:
        self._name = re.compile(rf"(?<!self\.)\b{name}\b")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("torchperfd.hooks"):
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        if found is None or found.origin is None:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        assert spec.origin is not None
        module.__file__ = spec.origin
        source = self._name.sub(lambda found: f"{found[0]}_of_another_torch", Path(spec.origin).read_text())
        exec(compile(source, spec.origin, "exec"), vars(module))


def remove(name: str) -> None:
    """Take a name away: from its owner if it is dotted, as ``module:owner.name``, else from our sight."""
    owner, _, attribute = name.rpartition(".")
    if not owner:
        sys.meta_path.insert(0, _WithoutName(name))
        return
    module, _, rest = owner.partition(":")
    found: Any = importlib.import_module(module)
    for part in filter(None, rest.split(".")):
        found = getattr(found, part)
    delattr(found, attribute)


def train() -> dict[str, Any]:
    """Train a loop of every phase there is; return what was counted, and which hooks are off."""
    import torch
    from torch import nn

    import torchperfd

    torch.set_num_threads(1)
    data = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8, 2))
    loss_of = nn.functional.mse_loss

    def epoch(model: nn.Module, loader: Any, scaler: Any = None) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            if scaler is None:
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()

    # Named rather than searched for: a search stops early where the machine is busy.
    model = nn.Linear(4, 2)
    client = torchperfd.attach(model=model, flops=True)
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    epoch(model, loader)
    model.eval()
    with torch.no_grad():
        for inputs, _ in loader:
            model(inputs)
    model.train()
    epoch(model, loader, torch.amp.GradScaler("cpu"))
    torch.save(model.state_dict(), io.BytesIO())
    store: Any = vars(torch.distributed)["HashStore"]()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
    torchperfd.attach(model=parallel)
    epoch(parallel, loader)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    epoch(model, torch.utils.data.DataLoader(data, batch_size=2, num_workers=1))
    client.finish()
    document = client.report().to_dict()
    counted = {
        f"{kind} {name}": phase["calls"]
        for kind in ("train", "validate")
        for name, phase in document[kind]["phases"].items()
    }
    for kind in ("train", "validate"):
        counted[f"{kind} steps"] = document[kind]["steps"]
        counted[f"{kind} samples"] = document[kind]["samples"]
    return {
        "counted": counted,
        "saves": document["checkpoint"]["calls"],
        "ready": document["loader_ready_batches"] is not None,
        "flops": document["flops_per_step"],
        "off": {state.name: state.reason for state in client.hooks if not state.is_on},
        "faults": client.parts.instruments.faults.counts(),
        "text": str(client.report()),
    }


def _main() -> None:
    import torch
    import torch.distributed
    import torch.utils.data

    torch.set_num_threads(1)
    for name in sys.stdin.read().split("\n"):
        if name.startswith("+"):
            importlib.import_module(name.removeprefix("+"))
            continue
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            try:
                if name:
                    remove(name)
                answer = train()
            except BaseException as error:  # noqa: BLE001 - the answer says what became of the child
                answer = {"raised": f"{type(error).__name__}: {error}"}
            with os.fdopen(writing, "w") as pipe:
                json.dump(answer, pipe)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            print(json.dumps({"name": name, **json.load(pipe)}), flush=True)
        os.waitpid(child, 0)


if __name__ == "__main__":
    _main()
