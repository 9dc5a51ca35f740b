"""Which run, capture and captures directory a command means."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.served import Served, serving_from_a_thread

from torchperfd_cli import main
from torchperfd_cli.commands._capture_catalog import DaemonCatalog, open_catalog
from torchperfd_cli.commands._scope import known_name
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.errors import NoSuchTargetError
from torchperfd_daemon.views.model import whole_name

RUNS = ["f50ba658-ca32-4ac8-9d27-b5ddb200a20b", "f5", "bert-17", "bert-18"]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("f50ba658-ca32-4ac8-9d27-b5dd", RUNS[0]),
        ("f50", RUNS[0]),
        ("f5", "f5"),
        ("bert-17", "bert-17"),
        ("gpt", "gpt"),
        ("", ""),
    ],
)
def test_whole_name_unique_prefix_is_completed(given: str, found: str) -> None:
    assert whole_name(given, RUNS, "run") == found


def test_whole_name_shared_prefix_is_refused_with_the_names() -> None:
    with pytest.raises(NoSuchTargetError, match="2 runs begin with bert: bert-17, bert-18; write more"):
        whole_name("bert", RUNS, "run")


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("bert-71", "did you mean bert-17 or bert-18?"),
        ("bret-18", "did you mean bert-18?"),
        ("f50ba658-ca33", f"did you mean {RUNS[0]}?"),
        ("brt", "did you mean bert-17 or bert-18?"),
    ],
)
def test_known_name_near_miss_is_refused_with_what_is_near(given: str, hint: str) -> None:
    with pytest.raises(NoSuchTargetError) as refused:
        known_name(given, RUNS, "run")
    assert str(refused.value) == f"no run {given}; {hint}"


@pytest.mark.parametrize("given", ["gpt", "x", "", "bert-17", "f50"])
def test_known_name_without_near_names_is_as_whole_name(given: str) -> None:
    assert known_name(given, RUNS, "run") == whole_name(given, RUNS, "run")


def test_capture_prefix_is_completed_from_the_directory(tmp_path: Path) -> None:
    for name in ("20261125-165610-645ff7", "20261125-165810-0a5ff7", "lost+found"):
        (tmp_path / name).mkdir()
    catalog = Catalog(tmp_path)
    assert whole_name("20261125-1656", catalog.ids(), "capture") == "20261125-165610-645ff7"
    assert whole_name("lost", catalog.ids(), "capture") == "lost"
    with pytest.raises(NoSuchTargetError, match="2 captures begin with 2026"):
        whole_name("2026", catalog.ids(), "capture")
    assert whole_name("2026", Catalog(tmp_path / "none").ids(), "capture") == "2026"


SERVICES = "20260101-120000-aaaaaa"
OWN = "20260202-120000-bbbbbb"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with serving_from_a_thread() as served:
        monkeypatch.delenv("TORCHPERFD_CAPTURES_DIR", raising=False)
        monkeypatch.setenv("TORCHPERFD_SOCKET", served.socket)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        Catalog(tmp_path / "torchperfd" / "captures").create(OWN)
        yield served


@pytest.fixture
def listed(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[list[str], str]]:
    """Run `captures list`; return the ids and stderr."""

    def run(*options: str) -> tuple[list[str], str]:
        assert main.run_command(["captures", *options, "list"]) == 0
        captured = capfd.readouterr()
        return [line.split()[0] for line in captured.out.splitlines()[1:]], captured.err

    return run


Listed = Callable[..., tuple[list[str], str]]


def test_captures_of_a_service_are_listed_without_naming_it(
    served: Served, listed: Listed, tmp_path: Path
) -> None:
    served.catalog.create(SERVICES)
    ids, err = listed()
    assert ids == [SERVICES]
    assert f"--captures-dir {tmp_path}/torchperfd/captures" in err, "the user's own are not forgotten"


def test_directory_that_is_named_comes_before_the_daemons(
    served: Served, listed: Listed, tmp_path: Path
) -> None:
    served.catalog.create(SERVICES)
    assert listed("--captures-dir", str(tmp_path / "torchperfd" / "captures")) == ([OWN], "")


def test_without_a_daemon_the_users_own_captures_are_listed(
    served: Served, listed: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHPERFD_SOCKET", f"{served.socket}.none")
    assert listed() == ([OWN], "")


def test_directory_elsewhere_is_read_through_the_daemon(served: Served) -> None:
    # As of a daemon in a container; this one has not made its directory yet.
    assert not served.catalog.directory.exists()
    catalog = open_catalog(None)
    assert isinstance(catalog, DaemonCatalog)
    assert (catalog.directory, catalog.ids()) == (served.catalog.directory, ())
