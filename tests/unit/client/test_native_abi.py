"""Compiled modules that another version has left behind are not used, and the log names the remedy."""

import subprocess
import sys
from pathlib import Path

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
