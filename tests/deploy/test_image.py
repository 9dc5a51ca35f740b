"""The image: built by buildah, started, and its client used by a training on this machine."""

import os
import subprocess
from pathlib import Path

import pytest
from tests.support.node import ROOT

pytestmark = [pytest.mark.needs("buildah", "debootstrap"), pytest.mark.timeout(1200)]


@pytest.mark.skipif(os.geteuid() != 0, reason="buildah isolates by chroot, for which it must be root")
def test_image_builds_serves_and_gives_out_its_client(debian12: Path) -> None:
    done = subprocess.run(
        [ROOT / "tools" / "test_image.sh"],
        # No registry is needed so; a release builds on the real base.
        env={"BASE": str(debian12), **os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
