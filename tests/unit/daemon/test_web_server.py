"""The door before uvicorn, by a clock of its own; and basic authentication."""

import asyncio
import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd_daemon.basic_auth import BasicAuth, parse_credentials
from torchperfd_daemon.web_server import PATIENCE_S, Door


class Guest:
    """A connection that notes its end."""

    def __init__(self, *, waiting: bool = False) -> None:
        self.waiting, self.ended = waiting, 0

    def is_waiting(self) -> bool:
        return self.waiting

    def hang_up(self) -> None:
        self.ended += 1


@pytest.fixture
def now() -> list[float]:
    return [100.0]


def test_the_one_longest_quiet_makes_room(now: list[float]) -> None:
    door = Door(3, lambda: now[0])
    guests = [Guest() for _ in range(5)]
    for guest in guests[:3]:
        door.busy(guest)
    door.idle(guests[0])  # served just now: the second is quiet for longest
    door.busy(guests[3])
    door.busy(guests[4])
    assert [guest.ended for guest in guests] == [0, 1, 1, 0, 0]
    assert len(door) == 3
    door.busy(guests[0])
    assert len(door) == 3, "who is in already needs no room"


def test_a_dawdler_has_to_leave_and_who_was_served_may_stay(now: list[float]) -> None:
    door = Door(9, lambda: now[0])
    dawdler, served, reading, again = Guest(), Guest(), Guest(waiting=True), Guest()
    for guest in (dawdler, served, reading, again):
        door.busy(guest)
    door.idle(served)
    door.idle(again)
    now[0] += PATIENCE_S - 1
    door.busy(again)
    door.sweep()
    assert len(door) == 4
    now[0] += 1
    door.sweep()
    # Its answer was still on the way when it was finished, and has arrived since.
    assert not door.is_busy(reading)
    assert [guest.ended for guest in (dawdler, served, reading, again)] == [1, 0, 0, 0]
    now[0] += 1000
    door.sweep()
    assert [guest.ended for guest in (dawdler, served, reading, again)] == [1, 0, 0, 1]


def test_who_has_left_is_not_let_in_by_an_answer(now: list[float]) -> None:
    door = Door(9, lambda: now[0])
    guest = Guest()
    door.busy(guest)
    door.leave(guest)
    door.idle(guest)
    assert (len(door), guest.ended) == (0, 0)


def test_in_the_end_all_have_to_leave(now: list[float]) -> None:
    door = Door(9, lambda: now[0])
    guests = [Guest(), Guest(waiting=True)]
    for guest in guests:
        door.busy(guest)
    door.close()
    assert [guest.ended for guest in guests] == [1, 1]
    assert len(door) == 0


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
    monkeypatch.setattr("torchperfd_daemon.basic_auth._matches", counting)
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


def test_a_password_that_changes_is_checked_again(checks: Counting) -> None:
    async def run() -> list[bool]:
        auth = BasicAuth()
        header = basic("ada", "right")
        return [await auth.admits(header, {"ada": known}) for known in (b"right#", b"newer#", b"right#")]

    assert asyncio.run(run()) == [True, False, True]


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
