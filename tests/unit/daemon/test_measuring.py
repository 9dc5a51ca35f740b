"""Commands that measure the machine: SIGTERM prints what there is, and a busy machine is named first."""

import os
import signal
import threading

import psutil
import pytest

from torchperfd_cli.commands._measuring import INTERRUPTED, results_on_sigterm, warn_if_busy


def test_sigterm_interrupts_and_has_its_exit_code() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with results_on_sigterm() as interruption:
        assert interruption.exit_code == INTERRUPTED
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert interruption.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_on_another_thread_is_left_alone() -> None:
    before, codes = signal.getsignal(signal.SIGTERM), []

    def measure() -> None:
        with results_on_sigterm() as interruption:
            codes.append(interruption.exit_code)

    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
    assert (codes, signal.getsignal(signal.SIGTERM)) == ([INTERRUPTED], before)


@pytest.mark.parametrize(("percent", "words"), [(97.0, "97%"), (12.0, "")])
def test_busy_machine_is_named(
    percent: float, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda _: percent)
    warn_if_busy()
    err = capsys.readouterr().err
    assert words in err
    assert bool(err) is bool(words)
