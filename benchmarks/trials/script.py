"""The script of a trial: a small training loop with one unusual behaviour, the same losses in every run.

Arguments: the behaviour, a seed, the file for its results, and ``attach`` where it is to attach by itself.
"""

# ruff: noqa: PTH123, PTH208 - functions are behaviours, and their names say which

import atexit
import contextlib
import copy
import faulthandler
import gc
import hashlib
import json
import logging
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

BEHAVIOUR, SEED, RESULTS = sys.argv[1], int(sys.argv[2]), sys.argv[3]
STEPS = 90
CAPTURES = int(os.environ.get("TRIAL_CAPTURES", "0"))

result: dict[str, Any] = {"losses": "", "steps": 0, "raised": 0, "seen": 0, "account": None, "exit": None}
ended = 0.0


def save() -> None:
    result["exit"] = time.monotonic() - ended if ended else None
    with open(RESULTS, "w") as file:
        json.dump(result, file)


atexit.register(save)  # first, so that it is called last

client: Any = None
if "attach" in sys.argv:
    import torchperfd

    client = torchperfd.attach()

import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

if client is None and "torchperfd" in sys.modules:
    import torchperfd

    client = torchperfd.attach()


class TimeUpError(Exception):
    """The script's own timeout."""


chance = random.Random(SEED)
torch.manual_seed(SEED)
torch.set_num_threads(1)
digest = hashlib.sha256()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
DATA = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))


def loader(**options: Any) -> Any:
    return DataLoader(DATA, batch_size=8, **options)


def step(inputs: Any, wanted: Any) -> None:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), wanted)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    digest.update(repr(loss.item()).encode())
    result["steps"] += 1


def say_that_training_began() -> None:
    """Let the trial's fault happen."""
    with open(f"{RESULTS}.began", "w"):
        pass


def train(steps: int = STEPS, each: Callable[[int], None] = lambda _: None, **options: Any) -> None:
    """Train so many steps; ``each`` is called before every one."""
    done = 0
    while done < steps:
        for inputs, wanted in loader(**options):
            each(done)
            if done == 20:
                say_that_training_began()
                capture()
            step(inputs, wanted)
            time.sleep(0.004)
            done += 1
            if done == steps:
                return


def capture() -> None:
    for _ in range(CAPTURES if client is not None else 0):
        with contextlib.suppress(torchperfd.CaptureError):
            client.capture(steps=4)


def forward_and_backward(inputs: Any, wanted: Any) -> Any:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), wanted)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def raising_timeouts() -> None:
    """Timers whose handler raises; a step that was cut off is made again from where it began."""

    def handler(_number: int, _frame: Any) -> None:
        result["raised"] += 1
        raise TimeUpError

    signal.signal(signal.SIGALRM, handler)
    # Torch itself swallows what is raised in one of its imports within the first step.
    train(5)
    for number in range(STEPS - 5):
        if number == 20:
            say_that_training_began()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        while True:
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0003, 0.004))
                batches = iter(loader())
                for _ in range(1 + number % 8):
                    inputs, wanted = next(batches)
                loss = forward_and_backward(inputs, wanted)
                signal.setitimer(signal.ITIMER_REAL, 0)
                break
            except TimeUpError:
                result["seen"] += 1
                torch.set_grad_enabled(True)
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                chance.uniform(0, 1)
        digest.update(repr(loss.item()).encode())
        result["steps"] += 1
    signal.setitimer(signal.ITIMER_REAL, 0)


def killed_worker() -> None:
    """A worker dies; torch raises that in its own signal handler, wherever training is."""
    for _ in range(2):
        batches = iter(loader(num_workers=1, multiprocessing_context="fork"))
        next(batches)
        os.kill(batches._workers[0].pid, signal.SIGKILL)
        result["raised"] += 1
        try:
            for _ in range(2000):
                forward_and_backward(torch.zeros(1, 8), torch.zeros(1, 1))
                time.sleep(0.001)
        except RuntimeError as error:
            result["seen"] += "killed by signal" in str(error)
        torch.set_grad_enabled(True)
    result["steps"] = 0


def reports_in_handler() -> None:
    signal.signal(signal.SIGALRM, lambda *_: str(client.report()) if client is not None else None)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.013)

    def report(number: int) -> None:
        if client is not None and number % 3 == 0:
            str(client.report())

    train(each=report)
    signal.setitimer(signal.ITIMER_REAL, 0)


def calls_in_handler() -> None:
    """Whatever a handler may call of the client."""

    def handler(*_: Any) -> None:
        if client is not None:
            client.step()
            with client.phase("handler"):
                client.report()
            with contextlib.suppress(torchperfd.CaptureError):
                client.capture(steps=1).cancel()
            torchperfd.attach()

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.02)
    train()
    signal.setitimer(signal.ITIMER_REAL, 0)


def terminated() -> None:
    train(each=lambda number: os.kill(os.getpid(), signal.SIGTERM) if number == 40 else None)


def detached_by_sigterm() -> None:
    def handler(*_: Any) -> None:
        if client is not None:
            client.detach()
        sys.exit(5)

    signal.signal(signal.SIGTERM, handler)
    train(each=lambda number: os.kill(os.getpid(), signal.SIGTERM) if number == 40 else None)


def interrupted() -> None:
    train(each=lambda number: os.kill(os.getpid(), signal.SIGINT) if number == 40 else None)


def forked(child: Callable[[], None]) -> None:
    def fork(number: int) -> None:
        if number % 30:
            return
        pid = os.fork()
        if pid == 0:
            child()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0

    train(each=fork)


def forked_child_trains() -> None:
    forked(lambda: step(*next(iter(loader()))))


