"""Commands of the deployment pages, run as they stand there, as far as that needs no cluster."""

import base64
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.deploy.kube import CHART, manifests
from tests.support.node import ROOT
from tests.support.page_commands import begins, command, commands
from tests.support.wheels import build_wheel
from tools.release.build import write_checksums

from torchperfd_daemon.fleet.credentials import parse_tokens

DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes" / "README.md"
BASE = DEPLOY / "kubernetes" / "base"
KUBE = ROOT / ".venv-kube" / "bin"


def shell(line: str, folder: Path, *programs: Path) -> str:
    """Run a line by bash in a folder, with directories in front of the search path; return what it prints."""
    path = os.pathsep.join([*map(str, programs), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def daemonset() -> dict[str, Any]:
    """Return the DaemonSet of the base, which is the chart's."""
    objects = manifests((BASE / "torchperfd.yaml").read_text())
    (found,) = (each for each in objects if each["kind"] == "DaemonSet")
    return found


@pytest.mark.timeout(900)
def test_release_is_installed_without_an_index(tmp_path: Path) -> None:
    page = DEPLOY / "README.md"
    release, environment = tmp_path / "release", tmp_path / "venv"
    release.mkdir()
    wheel = build_wheel(ROOT, release)
    write_checksums(release)
    (release / "locks").symlink_to(ROOT / "locks")
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    programs = environment / "bin"
    assert f"{wheel.name}: OK" in shell(command(page, "sha256sum"), release, programs)
    shell(command(page, "pip download"), release, programs)
    shell(command(page, "pip install"), release, programs)
    assert wheel.name.split("-")[1] in shell("torchperfd version", release, programs)


@pytest.mark.needs("kubectl")
def test_namespace_of_the_page_is_that_of_the_base(tmp_path: Path) -> None:
    made = shell(
        f"{command(KUBERNETES, 'kubectl create namespace')} --dry-run=client -o yaml", tmp_path, KUBE
    )
    (tmp_path / "namespace.yaml").write_text(made)
    line = re.sub(
        r"namespace \S+", "--local -f namespace.yaml -o yaml", command(KUBERNETES, "kubectl label"), count=1
    )
    labelled = yaml.safe_load(shell(line, tmp_path, KUBE))
    expected = yaml.safe_load((BASE / "namespace.yaml").read_text())
    assert labelled["metadata"]["name"] == expected["metadata"]["name"]
    assert expected["metadata"]["labels"].items() <= labelled["metadata"]["labels"].items()


@pytest.mark.needs("kubectl", "openssl")
def test_secret_of_the_page_is_what_daemons_mount(tmp_path: Path) -> None:
    line = f"{command(KUBERNETES, 'kubectl create secret')} --dry-run=client -o yaml"
    secret = yaml.safe_load(shell(line, tmp_path, KUBE))
    (token,) = parse_tokens(base64.b64decode(secret["data"]["token"]))
    assert len(token) == 64
    daemons = daemonset()
    mounted = [
        volume["secret"]["secretName"]
        for volume in daemons["spec"]["template"]["spec"]["volumes"]
        if "secret" in volume
    ]
    assert mounted == [secret["metadata"]["name"]]
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    assert secret["metadata"]["namespace"] == kustomization["namespace"]


@pytest.mark.needs("kubectl")
def test_folders_and_names_of_the_page_exist() -> None:
    folder = command(KUBERNETES, "kubectl apply").split()[-1]
    assert "kind: DaemonSet" in shell(f"kubectl kustomize {folder}", ROOT, KUBE)
    release = command(KUBERNETES, "helm install").split()[2]
    assert command(KUBERNETES, "helm test").split()[2] == release
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert command(KUBERNETES, "docker push").split()[-1] == f"REGISTRY/torchperfd:{chart['appVersion']}"
    named = set(re.findall(r"daemonset/(\S+?)[ `]", KUBERNETES.read_text()))
    assert named == {daemonset()["metadata"]["name"]}


@pytest.mark.parametrize("name", ["docker", "compose"])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount, and give directories away")
def test_directories_are_given_to_the_images_user(name: str, tmp_path: Path) -> None:
    page = (DEPLOY / name / "README.md").read_text(encoding="utf-8")
    lines = [line for line in commands(page) if begins(line, "install")]
    places = ["/run/torchperfd", "/var/lib/torchperfd/captures"]
    assert [line.split()[-1] for line in lines] == places
    script = [
        'mount -t tmpfs none /run; mount -t tmpfs none /var/lib; sudo() { "$@"; }',
        *lines,
        f"stat -c '%a %u:%g' {' '.join(places)}",
    ]
    shown = shell(f"unshare --mount bash -ec {shlex.quote('; '.join(script))}", tmp_path).splitlines()
    user = re.search(r"^USER (.*)$", (DEPLOY / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    assert user is not None
    assert shown == [f"755 {user[1]}", f"700 {user[1]}"]
