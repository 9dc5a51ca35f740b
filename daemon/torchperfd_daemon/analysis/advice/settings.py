"""Rules whose remedy is a setting: of the loader, of number formats, and of device memory.

Workers, whole batches and pinned memory; needless double or single precision, and nearly full memory.
"""

import re
from collections.abc import Iterator
from typing import Final

import numpy as np

from torchperfd.model.formatting import duration, ns_text
from torchperfd.model.loader_facts import LoaderFacts
from torchperfd.model.verdict_document import SettledAdvice
from torchperfd_daemon.analysis.advice.context import AdviceContext
from torchperfd_daemon.analysis.advice.edits import DeviceWork, Edit, HostTime, Spans
from torchperfd_daemon.analysis.advice.recording import decoded
from torchperfd_daemon.analysis.advice.rules import IDLE_KNOWN, ON_DEVICE, REPEATS, TRAINS, Finding, Rule
from torchperfd_daemon.analysis.categories import DRAW, KERNEL
from torchperfd_daemon.analysis.trace import Flags, Int64
from torchperfd_daemon.loader_workers import advise_loader

_IN_PROCESS: Final = "_SingleProcessDataLoaderIter"
# A rank that waits for a smaller part of the time than the run's advice is on has another loader, or none.
_LIKE_ITS_RANK: Final = 0.5
# The time to take over a batch that a worker has ready.
_HAND_OVER_NS: Final = 1_000_000
# What a call to copy takes if the host does not stage it.
_LAUNCH_NS: Final = 10_000
_FROM_PAGEABLE: Final = "HtoD (Pageable"
_TO_PAGEABLE: Final = "-> Pageable)"
# By which factor pinned memory is copied faster, by the first number of the GPU's compute capability. The
# host copies pageable memory first, with 6 GB/s on an H200; pinned memory is as fast as PCIe 3, 4 or 5.
_PINNED_SPEED: Final = ((9, 8), (8, 4), (0, 2))


def loader_workers(context: AdviceContext) -> Iterator[Finding]:
    """Batches are made while the step waits, and could be made during the step before, or at less cost.

    `advise_loader` computes the change and its saving, as for the live verdict. It reads the client's data
    in the trace on unrecorded steps. A trace without them shows only the wait, and not the number of workers:
    they now deliver one batch a step, and twice as many deliver two. Taking over a finished batch is not
    waiting.

    What the run was advised is repeated instead: a trace of a few steps has no better figures.
    """
    draws = context.annotated(DRAW)
    waited = context.lasted(draws)
    if not len(draws) or waited <= 0:
        return
    trace = context.trace
    in_process = any(_IN_PROCESS in trace.names[name] for name in set(trace.name[draws.row].tolist()))
    facts, step_ns = trace.loader, context.step_ns
    unrecorded = trace.unrecorded_phase_ns.get("data", 0.0)
    if context.loader_advice is not None:
        yield from _settled(context, context.loader_advice, draws, min(unrecorded or waited, step_ns))
        return
    if facts is not None and in_process is not (facts.workers == 0):
        facts = None  # the newest sample was of another loader
    if facts is not None and 0 < unrecorded <= trace.unrecorded_step_ns:
        waited, step_ns = unrecorded, float(trace.unrecorded_step_ns)
    elif facts is None and not in_process:
        if trace.loader is None:
            yield from _twice_the_workers(context, waited, len(draws))
        return
    else:
        facts = facts or LoaderFacts(batches_per_step=len(draws) / context.count)
        waited = min(waited, unrecorded or waited)
    advice = advise_loader(
        facts, step_ns / 1e9, waited / 1e9, context.worker_cost(), on_device=context.on_device
    )
    if advice is None:
        return
    share = f"{ns_text(waited)} of each step of {ns_text(step_ns)} ({waited / step_ns:.0%})"
    yield Finding(
        advice.rule,
        _evidence(0 if in_process else facts.workers, share, advice.assumes),
        # Figures of unrecorded steps need no correction for recording.
        context.without_host(
            advice.saves_seconds * 1e9, draws, of=waited, recorded=trace.loader is not facts
        ),
        advice.change,
        advice.setting,
    )


def _settled(
    context: AdviceContext, settled: SettledAdvice, draws: Spans, waited: float
) -> Iterator[Finding]:
    """Repeat what the run was advised, for a rank that waits as the one does that the advice is on."""
    advice = settled.advice
    if advice is None or waited / 1e9 < _LIKE_ITS_RANK * settled.data_seconds:
        return
    share = settled.data_seconds / settled.step_seconds
    waits = f"{duration(settled.data_seconds)} of each step of {duration(settled.step_seconds)} ({share:.0%})"
    yield Finding(
        advice.rule,
        _evidence(settled.workers_now, f"{waits}, as the run was observed", advice.assumes),
        context.without_host(advice.saves_seconds * 1e9, draws, of=waited, recorded=False),
        advice.change,
        advice.setting,
        settled_ns=advice.saves_seconds * 1e9,
    )


def _evidence(workers: int, waits: str, assumes: str) -> str:
    who = f"waits for its {workers} DataLoader workers" if workers else "makes its batches itself"
    return f"the training process {who}: {waits}" + (f"; {assumes}" if assumes else "")


