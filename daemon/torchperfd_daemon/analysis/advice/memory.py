"""The rule on a device's memory that is nearly full."""

from collections.abc import Iterator
from typing import Final

from torchperfd.durations import ns_text
from torchperfd_daemon.analysis.advice.context import AdviceContext
from torchperfd_daemon.analysis.advice.item import Finding
from torchperfd_daemon.analysis.advice.rules import ON_DEVICE, TRAINS, Rule
from torchperfd_daemon.analysis.replay import Edit, HostTime

_NEARLY_FULL: Final = 0.9
# The allocator gives its memory back and asks anew when it cannot serve a request: both wait for the device.
_RETRIES: Final = ("cudaMalloc", "cudaFree", "hipMalloc", "hipFree")


def memory_near_full(context: AdviceContext) -> Iterator[Finding]:
    """The allocator has reserved nearly all of the device's memory: a larger batch would fail.

    The saving is the time of allocations and frees within the steps; a run that fits makes none.
    """
    trace = context.trace
    reserved = int(trace.memory.reserved.max(initial=0))
    if not trace.device_memory or reserved < _NEARLY_FULL * trace.device_memory:
        return
    calls = context.spans(context.named(*_RETRIES))
    taken = context.lasted(calls)
    grows = context.run.device_type.grows_segments
    retried = (
        f"; {len(calls)} allocations and frees in the steps took {ns_text(taken)} {context.a_step}"
        if len(calls)
        else ""
    )
    yield Finding(
        "memory-near-full",
        f"the allocator holds {reserved / trace.device_memory:.0%} of the device's "
        f"{trace.device_memory / 2**30:,.1f} GiB{retried}",
        Edit(host=(HostTime(calls.start, calls.end),), waits=(calls.row,)),
        "make room: recompute activations in backward"
        + (", or let the allocator's segments grow" if grows else ""),
        "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"
        + ("; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" if grows else ""),
        risk=True,
    )


# A server reserves most of the memory by design.
RULES: Final = (Rule("memory-near-full", memory_near_full, (ON_DEVICE, TRAINS)),)
