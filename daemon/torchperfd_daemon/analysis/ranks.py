"""The traces of several ranks, each analysed by a worker process of its own.

A process per rank returns its memory when its rank is done and uses the other cores. If it is killed, only
its own rank is lost.
"""

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from torchperfd.model.own_commands import own_command
from torchperfd.model.verdict_document import SettledAdvice
from torchperfd_daemon.analysis.loading import load
from torchperfd_daemon.analysis.operators import GroupBy
from torchperfd_daemon.analysis.summary import Summary, summarise
from torchperfd_daemon.analysis.trace_files import RankFile
from torchperfd_daemon.analysis.trace_repair import by_process
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.worker_cost import of_this_machine


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
    """

    group_by: GroupBy = "name"
    comm_pattern: str | None = None
    samples: bool = False
    rectangles: int = 0
    loader_advice: SettledAdvice | None = None
    nice: int = 0
    max_memory: int | None = None


def analyse(
    files: Sequence[RankFile], request: Request, workers: int | None = None
) -> Iterator[Summary | TorchperfdError]:
    """Yield each rank's summary, or the reason why there is none, in the order of ``files``.

    Args:
        workers: Processes at once; None for one a core. A lone rank that needs neither niceness nor a
            limit is analysed in this process. So are all, one after another, if this user cannot run Python,
            as in a process that has become another user.
    """
    is_plain = not request.nice and request.max_memory is None
    if is_plain and (len(files) == 1 or not os.access(sys.executable, os.X_OK)):
        for file in files:
            yield answer(file.path, request)
        return
    with ThreadPoolExecutor(workers or os.cpu_count() or 1, "analysis") as pool:
        yield from pool.map(lambda file: _in_a_process(file.path, request), files)


def _in_a_process(path: Path, request: Request) -> Summary | TorchperfdError:
    # A new interpreter: a fork would inherit the locks of whatever threads the caller runs. And not one that
    # multiprocessing spawns, which imports modules from the current directory.
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as answers:
        try:
            process = subprocess.Popen(
                own_command("torchperfd_daemon.analysis.rank_worker", str(writing)),
                stdin=subprocess.PIPE,
                pass_fds=(writing,),
            )
        finally:
            os.close(writing)
        with process:
            assert process.stdin is not None
            with process.stdin, contextlib.suppress(BrokenPipeError):  # it has ended: no answer comes
                process.stdin.write(pickle.dumps((path, request)))
            found = answers.read()
    if process.returncode:
        return TorchperfdError(
            f"the process that read {path} ended with {process.returncode}",
            "look for the kernel's OOM killer",
        )
    result: Summary | TorchperfdError = pickle.loads(found)
    return result


def answer(path: Path, request: Request) -> Summary | TorchperfdError:
    """Analyse one trace; if that fails, return the reason."""
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
