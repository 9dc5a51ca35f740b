"""What holds for every test: nothing leaks, and CI has the programs and libraries that tests need."""

import ctypes.util
import gc
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

# So that a failed comparison with a golden file shows the difference.
pytest.register_assert_rewrite("tests.support")

# No deadline, since machines are slow at times. CI plays the same examples every time; the nightly run
# plays others, as does any run by hand.
_FRESH_SEED = "TORCHPERFD_TEST_FRESH_SEED"
hypothesis.settings.register_profile(
    "torchperfd",
    deadline=None,
    derandomize=bool(os.environ.get("CI")) and not os.environ.get(_FRESH_SEED),
    print_blob=True,
)
hypothesis.settings.load_profile("torchperfd")


def pytest_configure() -> None:
    # What a shell starts in the background ignores Ctrl-C, and so would all that tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    # Files of other modes than usual are made by the tests that are about them.
    os.umask(0o022)


@pytest.fixture
def default_hangup() -> Iterator[None]:
    """Undo for one test that SIGHUP is ignored, as it is under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def pytest_collection_finish() -> None:
    # What is imported by now stays: no collection within a test needs to go through all of torch again.
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        for tool in marker.args:
            if not _installed(tool):
                if os.environ.get("CI"):
                    pytest.fail(f"CI must have {tool}; .ci/run installs it", pytrace=False)
                pytest.skip(f"{tool} is not installed here")


_KUBE = Path(__file__).parents[1] / ".venv-kube" / "bin"
"""Where tools/kube_tools.sh puts Helm and kubectl."""


def _installed(tool: str) -> bool:
    if tool.startswith("lib"):
        return ctypes.util.find_library(tool.removeprefix("lib")) is not None
    # What pip has installed is beside the interpreter, which is not on every PATH.
    beside = os.pathsep.join(map(str, (Path(sys.executable).parent, _KUBE)))
    return (shutil.which(tool) or shutil.which(tool, path=beside)) is not None


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Fail a test that leaves threads, sockets, files in memory, children, or a patched torch behind."""
    before = {name: look() for name, look in _WATCHED.items()}
    yield
    left: dict[str, Any] = {}
    for attempt in range(64):
        left = {name: look() - before[name] for name, look in _WATCHED.items()}
        if not any(left.values()):
            return
        # Most of what is not yet gone is so within a millisecond.
        time.sleep(min(0.001 * 2**attempt, 0.05))
    left["children"] = {f"{number} {_command(number)}" for number in left["children"]}
    pytest.fail(f"left behind: { {name: things for name, things in left.items() if things} }", pytrace=False)


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[None]:
    """Undo what a test configures of logging: another test would find its lines on a closed stream."""
    loggers = [logging.getLogger(name) for name in (None, "torchperfd")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        for handler in set(logger.handlers) - set(handlers):
            logger.removeHandler(handler)


def _threads() -> set[str]:
    # tqdm's is one per process, started by its first user: dynamo, here.
    threads = (thread for thread in threading.enumerate() if thread.name != "tqdm_monitor")
    return {f"{thread.name}-{thread.ident}" for thread in threads}


def _children() -> set[str]:
    """Return the children by number alone: for a moment, one that was just started has no command line."""
    # psutil would search all processes of the machine, which costs more than most tests.
    found = set()
    for children in Path("/proc/self/task").glob("*/children"):
        try:
            numbers = children.read_text().split()
        except OSError:  # the thread has ended
            continue
        for number in numbers:
            command = _command(number)
            # Helpers of multiprocessing, which stay; a fork server is the default from Python 3.14 on.
            if command is not None and not re.search("resource_tracker|multiprocessing.forkserver", command):
                found.add(number)
    return found


def _command(number: str) -> str | None:
    """Return the command line of a process; None if it has ended."""
    try:
        return " ".join(psutil.Process(int(number)).cmdline())
    except psutil.Error:
        return None


def _sockets() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith(("socket:", "/memfd:torchperfd")):
            found.add(target)
    return found


def _patches() -> set[str]:
    """Name every attribute of torch, and of Python's import system, that is ours right now."""
    found = {f"meta_path:{finder}" for finder in sys.meta_path if type(finder).__name__ == "ModuleImport"}
    found |= {f"gc:{each}" for each in gc.callbacks if "torchperfd" in each.__module__}
    torch = sys.modules.get("torch")
    if torch is None or "torch.utils.data.dataloader" not in sys.modules:
        return found
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    for owner, name in (
        (torch.autograd, "backward"),
        (torch.optim.Optimizer, "zero_grad"),
        (torch.nn.Module, "zero_grad"),
        (torch.nn.Module, "compile"),
        (torch.amp.GradScaler, "step"),
        (torch, "save"),
        (torch, "load"),
        (torch.distributed, "_broadcast_coalesced"),
        (torch._C._distributed_c10d.Work, "wait"),
        (torch._C._distributed_c10d.ProcessGroup, "allreduce"),
        (torch._C._distributed_c10d.Reducer, "prepare_for_backward"),
        (dataloader._BaseDataLoaderIter, "__next__"),
        (dataloader.DataLoader, "__iter__"),
        (torch.optim.Optimizer, "__init__"),
        (torch.autograd.profiler, "_prepare_profiler"),
        (torch.autograd.profiler, "_enable_profiler"),
    ):
        code = getattr(vars(owner).get(name), "__code__", None)
        if code is not None and "torchperfd" in code.co_filename:
            found.add(f"{owner}.{name}")
    for hooks in (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks):
        found |= {f"optimizer hook {key}" for key in hooks}
    return found


_WATCHED: dict[str, Callable[[], set[str]]] = {
    "threads": _threads,
    "children": _children,
    "sockets": _sockets,
    "hooks": _patches,
}
