"""What the policy makes of pods, and how a script starts with the client that a pod was given."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.deploy.kube import NEWEST, VERSIONS, Manifest, injected, of_kind, problems
from tests.support.node import ROOT, Node, eventually, torchrun
from tests.support.page_commands import command

RUN = ROOT / "deploy" / "docker" / "run.py"
EXAMPLE = ROOT / "deploy" / "kubernetes" / "sidecar-example.yaml"
KUBERNETES = ROOT / "deploy" / "kubernetes" / "README.md"
OURS = ("torchperfd", "/run/torchperfd", "/opt/torchperfd")


def policy(values: str) -> Manifest:
    (found,) = of_kind(values, "MutatingAdmissionPolicy")
    return found


def pod(**container: Any) -> Manifest:
    train = {"name": "train", "image": "train:1", **container}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "train", "labels": {"torchperfd/inject": "true"}},
        "spec": {
            "containers": [train, {"name": "log", "image": "log:1"}],
            "volumes": [{"name": "data", "emptyDir": {}}],
        },
    }


@pytest.mark.needs("helm")
@pytest.mark.parametrize(("values", "given"), [("full", 1), ("sidecar", 2)])
def test_pod_gets_client_and_socket(values: str, given: int) -> None:
    before = pod(env=[{"name": "POD_UID", "value": "mine"}])
    after = injected(policy(values), before)
    assert problems([after], *VERSIONS) == ""
    assert len(after["spec"]["initContainers"]) == given
    for container in after["spec"]["containers"]:
        assert [each["mountPath"] for each in container["volumeMounts"]] == list(OURS[1:])
        assert all(each["readOnly"] for each in container["volumeMounts"])
    train = after["spec"]["containers"][0]
    assert train["env"][0] == {"name": "POD_UID", "value": "mine"}
    assert [each["name"] for each in train["env"]].count("POD_UID") == 1
    assert after["spec"]["volumes"][0] == {"name": "data", "emptyDir": {}}


@pytest.mark.needs("helm")
def test_object_of_the_wrong_type_is_found() -> None:
    text = json.dumps(policy("full")).replace("Object.spec.volumes.emptyDir", "Object.spec.emptyDir")
    wrong = json.loads(text)
    with pytest.raises(AssertionError, match="emptyDir stands at Object"):
        injected(wrong, pod())


@pytest.mark.needs("helm")
@pytest.mark.parametrize("values", ["full", "sidecar"])
def test_pod_that_has_its_own_is_left_alone(values: str) -> None:
    mounts = pod(volumeMounts=[{"name": "data", "mountPath": "/run/torchperfd"}])
    assert injected(policy(values), mounts) == mounts
    volume = pod()
    volume["spec"]["volumes"].append({"name": "torchperfd-socket", "emptyDir": {}})
    assert injected(policy(values), volume) == volume
    twice = injected(policy(values), pod())
    assert injected(policy(values), twice) == twice


@pytest.mark.needs("helm")
def test_policy_holds_no_pod_up() -> None:
    for values in ("full", "sidecar"):
        spec = policy(values)["spec"]
        assert spec["failurePolicy"] == "Ignore"
        assert spec["matchConstraints"]["objectSelector"] == {"matchLabels": {"torchperfd/inject": "true"}}
        assert [rule["resources"] for rule in spec["matchConstraints"]["resourceRules"]] == [["pods"]]
    volumes = injected(policy("full"), pod())["spec"]["volumes"]
    (socket,) = (each["hostPath"] for each in volumes if "hostPath" in each)
    # Of type Directory a pod on a node without a daemon would never start.
    assert socket == {"path": "/run/torchperfd", "type": "DirectoryOrCreate"}


@pytest.mark.needs("helm")
def test_socket_goes_to_namespaces_that_admit_host_paths() -> None:
    (binding,) = of_kind("full", "MutatingAdmissionPolicyBinding")
    assert binding["spec"]["policyName"] == policy("full")["metadata"]["name"]
    assert binding["spec"]["matchResources"]["namespaceSelector"] == {
        "matchExpressions": [
            {
                "key": "pod-security.kubernetes.io/enforce",
                "operator": "NotIn",
                "values": ["baseline", "restricted"],
            }
        ]
    }
    (binding,) = of_kind("sidecar", "MutatingAdmissionPolicyBinding")
    assert binding["spec"]["matchResources"]["namespaceSelector"] == {"matchLabels": {"team": "vision"}}


def without_ours(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a pod's specification without what the policy adds."""
    added = {"TORCHPERFD_SOCKET", "TORCHPERFD_SERVICE_USER", "NODE_NAME", "POD_UID"}
    bare = json.loads(json.dumps(spec))
    del bare["initContainers"], bare["volumes"]
    for container in bare["containers"]:
        container["env"] = [each for each in container["env"] if each["name"] not in added]
        del container["volumeMounts"]
    return dict(bare)


