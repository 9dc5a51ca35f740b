"""The package from outside: its names, what importing costs, and outdated compiled modules."""

import inspect
import re
import subprocess
import sys
import types
from pathlib import Path

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


def test_attach_loads_what_is_rarely_needed_later() -> None:
    script = """
import sys, torchperfd
client = torchperfd.attach()
late = {"captures.capture", "captures.tracer", "loggers", "hooks.device_clock"}
print(client.attached, sorted(late & {name.removeprefix("torchperfd.") for name in sys.modules}))
client.detach()
"""
    assert fresh(script) == "True []\n"


def test_the_package_is_typed_and_versioned() -> None:
    from importlib.resources import files

    assert (files("torchperfd") / "py.typed").is_file()
    assert re.match(r"\d+\.\d+\.(\d+|dev\d+)", torchperfd.__version__)


def test_errors_know_their_exit_code() -> None:
    assert issubclass(torchperfd.CaptureTimeoutError, torchperfd.CaptureError)
    assert issubclass(torchperfd.CaptureError, torchperfd.TorchperfdError)
    assert (torchperfd.CaptureError.exit_code, torchperfd.CaptureTimeoutError.exit_code) == (1, 124)


OUTDATED = """
import sys, types
for name in ("torchperfd.events._native", "torchperfd.steps._templates"):
    sys.modules[name] = module = types.ModuleType(name)
    module.__file__ = f"/checkout/{name}.so"
import torchperfd
from torchperfd import events
from torchperfd.events import reference
from torchperfd.steps import templates

client = torchperfd.attach()
with client.phase("augment"):
    client.step()
print(events.NATIVE, events.EventBuffer is reference.EventBuffer, templates.AVAILABLE)
print(client.report().totals.train.steps, client.parts.instruments.faults.counts())
client.detach()
"""


def test_outdated_native_modules_give_way_to_python(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OUTDATED],
        cwd=Path(__file__).parents[3] / "client",
        env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False True False\n1 {}\n"
    (line,) = (line for line in done.stderr.splitlines() if "hooks run in Python" in line)
    assert "/checkout/torchperfd.events._native.so was compiled from another version of torchperfd" in line
    assert "pip install -e ." in line
