"""The committed code is what the pinned generator makes of protos/ today."""

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.node import ROOT

VENV = ROOT / ".venv-protos"


@pytest.mark.skipif(not VENV.exists(), reason="`make protos` has not been run; CI runs it first")
def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    for part in ("tools", "protos"):
        shutil.copytree(ROOT / part, tmp_path / part)
    generated = tmp_path / "client" / "torchperfd" / "v1"
    generated.mkdir(parents=True)
    subprocess.run(
        [str(tmp_path / "tools" / "gen_protos.sh")],
        env={"PATH": "/usr/bin:/bin", "TORCHPERFD_PROTO_VENV": str(VENV)},
        check=True,
        capture_output=True,
    )
    committed = ROOT / "client" / "torchperfd" / "v1"
    names = sorted(path.name for path in committed.glob("*_pb2*.py*"))
    assert names == sorted(path.name for path in generated.iterdir())
    for name in names:
        assert (generated / name).read_text() == (committed / name).read_text(), f"run make protos: {name}"
