"""The limit on connections, on a clock of the test; and basic authentication."""

import asyncio
import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd_daemon.web.guard import BasicAuth, parse_credentials
from torchperfd_daemon.web.server import REQUEST_TIMEOUT_S, ConnectionLimiter


class FakeConnection:
    """A connection that counts how often it was aborted."""

    def __init__(self, *, idle: bool = False) -> None:
        self.idle, self.aborted = idle, 0

    def is_idle(self) -> bool:
        return self.idle

    def abort(self) -> None:
        self.aborted += 1


@pytest.fixture
def now() -> list[float]:
    return [100.0]


def test_limiter_full_aborts_the_connection_idle_longest(now: list[float]) -> None:
    limiter = ConnectionLimiter(3, lambda: now[0])
    connections = [FakeConnection() for _ in range(5)]
    for connection in connections[:3]:
        limiter.start_request(connection)
    limiter.end_request(connections[0])  # served just now: the second is idle longest
    limiter.start_request(connections[3])
    limiter.start_request(connections[4])
    assert [connection.aborted for connection in connections] == [0, 1, 1, 0, 0]
    assert len(limiter) == 3
    limiter.start_request(connections[0])
    assert len(limiter) == 3, "an open connection needs no new place"


def test_limiter_past_deadline_aborts_only_slow_clients(now: list[float]) -> None:
    limiter = ConnectionLimiter(9, lambda: now[0])
    slow, served, reading, again = (
        FakeConnection(),
        FakeConnection(),
        FakeConnection(idle=True),
        FakeConnection(),
    )
    for connection in (slow, served, reading, again):
        limiter.start_request(connection)
    limiter.end_request(served)
    limiter.end_request(again)
    now[0] += REQUEST_TIMEOUT_S - 1
    limiter.start_request(again)
    limiter.abort_slow()
    assert len(limiter) == 4
    now[0] += 1
    limiter.abort_slow()
    # Its response was still being sent when the request ended, and has arrived since.
    assert not limiter.has_deadline(reading)
    assert [connection.aborted for connection in (slow, served, reading, again)] == [1, 0, 0, 0]
    now[0] += 1000
    limiter.abort_slow()
    assert [connection.aborted for connection in (slow, served, reading, again)] == [1, 0, 0, 1]


def test_limiter_extend_gives_a_long_answer_more_time(now: list[float]) -> None:
    limiter = ConnectionLimiter(9, lambda: now[0])
    streaming, gone = FakeConnection(), FakeConnection()
    limiter.start_request(streaming)
    for _ in range(5):
        now[0] += REQUEST_TIMEOUT_S - 1
        limiter.extend(streaming)
        limiter.abort_slow()
        assert not streaming.aborted
    # Of a connection that has none, or is closed, it makes no deadline.
    limiter.extend(gone)
    assert len(limiter) == 1
    now[0] += REQUEST_TIMEOUT_S
    limiter.abort_slow()
    assert streaming.aborted


def test_limiter_late_response_does_not_readmit(now: list[float]) -> None:
    limiter = ConnectionLimiter(9, lambda: now[0])
    connection = FakeConnection()
    limiter.start_request(connection)
    limiter.remove(connection)
    limiter.end_request(connection)
    assert (len(limiter), connection.aborted) == (0, 0)


def test_limiter_close_aborts_every_connection(now: list[float]) -> None:
    limiter = ConnectionLimiter(9, lambda: now[0])
    connections = [FakeConnection(), FakeConnection(idle=True)]
    for connection in connections:
        limiter.start_request(connection)
    limiter.close()
    assert [connection.aborted for connection in connections] == [1, 1]
    assert len(limiter) == 0


def basic(name: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("header", "credentials"),
    [
        (basic("ada", "a:b"), ("ada", b"a:b")),
        ("basic YTo=", ("a", b"")),
        ("Bearer YTo=", None),
        ("Basic YQ==", None),
        ("Basic !", None),
        ("Basic", None),
        ("", None),
        ("Basic /zph", None),
    ],
)
def test_credentials_are_read(header: str, credentials: tuple[str, bytes] | None) -> None:
    assert parse_credentials(header) == credentials


@given(text=st.text(max_size=60), scheme=st.sampled_from(["", "Basic ", "basic"]))
def test_any_header_is_read_or_refused(text: str, scheme: str) -> None:
    parse_credentials(scheme + text)


class Counting:
    """Stands in for bcrypt's check, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[bytes, bytes]] = []

    def __call__(self, password: bytes, known_hash: bytes) -> bool:
        self.asked.append((password, known_hash))
        return password + b"#" == known_hash


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Counting:
    counting = Counting()
    monkeypatch.setattr("torchperfd_daemon.web.guard._matches", counting)
    return counting


USERS = {"ada": b"right#", "bob": b"other#"}


def ask(*headers: str, users: dict[str, bytes] | None = None) -> list[bool]:
    async def run() -> list[bool]:
        auth = BasicAuth()
        return [await auth.admits(header, users or USERS) for header in headers]

    return asyncio.run(run())


def test_the_right_password_of_the_right_user(checks: Counting) -> None:
    assert ask(basic("ada", "right"), basic("ada", "other"), basic("bob", "other"), "") == [
        True,
        False,
        True,
        False,
    ]


def test_a_name_that_does_not_exist_costs_as_much_and_is_refused(checks: Counting) -> None:
    assert ask(basic("eve", "right")) == [False]
    assert checks.asked == [(b"right", b"right#")]


def test_each_password_is_checked_once_even_among_many_guesses(checks: Counting) -> None:
    guesses = [basic("ada", str(number)) for number in range(500)]
    answers = ask(basic("ada", "right"), *guesses, basic("ada", "right"))
    assert answers == [True, *[False] * 500, True]
    assert len(checks.asked) == 501


async def test_a_password_that_changes_is_checked_again(checks: Counting) -> None:
    auth = BasicAuth()
    header = basic("ada", "right")
    answers = [await auth.admits(header, {"ada": known}) for known in (b"right#", b"newer#", b"right#")]
    assert answers == [True, False, True]


def test_with_the_real_bcrypt() -> None:
    bcrypt = pytest.importorskip("bcrypt")
    long = "x" * 100
    users = {
        # As Apache's htpasswd writes it.
        "ada": bcrypt.hashpw(b"right", bcrypt.gensalt(4)).replace(b"$2b$", b"$2y$"),
        "bob": bcrypt.hashpw(long.encode()[:72], bcrypt.gensalt(4)),
    }
    asked = (basic("ada", "right"), basic("ada", "wrong"), basic("bob", long), basic("ada", "a\0b"))
    assert ask(*asked, users=users) == [True, False, True, False]
