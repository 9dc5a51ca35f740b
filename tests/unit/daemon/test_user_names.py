"""The names of ranks' users: looked up seldom, only if configured, and never while a page waits for them."""

import pwd
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.unit.daemon.test_ownership import START, Proc, identity_of, reading

from torchperfd_daemon.collectors.kubelet import PodResources
from torchperfd_daemon.collectors.process import RankProcess
from torchperfd_daemon.ownership import Owner, OwnershipCollector, UserNames
from torchperfd_daemon.server.workers import NodeSamplers
from torchperfd_daemon.store.model import RankIdentity
from torchperfd_daemon.store.store import Store


class Users:
    """The users of a node, and the ids that were looked up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **names: int) -> None:
        self.names = {uid: name for name, uid in names.items()}
        self.asked: list[int] = []
        monkeypatch.setattr(pwd, "getpwuid", self.look_up)

    def look_up(self, uid: int) -> pwd.struct_passwd:
        """Return a user as the system does.

        Raises:
            KeyError: There is none.
        """
        self.asked.append(uid)
        return pwd.struct_passwd((self.names[uid], "x", uid, 100, "", "/", "/bin/sh"))


def test_user_is_looked_up_once_and_retried_if_nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    users, now = Users(monkeypatch, ada=1001), [0.0]
    names = UserNames(lambda: now[0])

    def named(*uids: int) -> list[str]:
        names.look_up([*uids, *uids])
        return [names.of(uid) for uid in uids]

    assert named(1001, 1002) == ["ada", "1002"]
    users.names[1002] = "bob\x1b[2J"
    now[0] = 299.0
    assert named(1001, 1002) == ["ada", "1002"]
    assert sorted(users.asked) == [1001, 1002]
    now[0] = 301.0
    ada, bob = named(1001, 1002)
    assert (ada, bob[:3], bob.isprintable()) == ("ada", "bob", True)
    assert sorted(users.asked) == [1001, 1002, 1002]


def test_user_without_ranks_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    users, names = Users(monkeypatch, ada=1001), UserNames()
    names.look_up([1001])
    names.look_up([])
    assert names.of(1001) == ""
    users.names[1001] = "eve"
    names.look_up([1001])
    assert names.of(1001) == "eve"


def test_page_looks_up_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    users, names = Users(monkeypatch, ada=1001), UserNames()
    assert [names.of(uid) for uid in (1001, None)] == ["", ""]
    assert users.asked == []


@pytest.mark.parametrize(("names_users", "name"), [(False, ""), (True, "ada")])
def test_users_are_looked_up_only_if_configured(
    monkeypatch: pytest.MonkeyPatch, names_users: bool, name: str
) -> None:
    users, store = Users(monkeypatch, ada=1001), Store()
    store.join(RankIdentity("r", 0), uid=1001)
    samplers = NodeSamplers(store, 60, simulated=False, names_users=names_users)
    samplers.owners.sample()
    assert (samplers.users.of(1001), users.asked) == (name, [1001] if name else [])


def test_slow_lookup_keeps_no_other_owner_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait(uid: int) -> pwd.struct_passwd:
        begun.set()
        go_on.wait(30)
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", wait)
    ranks = [RankProcess("r", 0, 10, 0, START, device_uuid="0", uid=1001), RankProcess("r", 1, 11, 0, START)]
    names, nowhere = UserNames(), PodResources(Path("/nowhere"))
    seen = OwnershipCollector(lambda: ranks, lambda: [reading(0)], nowhere, Proc(tmp_path).root, names)
    with ThreadPoolExecutor(1) as worker:
        sampled = worker.submit(seen.sample)
        try:
            assert begun.wait(30)
            assert seen.of(identity_of(ranks[0])) == Owner(gpu_uuid="GPU-0")
            assert names.of(1001) == ""
        finally:
            go_on.set()
        sampled.result(30)
    assert names.of(1001) == "1001"
