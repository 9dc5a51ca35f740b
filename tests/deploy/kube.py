"""The chart as Helm renders it, and the programs of .venv-kube."""

import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml
from tests.support.node import ROOT

CHART: Final = ROOT / "deploy" / "helm" / "torchperfd"
VALUES: Final = {path.stem: path for path in sorted((Path(__file__).parent / "values").glob("*.yaml"))}
OLDEST: Final = "1.29"
NEWEST: Final = "1.37"
VERSIONS: Final = (OLDEST, "1.32", "1.35", NEWEST)
"""Versions of Kubernetes: the oldest one that has sidecars, to the newest that there are schemas of."""

Manifest = dict[str, Any]
_BIN: Final = ROOT / ".venv-kube" / "bin"
_TOKEN: Final = re.compile(r"(?<=^  token: )\S+$", re.MULTILINE)


def run(program: str, *arguments: object, given: str = "") -> "subprocess.CompletedProcess[str]":
    """Run a program of .venv-kube."""
    return subprocess.run(
        [str(_BIN / program), *map(str, arguments)],
        cwd=ROOT,
        input=given,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def template(*arguments: object, version: str = NEWEST) -> "subprocess.CompletedProcess[str]":
    """Render the chart for a version of Kubernetes, with the values of ``default`` where none are given."""
    return run(
        *("helm", "template", "torchperfd", CHART, "--namespace", "torchperfd"),
        *("--kube-version", f"{version}.0", "--values", VALUES["default"], *arguments),
    )


@cache
def rendered(values: str, version: str = NEWEST) -> str:
    """Return what the chart is with one of the sets of values; a token that it makes is always the same."""
    done = template("--values", VALUES[values], version=version)
    assert done.returncode == 0, done.stderr
    return _TOKEN.sub("bWFkZSBieSBIZWxt", done.stdout)


def manifests(text: str) -> list[Manifest]:
    """Return the objects of a file."""
    return [each for each in yaml.safe_load_all(text) if each]


def of_kind(values: str, kind: str) -> list[Manifest]:
    """Return the objects of a kind in a set of values."""
    return [each for each in manifests(rendered(values)) if each["kind"] == kind]


def problems(objects: list[Manifest], *versions: str) -> str:
    """Return what the schemas of Kubernetes refuse, in lines."""
    done = run("python", "tools/kube_checks.py", "validate", *versions, given=json.dumps(objects))
    assert not done.stderr, done.stderr
    return done.stdout.strip()


def injected(policy: Manifest, pod: Manifest) -> Manifest:
    """Return a pod as a policy leaves it."""
    done = run("python", "tools/kube_checks.py", "inject", given=json.dumps({"policy": policy, "pod": pod}))
    assert done.returncode == 0, done.stderr
    changed: Manifest = json.loads(done.stdout)
    return changed
