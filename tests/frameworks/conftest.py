"""Real frameworks, real fits. Operators that a torchvision for another torch lacks are defined."""

import importlib
import importlib.util
import subprocess
import sys
from typing import Any

import pytest
from tests.unit.client.conftest import alone  # noqa: F401 - a fixture, used by every test here

_kept: list[Any] = []


def _define_what_torchvision_wants() -> None:
    """Declare ``nms`` and ``qnms``: importing torchvision only registers shapes for them.

    A torchvision that has them itself defines them as it is imported, and twice aborts the interpreter.
    So they are declared only where the import, tried in a process of its own, fails.
    """
    if (
        subprocess.run(
            [sys.executable, "-c", "import torchvision"], capture_output=True, check=False
        ).returncode
        == 0
    ):
        return
    import torch

    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


if importlib.util.find_spec("torchvision") is not None:
    # Before any test module is imported: Lightning's metrics and Transformers import torchvision too.
    _define_what_torchvision_wants()


if importlib.util.find_spec("tqdm") is not None:
    # Its monitor's thread would stay until the process ends.
    importlib.import_module("tqdm").tqdm.monitor_interval = 0


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("WANDB_MODE", "disabled")
