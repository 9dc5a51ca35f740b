"""Determines the kind of each event by the exporter's category, or without one by its name and place.

Kineto's own categories are the ones used: ``kernel``, ``gpu_memcpy`` and ``gpu_memset`` ran on a device,
``<vendor>_runtime`` and ``<vendor>_driver`` launched that, ``cpu_op``, ``user_annotation`` and
``python_function`` ran on the host.
"""

import re
from dataclasses import dataclass
from typing import Final

KERNEL: Final = "kernel"
COPY: Final = "gpu_memcpy"
FILL: Final = "gpu_memset"
DEVICE: Final = frozenset({KERNEL, COPY, FILL})
VENDORS: Final = ("cuda", "hip", "xpu", "mtia", "privateuse1")
LAUNCHES: Final = frozenset(f"{vendor}_{layer}" for vendor in VENDORS for layer in ("runtime", "driver"))
ANNOTATION: Final = "user_annotation"
OPERATOR: Final = "cpu_op"
# The device waits for another stream or rank: nothing runs.
WAIT: Final = "device_wait"
# Sums that the exporter writes as additional events.
DERIVED: Final = "derived"
UNKNOWN_LAUNCH: Final = "privateuse1_runtime"

# Names that older exporters gave, and vendors' own, in lower case.
_ALIASES: Final = {
    "operator": OPERATOR,
    "runtime": "cuda_runtime",
    "hpu_op": KERNEL,
    "mtia_ccp_events": KERNEL,
    "mtia_workloadd": KERNEL,
    "collective_comm": KERNEL,
}
_PATTERNS: Final = (
    (re.compile(r"(?:\w+_)?(?:concurrent_?)?kernel"), KERNEL),
    (re.compile(r"(?:\w+_)?memcpy2?"), COPY),
    (re.compile(r"(?:\w+_)?memset"), FILL),
    (re.compile(r"(?!user_)\w+_user_annotation"), "gpu_user_annotation"),
    (re.compile(r"(?!glow_)\w+_runtime"), UNKNOWN_LAUNCH),
    (re.compile(r"\w+_driver"), "privateuse1_driver"),
)
_KNOWN: Final = DEVICE | LAUNCHES | {OPERATOR, ANNOTATION, "gpu_user_annotation", "python_function"}


def category(written: str) -> str:
    """Return Kineto's category for the one in a file; an unknown one is returned in lower case."""
    lowered = written.lower()
    if lowered in _KNOWN:
        return lowered
    if lowered in _ALIASES:
        return _ALIASES[lowered]
    return next((kind for pattern, kind in _PATTERNS if pattern.fullmatch(lowered)), lowered)


@dataclass(frozen=True, slots=True)
class Hint:
    """The data from which the kind of an event without a category is inferred.

    Attributes:
        process: The name of its process in the file; empty without one.
        labels: The process's labels, such as ``CPU`` or ``GPU 0``; empty without any.
        thread: The name of its thread in the file; empty without one.
        on_stream: Whether its arguments name a stream or a kind of device task.
    """

    name: str
    process: str = ""
    labels: str = ""
    thread: str = ""
    on_stream: bool = False


# Processes of torch_npu's traces, and of Kineto's.
_DEVICE_PROCESS: Final = re.compile(r"ascend hardware|\b(?:gpu|npu|xpu|hpu|mtia|cuda|rocm)\b", re.IGNORECASE)
_LAUNCH_PROCESS: Final = re.compile(r"\bcann\b", re.IGNORECASE)
_DERIVED_PROCESS: Final = re.compile(
    r"overlap analysis|ai core freq|npu_?mem|acc_pmu|stars soc|\b(?:hbm|ddr|llc|pcie|hccs|qos|sio)\b",
    re.IGNORECASE,
)
_COMMUNICATION_PROCESS: Final = re.compile(r"^(?:communication|hccl)\b", re.IGNORECASE)
_GROUP_THREAD: Final = re.compile(r"^group\b", re.IGNORECASE)
# Rows on a device's timeline that wait for another stream, device or the host: MTIA's event_wait, Ascend's
# EVENT_WAIT and Notify_Wait, ROCm's barrier packets, Level Zero's WaitOnEvents. The kernel of a library that
# waits has another name.
_WAITED_FOR: Final = (
    r"(?:events?|notify|capture|streams?|queue|barrier|semaphore|signal|fence|mem(?:ory)?|marker|host)"
)
_WAITING: Final = re.compile(
    rf"(?:hip|cuda|cu|ze|ur|xpu|aclrt|hsa|mtia|hpu|rt)?(?:CommandListAppend|Enqueue)?[ _-]?(?:"
    rf"{_WAITED_FOR}[ _-]?waits?(?:ing)?(?:[ _-]?(?:value|event|for|on|until)\w*)?"
    rf"|waits?(?:ing)?(?:[ _-]?(?:on|for))?[ _-]?{_WAITED_FOR}?(?:[ _-]?wait)?"
    rf"|barrier(?:[ _-]?(?:packet|and|or|value|with[ _-]?wait[ _-]?list))?)(?:[_ #-]?\d+|\s?[#:\[(].*)?",
    re.IGNORECASE,
)
_COPIES: Final = re.compile(r"mem_?cpy|\bsdma|\bcopy(?:h2d|d2h|d2d)", re.IGNORECASE)
_FILLS: Final = re.compile(r"mem_?set", re.IGNORECASE)
_RUNTIME_NAME: Final = re.compile(
    r"(?P<cuda>cu(?:da)?[A-Z]\w*)|(?P<hip>hip[A-Z]\w*)|(?P<xpu>(?:ze|ur|pi)[A-Z]\w*)"
)
_DEVICE_NAME: Final = re.compile(
    r"void .*\(|Mem(?:cpy|set) [\w(]|(?:nccl|rccl)\w*Kernel"
    r"|\w*(?:[sdhc]gemm|_gemm_|xmma)\w*|triton_\w+_fused|Cijk_"
)
_ANNOTATION_NAME: Final = re.compile(
    r"ProfilerStep#\d+|Optimizer\.(?:step|zero_grad)#.*|enumerate\(DataLoader\).*|DistributedDataParallel\.\w+"
)


def inferred(hint: Hint) -> str:
    """Return the category of an event without one; an unknown event counts as the host's."""
    if _DERIVED_PROCESS.search(hint.process):
        return DERIVED
    if _COMMUNICATION_PROCESS.search(hint.process):
        return KERNEL if _GROUP_THREAD.search(hint.thread) else DERIVED
    if _LAUNCH_PROCESS.search(hint.process):
        return UNKNOWN_LAUNCH
    if _ANNOTATION_NAME.fullmatch(hint.name):
        return "gpu_user_annotation" if hint.on_stream else ANNOTATION
    if found := _RUNTIME_NAME.fullmatch(hint.name):
        return f"{found.lastgroup}_runtime"
    if (
        hint.on_stream
        or _DEVICE_PROCESS.search(hint.labels or hint.process)
        or hint.thread.lower().startswith("stream ")
        or _DEVICE_NAME.match(hint.name)
    ):
        return _on_device(hint.name)
    return OPERATOR


def waits(name: str) -> bool:
    """Return whether an event on a device's timeline only waits: then nothing runs."""
    return _WAITING.fullmatch(name.strip("<> ")) is not None


def launches_for(process: str) -> bool:
    """Return whether a process of the file is a library's view of another process's threads."""
    return _LAUNCH_PROCESS.search(process) is not None


def _on_device(name: str) -> str:
    if waits(name):
        return WAIT
    if _COPIES.search(name):
        return COPY
    return FILL if _FILLS.search(name) else KERNEL
