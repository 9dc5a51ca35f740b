"""The traces of several ranks, each analysed by a worker process of its own.

A process per rank returns its memory when its rank is done and uses the other cores. A rank whose process is
killed is tried once more; after that only this rank is lost. The processes are children of this one, or of
another executor's workers, on other machines.
"""

import functools
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeAlias

from torchperfd._version import __version__
from torchperfd.model.verdict_document import SettledAdvice
from torchperfd_daemon.analysis.loading import load
from torchperfd_daemon.analysis.operators import GroupBy
from torchperfd_daemon.analysis.rank_processes import RankProcesses
from torchperfd_daemon.analysis.summary import Summary, summarise
from torchperfd_daemon.analysis.trace_files import RankFile
from torchperfd_daemon.analysis.trace_repair import by_process
from torchperfd_daemon.errors import IncompatibleVersionError, TorchperfdError
from torchperfd_daemon.object_store import AnyPath
from torchperfd_daemon.worker_cost import of_this_machine

_ATTEMPTS: Final = 2


@dataclass(frozen=True, slots=True)
class Request:
    """How ranks are to be analysed.

    Attributes:
        group_by: How calls are grouped into rows of the operator table.
        comm_pattern: A further regular expression for the names of communication kernels.
        samples: Whether to take the tables apart by step, which `compare` needs.
        rectangles: How many the timeline of a page may have; 0 for no picture.
        loader_advice: What the run was advised on its loaders; None to follow the rule on the trace alone.
        nice: The niceness of the workers, 0 to 19.
        max_memory: Bytes that a worker may allocate; None for no limit.
        version: Of torchperfd; a worker of another version refuses, since its summaries may be different.
    """

    group_by: GroupBy = "name"
    comm_pattern: str | None = None
    samples: bool = False
    rectangles: int = 0
    loader_advice: SettledAdvice | None = None
    nice: int = 0
    max_memory: int | None = None
    version: str = __version__


Answer: TypeAlias = Summary | TorchperfdError
"""A rank's summary, or the reason why there is none."""


def analyse(
    files: Sequence[RankFile],
    request: Request,
    workers: int | None = None,
    *,
    executor: Executor | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> Iterator[Answer]:
    """Yield each rank's answer, in the order of ``files``.

    Args:
        workers: Processes at once; None for one a core. A lone rank that needs neither niceness nor a
            limit is analysed in this process. So are all, one after another, if this user cannot run Python,
            as in a process that has become another user.
        executor: Runs the ranks instead, such as on the workers of Dask; they must be able to read the paths.
        on_done: Called for each rank that has an answer, on any thread.
    """
    if executor is not None:
        yield from _over(executor, files, request, on_done, answer_of_process)
        return
    is_plain = not request.nice and request.max_memory is None
    if is_plain and (len(files) == 1 or not os.access(sys.executable, os.X_OK)):
        for file in files:
            yield answer(file.path, request)
        return
    threads = workers or os.cpu_count() or 1
    with RankProcesses() as processes, ThreadPoolExecutor(threads, "analysis") as pool:
        yield from _over(pool, files, request, on_done, partial(_answer_of, processes))


def _over(
    executor: Executor,
    files: Sequence[RankFile],
    request: Request,
    on_done: Callable[[], None],
    answering: Callable[[AnyPath, Request], Answer],
) -> Iterator[Answer]:
    futures = [executor.submit(answering, file.path, request) for file in files]
    for future in futures:
        future.add_done_callback(lambda _: on_done())
    try:
        for file, future in zip(files, futures, strict=True):
            yield _outcome(file.path, future)
    finally:
        # Of what has not begun, when the caller stops early.
        for future in futures:
            future.cancel()


def _outcome(path: AnyPath, future: "Future[Answer]") -> Answer:
    try:
        error = future.exception()
    except CancelledError:
        return TorchperfdError(f"the analysis of {path} was cancelled", "check the workers' scheduler")
    if error is None:
        return future.result()
    return TorchperfdError(
        f"the worker that read {path} failed: {type(error).__name__}: {error}", "look into the workers' logs"
    )


def answer_of_process(path: AnyPath, request: Request) -> Answer:
    """Analyse one trace in a child process, which is started again if it is killed."""
    if request.version != __version__:
        return IncompatibleVersionError(
            f"a worker has torchperfd {__version__}, and this is {request.version}",
            "install one of them on both",
        )
    return _answer_of(_kept_processes(), path, request)


@functools.cache
def _kept_processes() -> RankProcesses:
    """Return those of a worker of another executor; they end with it, since their input does."""
    return RankProcesses()


def _answer_of(processes: RankProcesses, path: AnyPath, request: Request) -> Answer:
    for _ in range(_ATTEMPTS):
        code, found = processes.ask((path, request))
        if code >= 0:
            break
    if code:
        return TorchperfdError(
            f"the process that read {path} ended with {code}", "look for the kernel's OOM killer"
        )
    result: Answer = pickle.loads(found)
    return result


def answer(path: AnyPath, request: Request) -> Answer:
    """Analyse one trace in this process."""
    try:
        first, *others = [
            summarise(
                trace,
                group_by=request.group_by,
                comm_pattern=request.comm_pattern,
                samples=request.samples,
                rectangles=request.rectangles,
                worker_cost=of_this_machine,
                loader_advice=request.loader_advice,
            )
            for trace in by_process(load(path))
        ]
        return replace(first, others=tuple(others))
    except TorchperfdError as error:
        return error
    except MemoryError:
        return TorchperfdError(f"{path} does not fit into the memory allowed", "capture fewer steps")
