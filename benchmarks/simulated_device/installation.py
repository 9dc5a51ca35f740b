"""The simulated device of this process, as its training and the client find it."""

from functools import cache
from typing import Final

from benchmarks.simulated_device.device import Device
from benchmarks.simulated_device.process_group import register

BACKEND: Final = "simulated"
"""For ``torch.distributed.init_process_group``."""


@cache
def installed() -> Device:
    """Return the device of this process."""
    return Device()


def install() -> Device:
    """Return the device; from now on its backend can be used, and the client marks its streams."""
    import torchperfd.hooks.accelerator
    from torchperfd.hooks.device_clock import DeviceTimes

    device = installed()
    register(BACKEND, device)
    # In place of CUDA's events, of which there are none without a driver.
    vars(torchperfd.hooks.accelerator)["cuda_device_times"] = lambda: DeviceTimes(
        device.event, lambda event: event.record()
    )
    return device
