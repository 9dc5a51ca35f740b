"""What the torch that the tests run on can do: tests of what an older one lacks are skipped there."""

from typing import Final

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

VERSION: Final = tuple(int(part) for part in torch.__version__.split(".")[:2])

COUNTS_FLOPS: Final = hasattr(TorchDispatchMode, "ignore_compile_internals")

needs_flops: Final = pytest.mark.skipif(
    not COUNTS_FLOPS,
    reason="this torch cannot count FLOPs without being in the way of torch.compile",
)
needs_muting: Final = pytest.mark.skipif(
    not hasattr(torch.profiler.profile, "toggle_collection_dynamic"),
    reason="this torch's profiler cannot be muted in a forked child",
)
