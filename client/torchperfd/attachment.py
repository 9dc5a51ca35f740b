"""The attachment: the one client of this process, which :func:`attach` makes."""

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torchperfd.safety.interrupts import is_from_script
from torchperfd.safety.logs import log
from torchperfd.v1.variables import unknown_text

if TYPE_CHECKING:
    from torch import nn

    from torchperfd.client import Client
    from torchperfd.loggers.outputs import Logger

_current: "Client | None" = None
_attaching_thread = 0
_forks_watched = False
_variables_checked = False


def attach(
    model: "nn.Module | None" = None,
    *,
    job: str | None = None,
    run: str | None = None,
    metrics_port: int | None = None,
    loggers: "Iterable[Logger]" = (),
    max_overhead: float | None = None,
    flops: bool = False,
    peak_flops: float | None = None,
    on_oom: bool = False,
) -> "Client":
    """Instrument this process and connect to the node's daemon, now or whenever there is one.

    Call it on the thread that trains. A second call returns the same client. It raises nothing of its own,
    only what a signal handler of the script raises meanwhile: where something is missing, the log says what,
    and the client does less.

    Args:
        model: The model whose forward to time; found by itself when left out.
        job: What people call this kind of run; the script's name by default.
        run: The run's name; the launcher's by default.
        metrics_port: Serve this rank's own Prometheus page on this loopback port.
        loggers: Where to send what is measured, besides the daemon; see :mod:`torchperfd.loggers`.
        max_overhead: The part of training time, 0 to 1, that this may cost. Where it costs more by its
            own estimate, it gives up detail, level by level, and logs that. Unlimited by default.
        flops: Count the operations of one training step, and report FLOP/s and MFU.
        peak_flops: Operations per second that the device can do; looked up when left out.
        on_oom: Leave a memory snapshot and its summary when CUDA has no memory left. Until then torch
            records where each allocation was made.
    """
    global _current, _attaching_thread
    from torchperfd.client import Client  # within the pause

    if _attaching_thread == threading.get_ident():
        # A signal handler of the script has interrupted an attach on this very thread.
        return _current or Client(run=run, job=job, inert=True)
    _attaching_thread = threading.get_ident()
    try:
        if _current is None or not _current.attached:
            _watch_forks()
            warn_of_variables()
            _current = Client(
                run=run,
                job=job,
                inert=_is_helper_process(),
                max_overhead=max_overhead,
                flops=flops,
                peak_flops=peak_flops,
                on_oom=on_oom,
            )
        else:
            _current.take_options(run, job, max_overhead, flops=flops, peak_flops=peak_flops, on_oom=on_oom)
        if model is not None:
            _current.watch_model(model)
        if metrics_port is not None:
            _current.export_metrics(metrics_port)
        for logger in loggers:
            _current.add_logger(logger)
    except Exception as error:  # the promise above outranks whatever went wrong
        if is_from_script(error):
            raise
        log.exception("torchperfd cannot attach; training goes on without it")
        _current = Client(run=run, job=job, inert=True)
    finally:
        _attaching_thread = 0
    return _current


def current() -> "Client | None":
    """Return this process's newest client, attached or not; None before the first attach."""
    return _current


def is_attached() -> bool:
    """Return whether this process has a client that is attached."""
    return _current is not None and _current.attached


def warn_of_variables() -> None:
    """Log the variables that are misspelt, once in each process and by one rank of a node."""
    global _variables_checked
    if _variables_checked or _is_helper_process() or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    _variables_checked = True
    if unknown := unknown_text(os.environ):
        log.warning("%s", unknown)


def _watch_forks() -> None:
    """Make the client of a forked child inert; registered once, since it cannot be taken back."""
    global _forks_watched
    if not _forks_watched:
        _forks_watched = True
        os.register_at_fork(after_in_child=_leave_child_alone)


def _leave_child_alone() -> None:
    if _current is not None:
        _current.become_inert()


def _is_helper_process() -> bool:
    """Return whether this process only serves a training process: a DataLoader worker.

    A spawned process that imports the script's main module, which may call ``attach()`` at its
    top, does not say yet what it will be; if it trains, it can attach where it does.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        return True
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None
