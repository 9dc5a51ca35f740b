"""Infers the kinds of events without a category, after the whole file is read."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from torchperfd_daemon.analysis.categories import Hint, inferred, launches_for
from torchperfd_daemon.analysis.trace import Flags, Int32, Int64

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
