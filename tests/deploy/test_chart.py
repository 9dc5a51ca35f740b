"""The Helm chart: rendered, validated against versions of Kubernetes, and closed to unknown values."""

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.deploy.kube import (
    CHART,
    NEWEST,
    OLDEST,
    VALUES,
    VERSIONS,
    Manifest,
    manifests,
    of_kind,
    problems,
    rendered,
    run,
    template,
)
from tests.support.golden import check_golden
from tests.support.node import ROOT, Node, free_port

from torchperfd_daemon.config.effective import find_files, resolve
from torchperfd_daemon.config.options import OPTIONS
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.ownership import Pod
from torchperfd_daemon.push.pod_events import event_of

pytestmark = pytest.mark.needs("helm", "kubectl")

GENERATED = re.compile(
    r"(?s)(?<=\n)# Source: torchperfd/templates/monitoring.yaml\n.*?kind: (\w+)\n.*?\n(?=---|\Z)"
)
"""Rules and dashboards, which are compared with their sources instead."""
OF_THE_CHART = {
    *("socket", "socket_mode", "metrics_address", "web_config_file", "captures_dir", "captures_max_bytes"),
    *(
        "captures_upload",
        "lake",
        "lake_cluster",
        "fleet_address",
        "fleet_peers",
        "fleet_token_file",
        "fleet_tls_cert",
    ),
    *("fleet_tls_key", "fleet_tls_ca", "kubernetes_events", "demo", "embedded"),
    *("prometheus_secret_file", "prometheus_ca_file"),
}
"""Options of the daemon that other values set, or that make no sense in a cluster."""


def schema() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    return document


def without_generated(text: str) -> str:
    return GENERATED.sub(lambda found: "" if found[1] in ("PrometheusRule", "ConfigMap") else found[0], text)


@pytest.mark.parametrize("values", VALUES)
def test_chart_renders_as_expected(values: str) -> None:
    check_golden(f"chart/{values}.yaml", without_generated(rendered(values)))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", VALUES)
def test_chart_is_valid_for_version_of_kubernetes(values: str, version: str) -> None:
    injects = yaml.safe_load(VALUES[values].read_text()).get("injection", {}).get("policy")
    if injects and version in (OLDEST, "1.32"):
        done = template("--values", VALUES[values], version=version)
        assert done.returncode == 1
        assert "needs Kubernetes 1.34" in done.stderr
        return
    assert problems(manifests(rendered(values, version)), version) == ""


def test_validation_finds_unknown_field() -> None:
    (daemons,) = of_kind("default", "DaemonSet")
    daemons["spec"]["template"]["spec"]["hostPid"] = True
    assert "hostPid" in problems([daemons], NEWEST)


@pytest.mark.parametrize("values", VALUES)
def test_helm_lint_is_content(values: str) -> None:
    done = run("helm", "lint", CHART, "--strict", "--values", VALUES[values])
    assert done.returncode == 0, done.stdout + done.stderr


# Values


def test_chart_without_a_registry_asks_for_one() -> None:
    done = template("--set", "image.repository=")
    assert (done.returncode, done.stdout) == (1, "")
    assert "set image.repository to where you have pushed the image" in done.stderr


def leaves(part: dict[str, Any]) -> set[str]:
    """Return the paths of a document's values."""
    return {
        f"{key}.{inner}" if inner else key
        for key, value in part.items()
        for inner in (leaves(value) if isinstance(value, dict) else {""})
    }


def properties(part: dict[str, Any]) -> set[str]:
    """Return the paths that a schema admits."""
    return {
        f"{key}.{inner}" if inner else key
        for key, value in part["properties"].items()
        for inner in (properties(value) if "properties" in value else {""})
    }


def test_schema_knows_exactly_the_values_of_the_file() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    admitted = {path for path in properties(schema()) if not path.startswith("settings.")} - {"global"}
    open_maps = ("gpu.nodeSelector.", "resources.", "dashboards.labels.")
    given = {path for path in leaves(values) if not path.startswith(open_maps)}
    assert given <= admitted
    # Maps of the site's own names, empty by default or with an example.
    assert {path.partition(".")[0] for path in admitted - given} <= {
        *("gpu", "resources", "settings", "metrics", "rules", "dashboards", "injection"),
    }


@pytest.mark.parametrize(
    "unknown",
    [
        *("colour=1", "image.sha=1", "gpu.count=1", "captures.dir=x", "settings.socket=x", "metrics.port=1"),
        *("fleet.tls.ca=x", "fleet.tls.certManager.group=x", "rules.url=x", "injection.webhook=true"),
        *("triggers[0].whenn=stall", "openshift.route=true", "networkPolicy.egress=true"),
    ],
)
def test_schema_refuses_unknown_key(unknown: str) -> None:
    done = template("--set", unknown)
    assert done.returncode == 1
    assert f"'{unknown.partition('=')[0].rpartition('.')[2]}' not allowed" in done.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        *("mode=sidecar", "rules.enabled=true", "image.digest=sha256:12", "metrics.tls=true", "mode=both"),
        *(
            "stacks=true,hostPID=false",
            "events.enabled=true,hostPID=false",
            "captures.gibibytes=0",
            "captures.hostPath=relative",
        ),
        *("settings.metrics_level=dense", "settings.collectors=7"),
    ],
)
def test_schema_refuses_what_would_not_work(wrong: str) -> None:
    done = template("--set", wrong)
    assert done.returncode == 1
    assert "values don't meet the specifications of the schema" in done.stderr