def _twice_the_workers(context: AdviceContext, waited: float, draws: int) -> Iterator[Finding]:
    waited -= _HAND_OVER_NS * draws / context.count
    yield Finding(
        "loader-workers",
        f"each step of {ns_text(context.step_ns)} waits {ns_text(waited)} ({waited / context.step_ns:.0%})"
        " for the DataLoader's workers; assumes free CPUs, or workers that wait rather than compute",
        context.without_host(min(waited, context.step_ns / 2), context.annotated(DRAW), recorded=False),
        "use twice as many workers, or make an item cheaper to read and to transform",
        "DataLoader(..., num_workers=2 * num_workers, persistent_workers=True, prefetch_factor=4)",
    )


def pin_memory(context: AdviceContext) -> Iterator[Finding]:
    """Copies to the device come from pageable memory: the host stages them, and nothing overlaps them.

    The edit makes the copies faster, and the host neither stages them nor waits for them.
    """
    every, described = _copies(context, _FROM_PAGEABLE, "come from")
    if not described:
        return
    staging = context.spans_of(context.calls_of(every))
    staged = max(int((staging.end - staging.start).sum()), 1)
    device = context.run.device_type.quoted
    loads = len(context.annotated(DRAW)) > 0
    yield Finding(
        "pin-memory",
        f"{described}, and {ns_text(context.idle_ns['pageable_copy'])} idle",
        Edit(
            host=(HostTime(staging.start, staging.end, min(_LAUNCH_NS * len(staging) / staged, 1.0)),),
            waits=(staging.row,),
            device=(DeviceWork(every, 1 / _speed(context)),),
        ),
        "copy from pinned memory, without waiting for the copy",
        f"DataLoader(..., pin_memory=True); batch.to({device}, non_blocking=True)"
        if loads
        else f"batch.pin_memory().to({device}, non_blocking=True)",
    )


def pin_results(context: AdviceContext) -> Iterator[Finding]:
    """Copies from the device go to pageable memory while nothing else runs on it.

    The edit makes the copies faster. The host's wait for them is that of needless-synchronisation.
    """
    every, described = _copies(context, _TO_PAGEABLE, "go to")
    if not described:
        return
    yield Finding(
        "pin-results",
        described,
        Edit(device=(DeviceWork(every, 1 / _speed(context)),)),
        "copy to pinned memory that is kept, and wait for the copy only where the values are read",
        "host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True); host.copy_(x, non_blocking=True)",
    )


def _copies(context: AdviceContext, name: str, direction: str) -> tuple[Int64, str]:
    """Return the copies with this in their names, and what those in the steps take; no text without any."""
    every = context.trace.named(context.all_device_rows, lambda text: name in text)
    copies = context.in_steps(every)
    if not len(copies):
        return every, ""
    exposed = context.exposed(copies, np.setdiff1d(context.device_rows, copies, assume_unique=True))
    taken = int((context.trace.end[copies] - context.trace.start[copies]).sum())
    return every, (
        f"{len(copies) / context.count:,.0f} copies {context.a_step} {direction} pageable memory: "
        f"{ns_text(context.per_step(taken))}, {ns_text(exposed)} of it while nothing else runs"
    )


def _speed(context: AdviceContext) -> int:
    return next(factor for least, factor in _PINNED_SPEED if context.trace.device_generation >= least)


LOADING_RULES: Final = (
    Rule("loader-workers", loader_workers, (REPEATS, IDLE_KNOWN)),
    Rule("pin-memory", pin_memory, (ON_DEVICE, IDLE_KNOWN)),
    Rule("pin-results", pin_results, (ON_DEVICE, IDLE_KNOWN)),
)


# In single precision an operator moves half the bytes and computes twice as many numbers at once, on any
# processor; on many GPUs the gap is far wider.
_DOUBLE_COST: Final = 2
# On a CPU torch convolves doubles by copies and matrix products, single precision by oneDNN. Layers of 8 to
# 128 channels took 2.4 to 8.4 times as long; only a first layer of 3 channels took 1.2 times.
_CONVOLUTION: Final = ("aten::_slow_conv", "aten::slow_conv")
_CONVOLUTION_COST: Final = 3
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
    """Operators work on tensors of doubles. Half of their work goes away, not their dispatch.

    Of convolutions on a CPU two thirds go away.
    """
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
        work = context.calls.work_ns[chosen]
        convolves = context.named(*_CONVOLUTION)[rows[chosen]]
        worked = int(work.sum())
        left = float((work / np.where(convolves, _CONVOLUTION_COST, _DOUBLE_COST)).sum())
        edit = context.without_host(context.per_step(worked - left))
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
    is_torchs = trace.are_named(operator, lambda name: name.startswith("aten::"))
    has_types = (operator >= 0) & is_torchs & (trace.type[operator] > 0)
    by_operator = trace.are_named(operator, _ELIGIBLE.match) & _with_tensors_of(context, operator, "float")
    single = np.where(has_types, by_operator, trace.are_named(kernels, _SINGLE_KERNELS.search))
    return single & ~trace.are_named(kernels, _HALF_KERNELS.search)


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


PRECISION_RULES: Final = (Rule("float64", float64), Rule("mixed-precision", mixed_precision, (ON_DEVICE,)))


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
