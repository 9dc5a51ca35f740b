"""Every setting that advice names exists in the installed torch."""

import inspect

import pytest
import torch
from tests.support.advice_settings import unknown_names
from torch.utils import _foreach_utils

from torchperfd_daemon.analysis.advice.updating import TORCH_OPTIMIZERS


@pytest.mark.parametrize(
    "setting",
    [
        "torch.optim.NorMuon(..., foreach=True)",
        "torch.optim.LBFGS(..., foreach=True)",
        "DataLoader(..., workers=4)",
        "TORCH_ALLOC_CONFIG=expandable_segments:True",
        "model.register_hook_of_communication(None)",
        "torch.distributed.fsdp.fully_shard(layer, reshard=False)",
    ],
)
def test_unknown_names_of_a_setting_are_found(setting: str) -> None:
    assert unknown_names(setting)


def test_optimizer_table_is_that_of_the_installed_torch() -> None:
    classes = {
        name: set(inspect.signature(kind).parameters)
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and kind is not torch.optim.Optimizer
    }
    assert set(TORCH_OPTIMIZERS) == set(classes)
    for name, arguments in classes.items():
        assert TORCH_OPTIMIZERS[name].foreach == ("foreach" in arguments), name
        assert bool(TORCH_OPTIMIZERS[name].fused_on) == ("fused" in arguments), name


def test_optimizer_options_are_for_devices_that_torch_supports() -> None:
    fused = set(_foreach_utils._get_fused_kernels_supported_devices())
    foreach = set(_foreach_utils._get_foreach_kernels_supported_devices())
    for name, kind in TORCH_OPTIMIZERS.items():
        assert kind.fused_on <= fused, name
        for device in ("cuda", "xpu", "mtia", "mps", "cpu"):
            if kind.option_for(device) == "foreach=True":
                assert device in foreach, name
