"""The workflow that publishes image and chart: its scripts, with docker and helm replaced."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.node import ROOT

DIGEST = "sha256:" + "5e" * 32
JOBS: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "image.yml").read_text())["jobs"]


def script(job: str, name: str) -> str:
    (found,) = (step["run"] for step in JOBS[job]["steps"] if step.get("name") == name)
    return str(found)


def run(tmp_path: Path, text: str, digest: str) -> "subprocess.CompletedProcess[str]":
    """Run a script as the runner does, and note how docker and helm were called."""
    for tool in ("docker", "helm"):
        program = tmp_path / tool
        program.write_text(
            "#!/bin/bash\n"
            f'echo "{tool} $*" >>{tmp_path}/calls\n'
            "[[ $* != *--password-stdin ]] || cat >/dev/null\n"
            f'[[ $* != *"{{{{.Manifest"* ]] || echo "{digest}"\n'
        )
        program.chmod(0o755)
    return subprocess.run(
        ["bash", "-eo", "pipefail", "-c", text],
        cwd=tmp_path,
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "GITHUB_OUTPUT": str(tmp_path / "output"),
            "GITHUB_REPOSITORY": "Site/TorchPerfd",
            "GITHUB_REF_NAME": "v0.2.0",
            "GITHUB_ACTOR": "someone",
            "GH_TOKEN": "secret",
            "IMAGE": "ghcr.io/site/torchperfd",
        },
        capture_output=True,
        text=True,
        check=False,
    )


def test_base_of_the_image_is_named_by_its_digest(tmp_path: Path) -> None:
    done = run(tmp_path, script("base", "Name the base by its digest"), DIGEST)
    assert done.returncode == 0, done.stderr
    base, image = (tmp_path / "output").read_text().splitlines()
    assert base == f"base=docker.io/library/python:3.12-slim@{DIGEST}"
    assert image == "image=ghcr.io/site/torchperfd"
    assert JOBS["build"]["env"]["BASE"] == "${{ needs.base.outputs.base }}"
    assert '--build-arg BASE="$BASE"' in script("build", "Build")


@pytest.mark.parametrize("digest", ["", "latest", "sha256:12", DIGEST.upper()])
def test_no_image_is_published_without_digest_of_its_base(tmp_path: Path, digest: str) -> None:
    done = run(tmp_path, script("base", "Name the base by its digest"), digest)
    assert done.returncode == 1
    assert "no digest of docker.io/library/python:3.12-slim" in done.stderr
    assert JOBS["build"]["needs"] == "base"


def test_published_chart_names_the_image_by_its_digest(tmp_path: Path) -> None:
    chart = tmp_path / "deploy" / "helm" / "torchperfd"
    shutil.copytree(ROOT / "deploy" / "helm" / "torchperfd", chart, symlinks=True)
    done = run(tmp_path, script("publish", "Join both architectures, and publish the chart"), DIGEST)
    assert done.returncode == 0, done.stderr
    image = yaml.safe_load((chart / "values.yaml").read_text())["image"]
    assert (image["repository"], image["digest"]) == ("ghcr.io/site/torchperfd", DIGEST)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[-1] == "helm push /tmp/torchperfd-0.2.0.tgz oci://ghcr.io/site/charts"
    joined = next(call for call in calls if "imagetools create" in call)
    one, *both = (f"ghcr.io/site/torchperfd:0.2.0{part}" for part in ("", "-x86_64", "-aarch64"))
    assert joined.endswith(" ".join(["--tag", one, *both]))


def test_published_chart_needs_digest_of_the_image(tmp_path: Path) -> None:
    chart = tmp_path / "deploy" / "helm" / "torchperfd"
    shutil.copytree(ROOT / "deploy" / "helm" / "torchperfd", chart, symlinks=True)
    done = run(tmp_path, script("publish", "Join both architectures, and publish the chart"), "")
    assert done.returncode != 0
    assert "helm push" not in (tmp_path / "calls").read_text()
