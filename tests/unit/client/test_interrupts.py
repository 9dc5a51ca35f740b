"""Safety: exceptions of the script pass, our own failures are counted, and the log waits."""

import contextlib
import functools
import gc
import logging
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import torchperfd
from torchperfd.hooks.models import LiveObjects
from torchperfd.safety import interrupts
from torchperfd.safety.interrupts import Flag, is_from_script
from torchperfd.safety.logs import Faults, Log


class TimeUpError(Exception):
    """A script's own."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def _raised_by(handler: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> BaseException:
    """Return what a handler raises while code runs that counts as the package's own."""
    monkeypatch.setattr(interrupts, "PACKAGE", __file__)
    signal.signal(signal.SIGUSR1, handler)
    return _raised_in(functools.partial(signal.raise_signal, signal.SIGUSR1))


def _raised_in(code: Callable[[], object]) -> BaseException:
    try:
        code()
    except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt and SystemExit, too
        return error
    raise AssertionError("nothing was raised")


def _foreign(source: str) -> Any:
    """Return the function ``handler`` of a source that is in no file of ours."""
    names: dict[str, Any] = {"TimeUpError": TimeUpError, "signal": signal}
    exec(compile(source, "<script>", "exec"), names)
    return names["handler"]


@pytest.mark.parametrize(
    "source",
    [
        "def handler(number, frame): raise RuntimeError('worker died')",
        "def handler(*_): raise TimeoutError",
        "def handler(number, frame):\n    def inner(): raise ValueError\n    inner()",
        "def handler(number, frame):\n    del frame\n    raise ValueError",
        "class Handler:\n    def __call__(self, number, frame): raise ValueError\nhandler = Handler()",
        "class Handler:\n    def on(self, number, frame): raise ValueError\nhandler = Handler().on",
        "import functools\ndef on(name, *_): raise ValueError\nhandler = functools.partial(on, 'x')",
        "def handler(number, frame):\n    signal.signal(number, signal.SIG_DFL)\n    raise KeyError",
        "def handler(number, frame): raise KeyboardInterrupt",
        "def handler(number, frame): raise SystemExit(3)",
    ],
)
def test_is_from_script_raised_by_handler_is_true(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_from_script(_raised_by(_foreign(source), monkeypatch))


def test_is_from_script_own_failure_is_false(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "PACKAGE", __file__)
    signal.signal(signal.SIGUSR1, _foreign("def handler(number, frame): raise ValueError"))
    failing = _foreign("def handler(batch): raise ValueError(batch)")
    for code in (lambda: {}["x"], lambda: int("x"), lambda: failing(1), lambda: [].pop()):  # type: ignore[index]
        assert not is_from_script(_raised_in(code))


def test_is_from_script_counts_all_rooms_as_ours() -> None:
    assert str(Path(torchperfd.__file__).parent) + "/" == interrupts.PACKAGE


def test_is_from_script_injected_type_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyThreadState_SetAsyncExc raises it: with no frame of the script's, and a type of the script's."""
    monkeypatch.setattr(interrupts, "PACKAGE", __file__)

    def code() -> None:
        raise TimeUpError

    assert is_from_script(_raised_in(code))


@pytest.mark.parametrize(("hooks", "stride"), [("native", 1), ("reference", 23)])
@pytest.mark.parametrize("how", ["", "live"])
def test_step_interrupted_anywhere_in_hooks_raises_once(hooks: str, stride: int, how: str) -> None:
    stride *= 11 if how else 1
    script = Path(__file__).with_name("interrupted_steps.py")
    command = [sys.executable, str(script), hooks, str(stride), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    words = done.stdout.split()
    counts = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    assert counts["raised"] > 30
    assert counts == {"raised": counts["raised"], "seen": counts["raised"], "difference": 0, "faults": 0}
    assert done.stderr == ""


def test_flag_set_within_set_wakes_every_thread() -> None:
    flag, woken = Flag(), []
    threads = [threading.Thread(target=lambda: woken.append(flag.wait(60))) for _ in range(3)]
    for thread in threads:
        thread.start()
    signal.signal(signal.SIGUSR1, lambda *_: flag.set())
    signal.raise_signal(signal.SIGUSR1)
    flag.set()
    for thread in threads:
        thread.join(60)
    assert woken == [True] * 3
    assert flag.wait(0)
    assert not Flag().wait(0)


def test_log_with_broken_handler_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        level = 0

        def handle(self, _record: object) -> None:
            raise ValueError("broken")

    log = Log("torchperfd.test-broken")
    logger = logging.getLogger("torchperfd.test-broken")
    logger.addHandler(Broken())  # type: ignore[arg-type]
    logger.propagate = False
    log.warning("a warning of %d", 1)
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    thread = threading.Thread(target=lambda: log.warning("from another thread"))
    thread.start()
    thread.join()
    assert failed == []


@pytest.mark.parametrize("set_apart", [gc.unfreeze, gc.freeze])
def test_live_objects_are_let_go_of_with_and_without_error(set_apart: Callable[[], None]) -> None:
    class Thing:
        def __init__(self) -> None:
            self.tracked: list[object] = []

    def read(error: type[Exception] | None) -> None:
        with contextlib.suppress(ValueError), LiveObjects(None) as live:
            assert any(type(each) is Thing for each in live.read())
            if error is not None:
                raise error

    gc.disable()
    set_apart()
    try:
        for error in (None, ValueError):
            thing = Thing()
            reference = weakref.ref(thing)
            read(error)
            del thing
            deadline = time.monotonic() + 60
            while reference() is not None and time.monotonic() < deadline:
                time.sleep(0.01)
            assert reference() is None
    finally:
        gc.unfreeze()
        gc.enable()


def test_a_place_is_spent_at_the_limit_and_no_other_with_it(caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults(limit=3)
    for _ in range(2):
        faults.note("flusher", ValueError("no"))
        assert not faults.spent("flusher")
    faults.note("flusher", ValueError("no"))
    faults.note("stream", OSError())
    assert faults.spent("flusher")
    assert not faults.spent("stream")
    assert not faults.spent("a place that never failed")
    assert faults.counts() == {"flusher": 3, "stream": 1}


def test_log_has_first_failure_in_full_and_last_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults = Faults(limit=3)
    error = ValueError("a reason")
    for _ in range(100):
        faults.note("flusher", error)
    first, last = caplog.records
    assert (first.levelno, first.name) == (logging.WARNING, "torchperfd")
    assert first.getMessage() == "flusher failed; training goes on unaffected"
    assert first.exc_info is not None
    assert first.exc_info[1] is error
    assert last.getMessage() == "flusher failed 3 times and is now off"
    assert last.exc_info is None
    assert faults.counts() == {"flusher": 100}


def test_returned_counts_are_a_copy() -> None:
    faults = Faults()
    faults.note("flusher", ValueError())
    faults.counts()["flusher"] = 99
    assert faults.counts() == {"flusher": 1}


def test_ten_failures_are_enough_by_default() -> None:
    faults = Faults()
    for _ in range(9):
        faults.note("hook draw", ValueError())
    assert not faults.spent("hook draw")
    faults.note("hook draw", ValueError())
    assert faults.spent("hook draw")


NAME = "torchperfd-held-log"


def test_held_log_keeps_each_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(NAME)
    log.hold()
    with caplog.at_level(logging.DEBUG):
        log.info("searching took %.1f s", 2.5)
        log.warning("device times are off: %s", "no events")
        log.warning("device times are off: %s", "no events")
        log.warning("gave up", exc_info=ValueError("bad"))
        log.warning("%d of %d", "wrong")
    assert caplog.text == ""
    assert log.release() == ["device times are off: no events", "gave up (ValueError: bad)"]
    assert log.release() == []
    log.warning("written again")
    assert "written again" in caplog.text


def test_held_log_is_written_to_handlers_of_its_own() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign,assignment]
    logging.getLogger(NAME).addHandler(handler)
    try:
        log = Log(NAME)
        log.hold()
        log.warning("asked for")
    finally:
        logging.getLogger(NAME).removeHandler(handler)
    assert [each.getMessage() for each in records] == ["asked for"]
    assert log.release() == []
