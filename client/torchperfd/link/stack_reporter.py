"""Stacks of every thread of this process: reported on request, or written at a signal.

While any Python thread can run, the stream's thread answers. When a C extension hangs with the interpreter
held, none can. The daemon then reads the process from outside with py-spy, if it can.

For the case that it cannot, :mod:`faulthandler` is registered on a real-time signal. It needs no interpreter
and writes into a file in memory that only this process, its user and root can open. The file's first line
names the training thread, the signal, and the thread to send it to: the stream's, so that no system call of
the script is interrupted. The handler reads the frames of all threads as they are. That can crash the process
while one of them runs Python. So the daemon sends the signal only for ``torchperfd stacks --signal``, and
only while no thread runs Python: it sees the stream's thread wait for the interpreter.

``TORCHPERFD_STACK_SIGNAL`` chooses another signal, ``off`` none.
"""

import fcntl
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchperfd.hooks.instruments import Instruments
from torchperfd.hooks.thread_frames import stacks_at_random, stacks_now
from torchperfd.hooks.worker_stacks import MAX_WORKERS, StackLine, stack_lines
from torchperfd.link.outbox import Outbox
from torchperfd.safety.logs import log
from torchperfd.v1 import contract

if TYPE_CHECKING:
    from torchperfd.v1 import session_pb2


def _is_memory_file_open(file: int, name: str) -> bool:
    """Return whether a descriptor is still that file's: a script that closes all knows not of ours."""
    try:
        target = Path(f"/proc/self/fd/{file}").readlink()
    except OSError:
        return False
    return str(target).startswith(f"/memfd:{name}")


VARIABLE: Final = "TORCHPERFD_STACK_SIGNAL"
_PACKAGE: Final = str(Path(__file__).parents[1]) + os.sep
# Libraries that want a real-time signal count from either end; these are in between.
_CANDIDATES: Final = range(signal.SIGRTMAX - 9, signal.SIGRTMIN + 9, -1)
_MAX_THREADS: Final = 256
_WORKERS_S: Final = 0.25
"""Workers answer at a random moment within 30 ms, unless native code holds their interpreter."""
_SAMPLED_WORKERS: Final = 4
"""Each costs the training process 0.1 ms, and requests for samples come ten times per second."""


