"""Recognises communication kernels by name: those of collective libraries, and code that reads peers' memory.

It is used for kernels whose arguments do not name a process group.
"""

import re
from collections.abc import Callable
from typing import Final

from torchperfd_daemon.errors import UsageError

# Inductor names a kernel after the operators that it fuses, waits for collectives among them, but none of
# its kernels communicates. A fused matrix product and collective counts as compute, which most of it is.
_COMPUTE: Final = re.compile(
    r"^triton_(?:poi|red|per|tem|for|unk|mm|spl|mix)_"
    r"|(?:warp|block|quad|thread|lane|cta|wave)_?all_?reduce"
    r"|gemm|mat_?mul",
    re.IGNORECASE,
)
# Names with these are communication in any case.
_LIBRARIES: Final = (
    r"nccl|rccl|hccl|msccl|multimem|symm_mem|deep_ep|::ep::|nvshmem|cross_device_reduce"
    # Vendors' own libraries: Cambricon, Moore Threads and MetaX, Enflame, Intel, FlagCX.
    r"|(?<![a-z])(?:cncl|mccl|eccl|xccl|flagcx)|oneccl|(?<![a-z])ccl(?:_|::)|Rt64_(?:128_)?PCIE"
    r"|hcom_|(?<![a-z])(?:gloo|ucc|mori|uccl|pplx)::|rocshmem|ishmem|aclshmem"
    r"|quick_?reduce|userbuffers|mnnvl|symmetric_memory|nvls_|lamport"
)
# These are communication unless the name is one of those above.
_COLLECTIVES: Final = (
    r"all_?reduce|all_?gather(?!_copy)|reduce_?scatter|all_?to_?all|a2a(?:dispatch|combine)"
    r"|(?<![a-z])ep_?(?:dispatch|combine)|(?:put|wait)_signal_kernel|symm\w*_barrier|(?:one|two)_?shot_(?:pull|push)"
)
_LIBRARY: Final = re.compile(_LIBRARIES, re.IGNORECASE)
_COLLECTIVE: Final = re.compile(_COLLECTIVES, re.IGNORECASE)


def communicates(further: str | None = None) -> Callable[[str], bool]:
    """Return a function that tests whether a name is a communication kernel's.

    Args:
        further: A regular expression for names that count as well.

    Raises:
        UsageError: ``further`` is no regular expression.
    """
    try:
        asked_for = re.compile(further) if further else None
    except re.error as error:
        raise UsageError(f"{further!r} is no regular expression: {error}") from None

    def is_communication(name: str) -> bool:
        if asked_for is not None and asked_for.search(name):
            return True
        if name.startswith("triton_") and _COMPUTE.match(name):
            return False
        if _LIBRARY.search(name):
            return True
        return _COLLECTIVE.search(name) is not None and _COMPUTE.search(name) is None

    return is_communication
