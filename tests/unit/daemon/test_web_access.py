"""The page's token: its file, who it makes an owner, and ``torchperfd open``."""

from pathlib import Path

import pytest
from starlette.datastructures import Headers
from starlette.responses import Response
from tests.support.served import serving_from_a_thread

from torchperfd_cli import main
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.web.access import (
    LINK_S,
    Access,
    Links,
    PageToken,
    read_token,
    remove_token,
    token_path,
)
from torchperfd_daemon.web.endpoint import KEPT_S, AnswerCache


@pytest.fixture
def socket(tmp_path: Path) -> str:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    return str(private / "daemon.sock")


def test_token_is_stored_for_its_user_alone(socket: str) -> None:
    token = PageToken()
    path = token.store(socket)
    assert path == Path(socket).parent / "page.token"
    assert path.stat().st_mode & 0o777 == 0o600
    assert token.access_of(Headers({"authorization": f"Bearer {read_token(socket)}"})) is Access.OWNER
    again = PageToken()
    again.store(socket)
    # Each start makes another one, and the old one is worth nothing.
    assert token.access_of(Headers({"authorization": f"Bearer {read_token(socket)}"})) is Access.REFUSED
    assert [each.name for each in path.parent.iterdir()] == ["page.token"]
    remove_token(socket)
    assert not path.exists()
    with pytest.raises(TorchperfdError, match="cannot read the page's token"):
        read_token(socket)


def test_token_of_another_socket_has_another_name() -> None:
    assert token_path("/run/a/d.sock") == Path("/run/a/d.sock.page.token")


def test_token_is_not_written_through_a_link(socket: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("untouched")
    token_path(socket).symlink_to(target)
    path = PageToken().store(socket)
    assert target.read_text() == "untouched"
    assert not path.is_symlink()


def test_a_token_in_a_directory_that_is_a_link_is_refused(socket: str, tmp_path: Path) -> None:
    PageToken().store(socket)
    (tmp_path / "linked").symlink_to(Path(socket).parent)
    socket = str(tmp_path / "linked" / "daemon.sock")
    with pytest.raises(TorchperfdError):
        PageToken().store(socket)
    with pytest.raises(TorchperfdError):
        read_token(socket)


def test_tokens_cannot_be_guessed(socket: str) -> None:
    secrets = set()
    for _ in range(20):
        PageToken().store(socket)
        secrets.add(read_token(socket))
    assert len(secrets) == 20
    assert min(map(len, secrets)) >= 43


@pytest.mark.parametrize(
    ("headers", "access"),
    [
        ({}, Access.STRANGER),
        ({"authorization": "Basic YTpi"}, Access.STRANGER),
        ({"authorization": "Bearer t"}, Access.OWNER),
        ({"authorization": "bearer t"}, Access.OWNER),
        ({"authorization": "Bearer x"}, Access.REFUSED),
        ({"authorization": "Bearer"}, Access.REFUSED),
        ({"x-torchperfd-token": "t"}, Access.OWNER),
        ({"x-torchperfd-token": ""}, Access.REFUSED),
        ({"x-torchperfd-token": "t", "authorization": "Basic YTpi"}, Access.OWNER),
        ({"x-torchperfd-token": "x", "authorization": "Bearer t"}, Access.REFUSED),
    ],
)
def test_access_follows_the_token(headers: dict[str, str], access: Access) -> None:
    assert PageToken("t").access_of(Headers(headers)) is access


def test_answers_are_kept_for_less_than_a_second() -> None:
    now = [0.0]
    cache = AnswerCache(clock=lambda: now[0])
    answer = Response(b"{}")
    cache.add("a", answer)
    assert cache.get("a") is answer
    assert cache.get("b") is None
    now[0] = KEPT_S
    assert cache.get("a") is None
    cache.add("a", Response(status_code=404))
    cache.add("b", Response(bytes(1 << 20)))
    assert (cache.get("a"), cache.get("b")) == (None, None)
    for number in range(100):
        cache.add(number, answer)
    assert (cache.get(0), cache.get(99)) == (None, answer)
    cache.clear()
    assert cache.get(99) is None


def test_links_end_after_a_minute_and_are_bounded() -> None:
    now = [0.0]
    links: Links[str] = Links(lambda: now[0])
    link = links.add("a")
    key = link.removeprefix("/links/")
    now[0] = LINK_S - 1
    assert links.find(key) == "a"
    now[0] = LINK_S
    assert links.find(key) is None
    assert links.find("") is None
    first = links.add("first").removeprefix("/links/")
    for number in range(64):
        links.add(str(number))
    assert links.find(first) is None


def test_open_prints_the_address_with_the_token(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with serving_from_a_thread() as served:
        token = PageToken()
        token.store(served.socket)
        assert main.run_command(["open", "--print-url", "--socket", served.socket]) == 0
        url = f"http://127.0.0.1:9407/#token={read_token(served.socket)}"
        assert capfd.readouterr().out == f"{url}\n"
        seen: list[str] = []

        def browse(address: str) -> bool:
            seen.append(address)
            return True

        monkeypatch.setattr("webbrowser.open", browse)
        assert main.run_command(["open", "--run", "exp/1", "--socket", served.socket]) == 0
        assert read_token(served.socket) not in seen[0]
        page = Path(seen[0].removeprefix("file://"))
        assert page.stat().st_mode & 0o777 == 0o600
        assert f'url={url.replace("/#", "/runs/exp%2F1#")}"' in page.read_text()
        # The token is in no line that stays on the screen, and on no command line.
        assert read_token(served.socket) not in capfd.readouterr().err
        remove_token(served.socket)
        assert main.run_command(["open", "--print-url", "--socket", served.socket]) == 1