class StackReporter:
    """Reports the stacks of all threads to the daemon."""

    def __init__(self, instruments: Instruments, outbox: "Outbox[session_pb2.ClientMessage]") -> None:
        self._buffer = instruments.buffer
        self._replay = instruments.replay
        self._names = instruments.names
        self._outbox = outbox
        self._workers = instruments.hooks.links.worker_stacks
        self._faults = instruments.faults
        self._training = instruments.buffer.thread
        self._signal = 0
        self._file = -1

    def register_signal(self, thread: int) -> None:
        """Have a signal write the stacks down from now on; on the main thread, which faulthandler prepares.

        Does nothing if the platform cannot, no signal is free, or ``TORCHPERFD_STACK_SIGNAL`` is ``off``.

        Args:
            thread: The kernel's id of a thread of ours that runs Python a few times per second.
        """
        try:
            self._register(thread)
        except ValueError as error:
            log.warning("%s; `torchperfd stacks --signal` will not work on this rank", error)
        except Exception as error:  # noqa: BLE001 - without it a hang in C is reported with less
            self._faults.note("stacks", error)

    def report(self, order: "session_pb2.DumpStacks") -> None:
        """Answer the daemon, on the calling thread."""
        from torchperfd.v1 import session_pb2

        # Zero once steps are not recorded any more; then it is the last thread whose were.
        self._training = self._buffer.thread or self._training
        recorder = self._replay.recorder
        report = session_pb2.StackReport(
            request_id=order.request_id,
            phase=self._names.name(recorder.innermost) if recorder.is_open else "",
            step=self._replay.loop.train_steps,
            package=_PACKAGE,
        )
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        is_sample = order.loading_only or order.threads_only
        stacks = stacks_at_random() if is_sample else stacks_now()
        for ident, stack in islice(stacks.items(), _MAX_THREADS):
            if order.loading_only and ident != self._training:
                continue
            thread = report.threads.add(
                ident=ident, name=names.get(ident, ""), training=ident == self._training
            )
            _pack(thread, stack_lines(stack))
        if not order.threads_only:
            self._add_workers(report, _SAMPLED_WORKERS if order.loading_only else MAX_WORKERS)
        self._outbox.put(session_pb2.ClientMessage(stack_report=report))

    def _add_workers(self, report: "session_pb2.StackReport", most: int) -> None:
        try:
            workers = self._workers.read(_WORKERS_S, most=most)
        except Exception as error:  # noqa: BLE001 - this process's own stacks are sent without them
            self._faults.note("stacks of workers", error)
            return
        for each in workers:
            stack = report.threads.add(ident=0, worker_pid=each.pid, worker=each.worker)
            _pack(stack, each.lines)

    @property
    def descriptors(self) -> list[int]:
        return [self._file] if self._file >= 0 else []

    def unregister_signal(self) -> None:
        """Put the signal back as it was, and close the file; also for a forked child, of its copies."""
        if self._file < 0:
            return
        import faulthandler

        # In this order: a descriptor's number is used again, and faulthandler knows only the number.
        faulthandler.unregister(self._signal)
        if _is_memory_file_open(self._file, contract.STACKS_FILE):
            os.close(self._file)
        self._file = -1

    def _register(self, thread: int) -> None:
        chosen = os.environ.get(VARIABLE, "")
        # Elsewhere faulthandler would give its stack for handlers to a thread that is not the main one.
        on_main_thread = threading.current_thread() is threading.main_thread()
        if chosen == "off" or not on_main_thread or not hasattr(os, "memfd_create") or not _has_lock():
            return
        number = _free_signal(chosen, _signal_masks())
        if number is None:
            return
        import faulthandler

        file = os.memfd_create(contract.STACKS_FILE)
        try:
            faulthandler.register(number, file=file, all_threads=True, chain=False)
        except BaseException:
            os.close(file)
            raise
        self._signal, self._file = number, file
        header = {"signal": number, "thread": thread, "training": self._training, "package": _PACKAGE}
        os.write(file, json.dumps(header).encode() + b"\n")
        # The daemon cuts off earlier stacks; the next belong behind the first line.
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)


def _free_signal(chosen: str, masks: Mapping[str, int]) -> int | None:
    """Return a real-time signal that is not in use; the chosen one or none if one is chosen.

    Args:
        chosen: A number, or nothing.
        masks: Signals that are caught, ignored or blocked, as from :func:`_signal_masks`.

    Raises:
        ValueError: What is chosen is no real-time signal.
    """
    if chosen and not (chosen.isdecimal() and signal.SIGRTMIN <= int(chosen) <= signal.SIGRTMAX):
        raise ValueError(
            f"{VARIABLE} is {chosen[:40]!r}, which is neither off nor a signal from"
            f" {signal.SIGRTMIN:d} to {signal.SIGRTMAX:d}"
        )
    taken = masks["SigCgt"] | masks["SigIgn"] | masks["SigBlk"]
    candidates = [int(chosen)] if chosen else _CANDIDATES
    return next((number for number in candidates if not taken >> (number - 1) & 1), None)


def _has_lock() -> bool:
    """Return whether one thread at a time runs Python; else none can keep the others from it."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def _signal_masks() -> dict[str, int]:
    """Return the kernel's signal masks; Python does not know handlers that C code installed.

    Raises:
        OSError: procfs cannot be read.
    """
    lines = Path("/proc/thread-self/status").read_text().splitlines()
    return {line[:6]: int(line[7:], 16) for line in lines if line.startswith("Sig") and line[6] == ":"}


def _pack(stack: "session_pb2.ThreadStack", lines: Sequence[StackLine]) -> None:
    for each in lines:
        stack.frames.add(file=each.file, line=each.line, function=each.function, call=each.call)
