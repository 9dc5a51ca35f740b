"""Real frameworks, real fits. torchvision's wheel wants operators that a CPU build of torch lacks."""

import importlib
import importlib.util
from typing import Any

import pytest
from tests.unit.client.conftest import alone  # noqa: F401 - a fixture, used by every test here

_kept: list[Any] = []


def _define_what_torchvision_wants() -> None:
    """Declare ``nms`` and ``qnms``: importing torchvision only registers shapes for them."""
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