def forked_child_reports() -> None:
    def child() -> None:
        if client is not None:
            str(client.report())
            client.step()
            client.detach()
            torchperfd.attach().report()

    forked(child)


def closed_range() -> None:
    train(each=lambda number: os.closerange(3, 4096) if number == 30 else None)


def closed_one_by_one() -> None:
    def close(number: int) -> None:
        for descriptor in range(3, 512) if number == 30 else ():
            with contextlib.suppress(OSError):
                os.close(descriptor)

    train(each=close)


def duplicated_over() -> None:
    """Whatever the script has not opened becomes /dev/null, as in a sandbox."""

    def replace(number: int) -> None:
        if number == 30:
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                with contextlib.suppress(OSError):
                    if descriptor > 2 and os.fstat(descriptor):
                        os.dup2(null, descriptor)

    train(each=replace)


def fork_storm() -> None:
    """Children that train a little, all at once."""

    def fork(number: int) -> None:
        if number != 30:
            return
        children = []
        for _ in range(10):
            child = os.fork()
            if child == 0:
                forward_and_backward(torch.zeros(1, 8), torch.zeros(1, 1))
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)

    train(each=fork)


def without_environment() -> None:
    os.environ.clear()
    train()


def daemonised() -> None:
    """The double fork of a daemon, whose grandchild trains."""
    train(20)
    read, write = os.pipe()
    if os.fork():
        os.close(write)
        result.update(json.loads(os.read(read, 10_000)))
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    for descriptor in (each for each in range(3, 512) if each != write):
        with contextlib.suppress(OSError):
            os.close(descriptor)
    train(30)
    os.write(write, json.dumps({**result, "losses": digest.hexdigest()}).encode())
    os._exit(0)


def recursion() -> None:
    class Deep(torch.nn.Module):
        def forward(self, inputs: Any) -> Any:
            return self(inputs)

    def dive(number: int) -> None:
        if number % 30 == 0:
            result["raised"] += 1
            try:
                Deep()(torch.zeros(1))
            except RecursionError:
                result["seen"] += 1

    train(each=dive)


def memory_error() -> None:
    def allocate(number: int) -> None:
        if number % 30 == 0:
            result["raised"] += 1
            try:
                bytearray(1 << 46)
            except MemoryError:
                result["seen"] += 1

    train(each=allocate)


def few_descriptors() -> None:
    used = max(map(int, os.listdir("/proc/self/fd")))
    train(30)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    train(STEPS - 30)


def jumping_clock() -> None:
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + chance.choice((-1e6, 0, 1e6))
    time.time_ns = lambda: real_ns() + chance.choice((-(10**15), 0, 10**15))
    train()
    time.time, time.time_ns = real, real_ns


def broken_log() -> None:
    class Broken(logging.Handler):
        def handle(self, _record: logging.LogRecord) -> bool:
            raise ValueError("broken")

    logging.basicConfig(level=logging.DEBUG, handlers=[Broken()])
    train()


def traced() -> None:
    sys.settrace(lambda *_: None)
    threading.settrace(lambda *_: None)
    train()
    sys.settrace(None)


def collected() -> None:
    gc.set_threshold(50)
    gc.callbacks.append(lambda *_: None)

    def collect(_: int) -> None:
        gc.collect(0)

    train(each=collect)


def reattached() -> None:
    global client

    def again(number: int) -> None:
        global client
        if client is not None and number % 9 == 0:
            client.detach()
            client = torchperfd.attach()

    train(each=again)


def trained_on_a_thread() -> None:
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()


def dumped_later() -> None:
    with open(os.devnull, "w") as sink:
        faulthandler.dump_traceback_later(0.2, repeat=False, file=sink)
        train()
        faulthandler.cancel_dump_traceback_later()


def fails() -> None:
    train(40)
    raise ValueError("the script's own")


def exits() -> None:
    train(40)
    sys.exit(7)


def trains_at_exit() -> None:
    atexit.register(lambda: train(5))
    train(40)


def exits_hard() -> None:
    train(40)
    result["losses"] = digest.hexdigest()
    save()
    os._exit(3)


def killed_in_handler() -> None:
    """A timeout that ends the script through the loop's own exception."""

    def handler(*_: Any) -> None:
        raise TimeoutError("took too long")

    signal.signal(signal.SIGUSR1, handler)
    train(each=lambda number: signal.raise_signal(signal.SIGUSR1) if number == 40 else None)


BEHAVIOURS: dict[str, Callable[[], None]] = {
    **{each.__name__: each for each in (train, raising_timeouts, killed_worker, reports_in_handler)},
    **{each.__name__: each for each in (calls_in_handler, terminated, detached_by_sigterm, interrupted)},
    **{each.__name__: each for each in (forked_child_trains, forked_child_reports, closed_range)},
    **{each.__name__: each for each in (duplicated_over, fork_storm, without_environment)},
    **{each.__name__: each for each in (closed_one_by_one, daemonised, recursion, memory_error)},
    **{each.__name__: each for each in (few_descriptors, jumping_clock, broken_log, traced, collected)},
    **{each.__name__: each for each in (reattached, trained_on_a_thread, dumped_later, fails, exits)},
    **{each.__name__: each for each in (trains_at_exit, exits_hard, killed_in_handler)},
    "workers_forked": lambda: train(num_workers=1, multiprocessing_context="fork"),
    "workers_spawned": lambda: train(num_workers=1, multiprocessing_context="spawn", persistent_workers=True),
}

if __name__ == "__main__":
    if limit := int(os.environ.get("TRIAL_FILE_BYTES", "0")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        BEHAVIOURS[BEHAVIOUR]()
    finally:
        ended = time.monotonic()
        result["losses"] = result["losses"] or digest.hexdigest()
        if client is not None:
            result["account"] = client.report().totals.train.steps
