"""Measures a DataLoader in a process of its own.

Run by :func:`torchperfd.model.own_commands.script_command`, with the arguments TARGET REQUESTS ANSWERS.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torchperfd.bench.factories import BadTargetError, find_target
from torchperfd.bench.settings import LoaderSetting
from torchperfd.bench.worker_pipe import Answer, explain, serve


def main() -> None:
    """Answer requests until they end."""
    target, requests, answers = sys.argv[1:]
    serve(int(requests), int(answers), lambda: _make(target))


def _make(target: str) -> tuple[Answer, Callable[[Answer], Answer]]:
    """Make the loader that a target names, with the rest of a step if it has one."""
    from torch.utils.data import DataLoader

    from torchperfd.bench.ceiling import measure_ceiling
    from torchperfd.bench.loader_timing import loader_description, measure_loader

    # The number of workers is what is varied.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    found = find_target(target)
    if callable(found) and not isinstance(found, DataLoader):
        found = found()
    loader, step = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(loader, DataLoader) or not (step is None or callable(step)):
        raise BadTargetError(
            f"it gives a {type(loader).__name__}",
            "have it return a DataLoader, or a DataLoader and a function that trains on one batch",
        )

    def answer(request: dict[str, Any]) -> Answer:
        setting, seconds = LoaderSetting(**request["setting"]), request["seconds"]
        try:
            if request["ceiling"] and step is not None:
                return {"ceiling": asdict(measure_ceiling(loader, setting, seconds, step))}
            return {"speed": asdict(measure_loader(loader, setting, seconds, step))}
        except Exception as error:  # noqa: BLE001 - of the script's dataset or step
            return {"unusable": explain(error)}

    return {"facts": asdict(loader_description(loader, has_step=step is not None))}, answer
