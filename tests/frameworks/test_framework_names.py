"""The framework whose loop it is, as the model sees it while a real one fits it."""

import threading
from pathlib import Path

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from torchperfd.hooks.thread_frames import framework_around


@pytest.mark.parametrize("framework", ["lightning", "transformers", "fastai", "ignite", ""])
def test_a_fit_is_seen_to_be_the_frameworks(framework: str, tmp_path: Path) -> None:
    seen: set[str] = set()
    handle = register_module_forward_hook(lambda *_: seen.add(framework_around(threading.get_ident())))
    try:
        fit(framework, tmp_path)
    finally:
        handle.remove()
    assert seen == {framework}


def fit(framework: str, out: Path) -> None:
    if framework == "lightning":
        pytest.importorskip("lightning.pytorch")
        from tests.frameworks import test_lightning

        test_lightning.fit()
    elif framework == "transformers":
        pytest.importorskip("transformers")
        from tests.frameworks import test_transformers

        test_transformers.fit(out)
    elif framework == "fastai":
        pytest.importorskip("fastai")
        from tests.frameworks import test_fastai

        test_fastai.fit(test_fastai.learner())
    elif framework == "ignite":
        pytest.importorskip("ignite")
        from tests.frameworks import test_ignite

        test_ignite.fit()
    else:
        from tests.frameworks.fits import loader, model

        net = model()
        for inputs, _ in loader(2):
            net(inputs)
        assert torch.is_grad_enabled()
