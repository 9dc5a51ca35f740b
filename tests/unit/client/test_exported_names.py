"""The public names are in ``torchperfd`` alone, and importing it costs almost nothing."""

import inspect
import re
import subprocess
import sys
import types

import pytest

import torchperfd


def fresh(source: str) -> str:
    command = [sys.executable, "-c", source]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_all_is_exactly_what_is_public() -> None:
    assert torchperfd.__all__ == [
        "Capture",
        "CaptureError",
        "CaptureTimeoutError",
        "Client",
        "JobCapture",
        "TorchperfdError",
        "__version__",
        "attach",
    ]
    assert dir(torchperfd) == sorted(torchperfd.__all__)


def test_package_exports_no_other_name_without_underscore() -> None:
    public = {
        name
        for name, value in vars(torchperfd).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "TYPE_CHECKING"
    }
    assert public <= set(torchperfd.__all__)


@pytest.mark.parametrize("name", torchperfd.__all__)
def test_each_public_name_is_there_and_described(name: str) -> None:
    value = getattr(torchperfd, name)
    if name != "__version__":
        assert value.__name__ == name
        assert value.__module__.startswith("torchperfd.")
        assert inspect.getdoc(value)


def test_a_star_import_brings_all_of_it() -> None:
    names: dict[str, object] = {}
    exec("from torchperfd import *", names)
    assert set(torchperfd.__all__) <= set(names)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'torchperfd' has no attribute 'Recorder'"):
        torchperfd.Recorder  # noqa: B018


HEAVY = "{'torch', 'grpc', 'google.protobuf', 'numpy', 'prometheus_client'}"


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert fresh(f"import sys, torchperfd; print(sorted({HEAVY} & set(sys.modules)))") == "[]\n"


def test_neither_does_looking_at_every_public_name() -> None:
    assert (
        fresh(f"""
import sys
from torchperfd import *
print(sorted({HEAVY} & set(sys.modules)))
""")
        == "[]\n"
    )


def test_attach_without_a_daemon_imports_no_grpc() -> None:
    """Protobuf comes with the client, grpc with the first daemon, torch with the script."""
    assert (
        fresh(f"""
import sys, torchperfd
client = torchperfd.attach()
print(sorted(({HEAVY} - {{'google.protobuf'}}) & set(sys.modules)))
client.detach()
print(sorted(({HEAVY} - {{'google.protobuf'}}) & set(sys.modules)))
""")
        == "[]\n[]\n"
    )


def test_the_package_is_typed_and_versioned() -> None:
    from importlib.resources import files

    assert (files("torchperfd") / "py.typed").is_file()
    assert re.match(r"\d+\.\d+\.(\d+|dev\d+)", torchperfd.__version__)


def test_errors_know_their_exit_code() -> None:
    assert issubclass(torchperfd.CaptureTimeoutError, torchperfd.CaptureError)
    assert issubclass(torchperfd.CaptureError, torchperfd.TorchperfdError)
    assert (torchperfd.CaptureError.exit_code, torchperfd.CaptureTimeoutError.exit_code) == (1, 124)
