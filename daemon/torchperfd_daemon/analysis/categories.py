"""Determines the kind of each event by the exporter's category, or without one by its name and place.

Kineto's own categories are the ones used: ``kernel``, ``gpu_memcpy`` and ``gpu_memset`` ran on a device,
``<vendor>_runtime`` and ``<vendor>_driver`` launched that, ``cpu_op``, ``user_annotation`` and
``python_function`` ran on the host. Some kinds can only be inferred after the whole file is read.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from torchperfd_daemon.analysis.trace import Flags, Int32, Int64

KERNEL: Final = "kernel"
COPY: Final = "gpu_memcpy"
FILL: Final = "gpu_memset"
DEVICE: Final = frozenset({KERNEL, COPY, FILL})
VENDORS: Final = ("cuda", "hip", "xpu", "mtia", "privateuse1")
LAUNCHES: Final = frozenset(f"{vendor}_{layer}" for vendor in VENDORS for layer in ("runtime", "driver"))
ANNOTATION: Final = "user_annotation"
# Kineto repeats annotations on the device's timeline.
GPU_ANNOTATION: Final = "gpu_user_annotation"
OPERATOR: Final = "cpu_op"
PYTHON: Final = "python_function"
# The device waits for another stream or rank: nothing runs.
WAIT: Final = "device_wait"
# Sums that the exporter writes as additional events.
DERIVED: Final = "derived"
UNKNOWN_LAUNCH: Final = "privateuse1_runtime"

# How the names begin that torch gives to its own annotations.
STEP_MARK: Final = "ProfilerStep#"
DRAW: Final = "enumerate(DataLoader)#"
UPDATE: Final = "Optimizer.step#"
ZERO_GRAD: Final = "Optimizer.zero_grad#"

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
    (re.compile(r"(?!user_)\w+_user_annotation"), GPU_ANNOTATION),
    (re.compile(r"(?!glow_)\w+_runtime"), UNKNOWN_LAUNCH),
    (re.compile(r"\w+_driver"), "privateuse1_driver"),
)
_KNOWN: Final = DEVICE | LAUNCHES | {OPERATOR, ANNOTATION, GPU_ANNOTATION, PYTHON}


def category(written: str) -> str:
    """Return Kineto's category for the one in a file; an unknown one is returned in lower case."""
    lowered = written.lower()
    if lowered in _KNOWN:
        return lowered
    if lowered in _ALIASES:
        return _ALIASES[lowered]
    return next((kind for pattern, kind in _PATTERNS if pattern.fullmatch(lowered)), lowered)


def with_one_step(names: Sequence[str]) -> tuple[list[str], Int64]:
    """Return the names with one for all of the profiler's steps, and the number that each counts as."""
    texts, renamed = list(names), np.arange(len(names), dtype=np.int64)
    steps = [number for number, text in enumerate(names) if text.startswith(STEP_MARK)]
    for number in steps[:1]:
        texts[number] = f"{STEP_MARK[:-1]}*"
        renamed[steps] = number
    return texts, renamed


@dataclass(frozen=True, slots=True)
class Hint:
    """The data from which the kind of an event without a category is inferred.

    Attributes:
        labels: The process's labels, such as ``CPU`` or ``GPU 0``; empty without any.
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
        return GPU_ANNOTATION if hint.on_stream else ANNOTATION
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


Thread = tuple[int | str, int | str]
# torch's exporter until 1.7 has these in place of process numbers.
_LEGACY_PROCESSES: Final = frozenset({"CPU functions", "CUDA functions"})
_METADATA: Final = ("process_name", "process_labels", "thread_name")


class Foreign:
    """The processes and threads of a file without categories."""

    def __init__(self) -> None:
        self._processes: dict[int | str, str] = {}
        self._labels: dict[int | str, str] = {}
        self._threads: dict[Thread, str] = {}
        self._kinds: dict[tuple[str, int, bool], str] = {}
        self.rows: list[int] = []
        self.on_stream: list[bool] = []

    def note_metadata(self, events: list[Any]) -> None:
        """Keep the names that metadata events (``ph: M``) give to processes and threads."""
        for event in events:
            if event.name not in _METADATA or event.args is None:
                continue
            if event.name == "process_name":
                self._processes[event.pid] = event.args.label or ""
            elif event.name == "process_labels":
                self._labels[event.pid] = event.args.labels or ""
            else:
                self._threads[event.pid, event.tid] = event.args.label or ""

    def add(self, row: int, *, on_stream: bool) -> None:
        """Note that the event of a row has no category."""
        self.rows.append(row)
        self.on_stream.append(on_stream)

    def category(self, name: str, number: int, thread: Thread, *, on_stream: bool) -> str:
        """Return the category of an event by its name and where it ran; ``number`` is the thread's."""
        key = (name, number, on_stream)
        if key not in self._kinds:
            self._kinds[key] = inferred(
                Hint(
                    name,
                    self._name_of(thread[0]),
                    self._labels.get(thread[0], ""),
                    self._threads.get(thread, ""),
                    on_stream,
                )
            )
        return self._kinds[key]

    @staticmethod
    def is_legacy(threads: Sequence[Thread]) -> bool:
        """Return whether torch's exporter until 1.7 wrote the file: it names a kernel by its operator."""
        return bool(threads) and {process for process, _ in threads} <= _LEGACY_PROCESSES

    def _name_of(self, process: int | str) -> str:
        # Exporters without metadata write the name in place of the number.
        return self._processes.get(process, process if isinstance(process, str) else "")

    def merged(self, threads: Sequence[Thread]) -> tuple[list[int], list[Thread]]:
        """Return the number of each thread, and their table: a library's view of a thread is that thread.

        torch_npu draws what CANN did on a thread in a process of its own, with the thread's own number.
        """
        hosts = [
            (number, thread)
            for number, thread in enumerate(threads)
            if "python" in self._processes.get(thread[0], "").lower()
        ]
        owners = {thread[1]: number for number, thread in reversed(hosts)}
        process = hosts[0][1][0] if len({thread[0] for _, thread in hosts}) == 1 else None
        numbers, table = [], []
        for number, thread in enumerate(threads):
            is_view = launches_for(self._processes.get(thread[0], ""))
            numbers.append(owners.get(thread[1], number) if is_view else number)
            table.append((process, thread[1]) if is_view and process is not None else thread)
        return numbers, table


def pair_by_name(name: Int32, start: Int64, on_host: Flags, on_device: Flags) -> Int64:
    """Return external ids, equal on a device event and the operator of its name that launched it; 0 for none.

    If an operator has as many device events as calls, they are in one order; else the last call before the
    event launched it.
    """
    external = np.zeros(len(name), dtype=np.int64)
    for each in np.unique(name[on_device]).tolist():
        calls, events = (
            rows[np.argsort(start[rows], kind="stable")]
            for rows in (np.flatnonzero(side & (name == each)) for side in (on_host, on_device))
        )
        if not len(calls):
            continue
        external[calls] = calls + 1
        order = np.arange(len(events))
        if len(calls) != len(events):
            order = np.maximum(np.searchsorted(start[calls], start[events], side="right") - 1, 0)
        external[events] = external[calls[order]]
    return external
