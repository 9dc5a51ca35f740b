"""The page's address at the start of a run: once, by rank 0, of a daemon that has a page."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchperfd.launch import runner
from torchperfd.launch.runner import parse
from torchperfd.safety.logs import Faults
from torchperfd.v1 import contract, session_pb2

URL = "http://127.0.0.1:9407/metrics"


class Session:
    """As much of a daemon session as names its page."""

    def __init__(self) -> None:
        from torchperfd.runtime.daemon_session import DaemonSession

        unused: Any = SimpleNamespace(
            directory=SimpleNamespace(on_welcome=lambda *_: "", path=""),
            greet=lambda: None,
            report_frequently=lambda _: None,
        )
        identity: Any = SimpleNamespace(run="bert", rank=0, local_rank=0)
        self.session = DaemonSession(
            identity,
            unused,
            unused,
            unused,
            unused,
            lambda: 1,
            lambda: (0, ""),
            lambda *_: iter(()),
            Faults(),
        )

    def welcome(self, *features: str) -> None:
        self.session.on_welcome(session_pb2.Welcome(metrics_url=URL, features=features))


def client_of(session: Session, rank: int = 0) -> Any:
    return SimpleNamespace(run="bert", rank=rank, parts=SimpleNamespace(daemon_session=session.session))


def test_address_is_printed_once_when_the_daemon_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session()
    runner.announce_page(client_of(session), quiet=False, open_page=False)
    assert capsys.readouterr().err == ""
    session.welcome(contract.PAGE)
    assert capsys.readouterr().err == "torchperfd: live page at http://127.0.0.1:9407/\n"
    session.welcome(contract.PAGE)
    assert capsys.readouterr().err == ""


def test_address_of_a_daemon_that_was_there_before_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session()
    session.welcome(contract.PAGE)
    runner.announce_page(client_of(session), quiet=False, open_page=False)
    assert "live page" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rank", "quiet", "features"), [(1, False, ["page"]), (0, True, ["page"]), (0, False, [])]
)
def test_address_is_not_printed_without_need(
    rank: int, quiet: bool, features: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session()
    runner.announce_page(client_of(session, rank), quiet=quiet, open_page=False)
    session.welcome(*features)
    assert capsys.readouterr().err == ""


def test_page_is_opened_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("subprocess.Popen", lambda command, **_: started.append(command))
    session = Session()
    session.welcome(contract.PAGE)
    runner.announce_page(client_of(session), quiet=True, open_page=True)
    ((_, *arguments),) = started
    assert arguments == ["-P", "-m", "torchperfd_daemon", "open", "--run", "bert"]


def test_a_failure_to_announce_does_not_end_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError("no such file")

    monkeypatch.setattr("subprocess.Popen", broken)
    session = Session()
    runner.announce_page(client_of(session), quiet=True, open_page=True)
    session.welcome(contract.PAGE)
    assert session.session.metrics_url == URL


def test_parse_knows_open() -> None:
    options = parse(["--open", "train.py"])
    assert options is not None
    assert options.open_page
