"""Which captures directory commands read: a service's captures are found without naming its directory."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.served import Served, serving_from_a_thread

from torchperfd_cli import main
from torchperfd_cli.commands._capture_catalog import DaemonCatalog, open_catalog
from torchperfd_daemon.captures import Catalog

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
