"""Infers the kinds of events without a category, after the whole file is read."""

from collections.abc import Sequence
from typing import Any, Final

from torchperfd_daemon.analysis.categories import Hint, inferred, launches_for

Thread = tuple[int | str, int | str]
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
                    self._processes.get(thread[0], ""),
                    self._labels.get(thread[0], ""),
                    self._threads.get(thread, ""),
                    on_stream,
                )
            )
        return self._kinds[key]

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