def test_event_on_a_pod_is_valid_for_kubernetes() -> None:
    verdict = Verdict(Cause.SLOW_RANK, "bert", node="node-a", rank=3, evidence="\x1b[1m40 ms")
    event = event_of(verdict, Pod("team-a", "bert-0", "0d2cd4a6"), "node-a", 1e9, 1e9 + 600)
    assert problems([event], *VERSIONS) == ""
    assert "involvedObjekt" in problems([event | {"involvedObjekt": 1}], NEWEST)


def test_events_are_the_only_right_in_the_cluster() -> None:
    (role,) = of_kind("given-secrets", "ClusterRole")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["events"], "verbs": ["create"]}]
    (binding,) = of_kind("given-secrets", "ClusterRoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (account,) = binding["subjects"]
    assert account["name"] == daemon_pod("given-secrets")["serviceAccountName"]
    assert of_kind("full", "ClusterRole") == []
    assert daemon_pod("full")["automountServiceAccountToken"] is False


def test_settings_are_the_options_of_the_daemon() -> None:
    settings = set(schema()["properties"]["settings"]["properties"])
    assert settings == {option.key for option in OPTIONS} - OF_THE_CHART


def test_daemon_accepts_environment_and_triggers(tmp_path: Path) -> None:
    (config,) = (each for each in of_kind("full", "ConfigMap") if "config.toml" in each["data"])
    file = tmp_path / "config.toml"
    file.write_text(config["data"]["config.toml"])
    (container,) = daemon_pod("full")["containers"]
    environ = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    known = resolve(
        {}, find_files(file), {name: environ[name] for name in environ if name.startswith("TORCHPERFD_")}
    )
    assert known.serve_settings().captures_max_age_seconds == 30 * 86400
    assert known.serve_settings().max_sessions == 4096
    assert known.serve_settings().analyze_captures is False
    assert known.serve_settings().collectors == ("gpu", "steps", "self")
    assert known.serve_settings().metrics_level == "essential"
    assert [rule.name for rule in known.plan.rules] == ["stall", "slower", "loader"]
    assert known.plan.rules[2].labels == (("run", "bert"),)
    assert [each.every_seconds for each in known.plan.schedules] == [600]


# Objects


def daemon_pod(values: str) -> dict[str, Any]:
    (daemons,) = of_kind(values, "DaemonSet")
    spec: dict[str, Any] = daemons["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("values", [name for name in VALUES if name != "sidecar"])
def test_host_paths_are_the_socket_and_what_was_asked_for(values: str) -> None:
    asked = {
        path
        for path in [yaml.safe_load(VALUES[values].read_text()).get("captures", {}).get("hostPath")]
        if path
    }
    if values != "without-gpus":
        asked.add("/var/lib/kubelet/pod-resources")
    paths = {each["hostPath"]["path"] for each in daemon_pod(values)["volumes"] if "hostPath" in each}
    assert paths == asked | {"/run/torchperfd"}


def test_fleet_is_found_secured_and_let_through() -> None:
    (service,) = of_kind("full", "Service")
    (policy,) = of_kind("full", "NetworkPolicy")
    (certificate,) = of_kind("full", "Certificate")
    (container,) = daemon_pod("full")["containers"]
    (name,) = certificate["spec"]["dnsNames"]
    assert f"--fleet-peers=dns:{name}:9408" in container["args"]
    assert name == f"{service['metadata']['name']}.torchperfd.svc"
    assert service["spec"]["clusterIP"] == "None"
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    admitted = [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]]
    assert admitted == ["metrics", "fleet"]
    assert {each["targetPort"]: each["port"] for each in service["spec"]["ports"]} == ports
    secrets = {
        each["secret"]["secretName"]: each["secret"]["defaultMode"]
        for each in daemon_pod("full")["volumes"]
        if "secret" in each and "defaultMode" in each["secret"]
    }
    # The daemon refuses secrets that others can read.
    assert secrets == {"torchperfd-fleet": 0o400, certificate["spec"]["secretName"]: 0o400}


def test_probes_follow_tls_of_the_page() -> None:
    for values, scheme in (("full", "HTTPS"), ("default", None)):
        (container,) = daemon_pod(values)["containers"]
        probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
        assert [each.get("scheme") for each in probes] == [scheme] * 3


def test_stacks_add_one_capability() -> None:
    for values, added in (("full", ["SYS_PTRACE"]), ("default", None)):
        (container,) = daemon_pod(values)["containers"]
        assert container["securityContext"]["capabilities"].get("add") == added


def test_rules_and_dashboards_are_those_of_grafana() -> None:
    (rule,) = of_kind("full", "PrometheusRule")
    source = (ROOT / "grafana" / "alerts" / "torchperfd.rules.yaml").read_text()
    section = r"runbook_url: https://docs.example/torchperfd/\1.html#"
    expected = yaml.safe_load(re.sub(r"runbook: (\S+)\.md#", section, source))
    assert rule["spec"] == expected
    shown = {
        name: text
        for each in of_kind("full", "ConfigMap")
        for name, text in each["data"].items()
        if name.endswith(".json")
    }
    assert shown == {
        f"torchperfd-{path.name}": path.read_text()
        for path in (ROOT / "grafana" / "dashboards").glob("*.json")
    }


def test_runbook_of_each_alert_is_a_section() -> None:
    (rule,) = of_kind("full", "PrometheusRule")
    alerts = [each for group in rule["spec"]["groups"] for each in group["rules"] if "alert" in each]
    assert len(alerts) > 20
    for alert in alerts:
        page, _, anchor = alert["annotations"]["runbook_url"].partition(".html#")
        path = ROOT / "docs" / f"{page.removeprefix('https://docs.example/torchperfd/')}.md"
        headings = re.findall(r"^## (.+)$", path.read_text(), re.MULTILINE)
        assert anchor in [heading.lower() for heading in headings], alert["alert"]


def test_package_holds_rules_and_dashboards(tmp_path: Path) -> None:
    done = run("helm", "package", CHART, "--destination", tmp_path)
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("*.tgz")
    with tarfile.open(package) as archive:
        for source, name in (
            ("grafana/dashboards/run.json", "files/dashboards/run.json"),
            ("grafana/alerts/torchperfd.rules.yaml", "files/torchperfd.rules.yaml"),
        ):
            packed = archive.extractfile(f"torchperfd/{name}")
            assert packed is not None
            assert packed.read() == (ROOT / source).read_bytes()


# The page of it


def test_page_names_values_that_exist() -> None:
    page = (ROOT / "deploy" / "kubernetes" / "README.md").read_text()
    named = set(re.findall(r"`((?:[a-z]\w+\.)+[a-zA-Z]+)`", page))
    admitted = properties(schema())
    files = {name for name in named if name.endswith((".yaml", ".md"))}
    assert len(named - files) > 10
    assert {name for name in named - files if not any(path.startswith(name) for path in admitted)} == set()


def test_install_line_of_the_page_renders() -> None:
    page = (ROOT / "deploy" / "kubernetes" / "README.md").read_text()
    (line,) = re.findall(r"^helm install (torchperfd .*)$", page, re.MULTILINE)
    done = run("helm", "template", *line.split())
    assert done.returncode == 0, done.stderr
    assert "image: REGISTRY/torchperfd:" in done.stdout


# Without Helm


def test_manifests_are_the_charts() -> None:
    printed = subprocess.run(
        [ROOT / "tools" / "manifests.sh"], capture_output=True, text=True, check=True
    ).stdout
    assert (ROOT / "deploy" / "kubernetes" / "base" / "torchperfd.yaml").read_text() == printed


@pytest.mark.parametrize("folder", ["base", "overlays/without-gpus"])
def test_kustomize_builds_valid_manifests(folder: str) -> None:
    done = run("kubectl", "kustomize", ROOT / "deploy" / "kubernetes" / folder)
    assert done.returncode == 0, done.stderr
    built = manifests(done.stdout)
    assert problems(built, *VERSIONS) == ""
    assert {each["metadata"].get("namespace", "torchperfd") for each in built} == {"torchperfd"}
    (daemons,) = (each for each in built if each["kind"] == "DaemonSet")
    pod = daemons["spec"]["template"]["spec"]
    assert ("runtimeClassName" in pod) is (folder == "base")


# helm test


def check_pod() -> Manifest:
    (pod,) = of_kind("default", "Pod")
    return pod


def run_check(node: Node, **environ: str) -> "subprocess.CompletedProcess[str]":
    """Run the script of the test's pod on this machine."""
    (container,) = check_pod()["spec"]["containers"]
    python, *arguments = container["command"]
    assert python == "python"
    return subprocess.run(
        [sys.executable, *arguments],
        env={
            **node.env,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "SERVICE_URL": f"http://127.0.0.1:{node.metrics_port}",
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_helm_test_passes_with_daemon_and_fails_without(node: Node) -> None:
    address = f"127.0.0.1:{free_port()}"
    node.start_daemon("--fleet-address", address, "--fleet-peers", address)
    done = run_check(node, FLEET="1")
    assert done.returncode == 0, done.stderr
    assert "127.0.0.1 is ready" in done.stdout
    assert "$ torchperfd ps --fleet" in done.stdout
    node.stop_daemon()
    done = run_check(node)
    assert done.returncode == 1
    assert "127.0.0.1 is not ready" in done.stderr
    assert "torchperfd ps ended with 4" in done.stderr


def test_helm_test_names_node_that_does_not_answer(node: Node) -> None:
    dead = f"127.0.0.1:{free_port()}"
    node.start_daemon("--fleet-peers", dead)
    done = run_check(node, FLEET="1")
    assert done.returncode == 1
    assert dead in done.stderr
    assert run_check(node, FLEET="").returncode == 0
