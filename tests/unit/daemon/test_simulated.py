"""Ranks of `serve --demo` have no process: commands that need one say so."""

import pytest

from torchperfd_daemon.errors import NoSuchTargetError
from torchperfd_daemon.rpc.callers import Caller
from torchperfd_daemon.service.permissions import Rights
from torchperfd_daemon.service.stack_requests import choose
from torchperfd_daemon.service.targets import Targets
from torchperfd_daemon.store import RankIdentity, Store

ADMIN = Rights(Caller(0, 1), is_admin=True)
SIMULATED = r"run demo is simulated \(`torchperfd serve --demo`\): it has no processes; start a real one"


@pytest.fixture
def store() -> Store:
    store = Store()
    for rank in range(8):
        store.join(RankIdentity("demo", rank, 8))
    return store


def test_capture_of_simulated_run_says_so(store: Store) -> None:
    targets = Targets(store, lambda _: [], ADMIN)
    with pytest.raises(NoSuchTargetError, match=SIMULATED):
        targets.run("")
    with pytest.raises(NoSuchTargetError, match=SIMULATED):
        targets.ranks("demo", [])


def test_stacks_of_simulated_run_say_so(store: Store) -> None:
    with pytest.raises(NoSuchTargetError, match=SIMULATED):
        choose(store, "demo", [], ADMIN)


def test_stacks_beside_a_simulated_run_are_asked(store: Store) -> None:
    store.join(RankIdentity("bert", 0, pid=7))
    assert [rank.identity.run for rank in choose(store, "bert", [], ADMIN)] == ["bert"]