@pytest.mark.needs("helm")
def test_example_of_a_sidecar_is_what_the_policy_makes() -> None:
    job = yaml.safe_load(EXAMPLE.read_text())
    assert problems([job], *VERSIONS) == ""
    spec = job["spec"]["template"]["spec"]
    plain = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": without_ours(spec)}
    defaults = policy("sidecar")
    expression = defaults["spec"]["mutations"][0]["applyConfiguration"]
    # The set of values has settings, the example none.
    made = injected(defaults, plain)
    assert "TORCHPERFD_INTERVAL" in expression["expression"]
    daemon = made["spec"]["initContainers"][1]
    daemon["env"] = [each for each in daemon["env"] if not each["name"].startswith("TORCHPERFD_")]
    assert made["spec"] == spec
    assert problems([made], NEWEST) == ""


# In the pod


def start(client: Path, *arguments: str, env: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    # Not this environment's torchperfd, as in an image without it.
    return subprocess.run(
        [sys.executable, "-S", str(client / "run.py"), *arguments],
        env=env,
        cwd=client,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def client(tmp_path: Path) -> Path:
    """The folder that a pod is given, for this Python alone."""
    (tmp_path / "run.py").write_text(RUN.read_text())
    folder = tmp_path / f"{sys.version_info.major}.{sys.version_info.minor}"
    folder.mkdir()
    (folder / "torchperfd").symlink_to(ROOT / "client" / "torchperfd")
    site = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    for each in ("grpc", "google", "typing_extensions.py", "grpc_health"):
        if (site / each).exists():
            (folder / each).symlink_to(site / each)
    (tmp_path / "train.py").write_text("import sys; print(sys.argv, 'torchperfd' in sys.modules)\n")
    return tmp_path


def test_script_runs_under_the_client_of_the_pod(client: Path, node: Node) -> None:
    node.start_daemon()
    done = start(client, "--name", "given", "train.py", "--epochs", "3", env=node.env)
    assert done.returncode == 0, done.stderr
    assert "['train.py', '--epochs', '3'] True" in done.stdout
    eventually(lambda: "given" in node.log() or "given" in node.command("ps").stdout, 20, node.log)


def test_line_of_the_page_starts_ranks_with_the_client(client: Path, node: Node) -> None:
    node.start_daemon()
    program, processes, script, *arguments = command(KUBERNETES, "torchrun").split()
    assert (program, processes) == ("torchrun", "--nproc-per-node=8")
    done = subprocess.run(
        [*torchrun(2), script.replace("/opt/torchperfd", str(client)), *arguments],
        env=node.env,
        cwd=client,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("['train.py'] True") == 2


def test_script_runs_alone_where_no_client_fits(client: Path, node: Node) -> None:
    (client / f"{sys.version_info.major}.{sys.version_info.minor}").rename(client / "2.7")
    done = start(client, "train.py", "--epochs", "3", env=node.env)
    assert done.stdout == "['train.py', '--epochs', '3'] False\n"
    assert done.stderr.startswith("torchperfd: the script runs without it: No module named 'torchperfd'")
    assert done.returncode == 0


def test_child_finds_the_client_of_the_pod(client: Path, node: Node) -> None:
    (client / "train.py").write_text(
        "import os, subprocess\n"
        "from torchperfd.model.own_commands import script_command\n"
        "command = script_command('torchperfd.__main__', 'run', '--quiet', 'inner.py')\n"
        "command.insert(1, '-S')\n"
        "subprocess.run(command, check=True)\n"
    )
    (client / "inner.py").write_text("print('inner ran')\n")
    done = start(client, "--quiet", "--no-daemon", "train.py", env=node.env)
    assert done.returncode == 0, done.stderr
    assert "inner ran" in done.stdout
