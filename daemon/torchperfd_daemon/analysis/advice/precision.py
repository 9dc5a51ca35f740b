"""Rules on number formats and device memory: needless double or single precision, and nearly full memory."""

import re
from collections.abc import Iterator
from typing import Final

import numpy as np

from torchperfd.model.formatting import ns_text
from torchperfd_daemon.analysis.advice.context import AdviceContext, decoded
from torchperfd_daemon.analysis.advice.replay import DeviceWork, Edit, HostTime
from torchperfd_daemon.analysis.advice.rules import ON_DEVICE, TRAINS, Finding, Rule
from torchperfd_daemon.analysis.breakdown import KERNEL
from torchperfd_daemon.analysis.trace import Flags, Int64

# In single precision an operator moves half the bytes and computes twice as many numbers at once, on any
# processor; on many GPUs the gap is far wider.
_DOUBLE_COST: Final = 2
# The operators that autocast runs in half precision: matrix products, convolutions, attention.
_ELIGIBLE: Final = re.compile(
    r"aten::(?:addmm|addmv|addbmm|baddbmm|bmm|mm|mv|matmul|linear|_scaled_dot_product\w*|\w*attention\w*"
    r"|\w*convolution\w*|conv\w*|_thnn_fused\w*|lstm_\w*|gru_\w*)"
)
# Kernels of such operators on single precision: those of cuBLAS, cuDNN, CUTLASS, fused attention, MIOpen and
# rocBLAS. For kernels that no operator of known types launched, such as those of a CUDA graph.
_SINGLE_KERNELS: Final = re.compile(
    r"sgem[mv]|scudnn|f32f32|tf32|gemm_f32|nvjet_s|simt_s\w*(?:gemm|fprop|dgrad|wgrad)"
    r"|s1688(?:gemm|fprop|dgrad|wgrad|[a-z]*conv)|(?:fmha|attention)\w*_f32|Cijk_\w*_S[BS]_"
    r"|(?:gem[mv]|convol|conv2d|dgrad|wgrad|fprop|winograd)\w*<(?:.*\W)?float\b",
    re.IGNORECASE,
)
# Kernels on half precision or less, whatever the operator that launched them was given.
_HALF_KERNELS: Final = re.compile(
    r"fp?16|half|bfloat16|hmma|hgemm|h884|s884|h1688|h16816|s16816|s161616|e4m3|e5m2|fp8|_[HB][BHS]S?_"
)
# At least this part of the kernels' time must be eligible, or the casts cost more than they save.
_MIN_ELIGIBLE: Final = 0.2
# The least speed-up of tensor cores on half precision; real layers gain this much after the casts.
_HALF_SPEED: Final = 2


def float64(context: AdviceContext) -> Iterator[Finding]:
    """Operators work on tensors of doubles. Half of their work goes away, not their dispatch."""
    trace = context.trace
    rows = context.calls.row
    chosen = _with_tensors_of(context, rows, "double")
    if not chosen.any():
        return
    if context.on_device:
        launched = context.launched_by(rows[chosen])
        worked = int((trace.end[launched] - trace.start[launched]).sum())
        edit = Edit(device=(DeviceWork(launched, 1 / _DOUBLE_COST),))
    else:
        worked = int(context.calls.work_ns[chosen].sum())
        edit = context.without_host(context.per_step(worked * (1 - 1 / _DOUBLE_COST)))
    yield Finding(
        "float64",
        f"{int(chosen.sum()) / context.count:,.0f} operators {context.a_step} compute in double precision: "
        f"{ns_text(context.per_step(worked))}",
        edit,
        "compute in single precision; doubles often come from NumPy, whose arrays are double by default",
        "model.float(); torch.from_numpy(array).float()",
    )


def mixed_precision(context: AdviceContext) -> Iterator[Finding]:
    """Matrix products and convolutions run in single precision on a device. Half of their time goes away.

    There is no finding on the CPU, where half precision is faster on few processors and the trace does not
    name the processor, nor if less than a fifth of the kernels' time is eligible.
    """
    trace = context.trace
    every = context.all_device_rows[trace.of_categories({KERNEL})[context.all_device_rows]]
    single = every[_single(context, every)]
    kernels, launched = (context.in_steps(rows) for rows in (every, single))
    whole = int((trace.end[kernels] - trace.start[kernels]).sum())
    worked = int((trace.end[launched] - trace.start[launched]).sum())
    if not whole or worked < _MIN_ELIGIBLE * whole:
        return
    yield Finding(
        "mixed-precision",
        f"{worked / whole:.0%} of the kernels' time ({ns_text(context.per_step(worked))} {context.a_step})"
        " are matrix products and convolutions in single precision",
        Edit(device=(DeviceWork(single, 1 / _HALF_SPEED),)),
        "run the forward pass under autocast, in bfloat16",
        f"with torch.autocast({context.run.device_type.quoted}, dtype=torch.bfloat16): "
        + ("loss = criterion(model(x), y)" if context.run.trains else "y = model(x)"),
    )


def _single(context: AdviceContext, kernels: Int64) -> Flags:
    """Return which kernels compute products in single precision.

    The operator that launched a kernel decides if it is one of torch's and its types are recorded. Otherwise
    the kernel's name decides: a graph's kernels have no operator of their own.
    """
    trace, operator = context.trace, context.operator_of(kernels)
    is_torchs = np.fromiter((name.startswith("aten::") for name in trace.names), np.bool_)
    has_types = (operator >= 0) & is_torchs[trace.name[operator]] & (trace.type[operator] > 0)
    eligible = np.fromiter((_ELIGIBLE.match(name) is not None for name in trace.names), np.bool_)
    by_operator = eligible[trace.name[operator]] & _with_tensors_of(context, operator, "float")
    by_name = np.isin(kernels, trace.named(kernels, lambda name: _SINGLE_KERNELS.search(name) is not None))
    half = np.isin(kernels, trace.named(kernels, lambda name: _HALF_KERNELS.search(name) is not None))
    single: Flags = np.where(has_types, by_operator, by_name) & ~half
    return single


def _with_tensors_of(context: AdviceContext, rows: Int64, dtype: str) -> Flags:
    """Return which operators have an input of this type that is a tensor and no mere number."""
    trace = context.trace
    pairs = trace.type[rows].astype(np.int64) * len(trace.shapes) + trace.shape[rows]
    keys, inverse = np.unique(pairs, return_inverse=True)
    types_of = decoded(trace.types)
    shapes_of = decoded(trace.shapes)
    found = np.zeros(len(keys), dtype=np.bool_)
    for at, key in enumerate(keys.tolist()):
        types, dims = types_of(key // len(trace.shapes)), shapes_of(key % len(trace.shapes))
        found[at] = any(each == dtype and dim for each, dim in zip(types, dims, strict=False))
    flags: Flags = found[inverse]
    return flags


RULES: Final = (
    Rule("float64", float64),
    Rule("mixed-precision", mixed_precision, (ON_DEVICE,)),
)


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
MEMORY_RULES: Final = (Rule("memory-near-full", memory_near_full, (ON_DEVICE, TRAINS)),)
