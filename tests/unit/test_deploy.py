"""The deployment files: well formed, and in agreement with the daemon, the client and one another."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from tests.support.served import from_a_thread, serving

from torchperfd_cli.main import cli
from torchperfd_daemon.collectors.kubelet import POD_RESOURCES
from torchperfd_daemon.config.effective import read_file
from torchperfd_daemon.config.options import OPTIONS

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "torchperfd.service"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
# The chart with its default values; tests/deploy compares it with the chart, and has the others.
MANIFEST = DEPLOY / "kubernetes" / "base" / "torchperfd.yaml"
SBATCH = DEPLOY / "slurm" / "train.sbatch"
# The client's default socket of the node's daemon.
SOCKET = "/run/torchperfd/daemon.sock"
CAPTURES = "/var/lib/torchperfd/captures"
PORT = 9407


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def kind(path: Path, name: str) -> dict[str, Any]:
    return next(document for document in documents(path) if document["kind"] == name)


def compose() -> dict[str, Any]:
    services: dict[str, Any] = documents(DEPLOY / "compose.yaml")[0]["services"]
    return services


def daemonset_pod() -> dict[str, Any]:
    pod: dict[str, Any] = kind(MANIFEST, "DaemonSet")["spec"]["template"]
    return pod


def sidecar_pod() -> dict[str, Any]:
    pod: dict[str, Any] = kind(DEPLOY / "kubernetes" / "sidecar-example.yaml", "Job")["spec"]["template"]
    return pod


def unit_settings() -> dict[str, str]:
    lines = UNIT.read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def image_command() -> list[str]:
    return re.findall(r'"([^"]*)"', DOCKERFILE.read_text(encoding="utf-8").rpartition("\nCMD ")[2])


def serve_commands() -> dict[str, list[str]]:
    """Every way in which a file here starts the daemon, from the word serve on."""
    return {
        "systemd": shlex.split(unit_settings()["ExecStart"])[1:],
        "docker": image_command(),
        "daemonset": daemonset_pod()["spec"]["containers"][0]["args"],
        "sidecar": sidecar_pod()["spec"]["initContainers"][1]["args"],
        "compose": compose()["daemon"]["command"],
    }


def options(command: list[str]) -> dict[str, str]:
    """Read `--name value` and `--name=value` alike."""
    assert command[0] == "serve"
    words = [part for word in command[1:] for part in word.split("=", 1)]
    return dict(zip(words[::2], words[1::2], strict=True))


def mounts(container: dict[str, Any]) -> dict[str, str]:
    return {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}


def environment(container: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value") for entry in container["env"]}


@pytest.fixture(params=sorted(serve_commands()))
def serve_options(request: pytest.FixtureRequest) -> dict[str, str]:
    return options(serve_commands()[request.param])


def test_daemons_use_the_clients_socket_and_one_captures_dir(
    serve_options: dict[str, str],
) -> None:
    assert serve_options["--socket"] == SOCKET
    assert serve_options["--socket-mode"] == "666"
    assert serve_options["--captures-dir"] == CAPTURES


def test_the_command_line_knows_every_option_used_here(serve_options: dict[str, str]) -> None:
    serve = cli.get_command(click.Context(cli), "serve")
    assert serve is not None
    known = {name for parameter in serve.params for name in parameter.opts}
    assert set(serve_options) <= known


def test_metrics_leave_loopback_only_inside_a_container() -> None:
    addresses = {
        name: options(command).get("--metrics-address") for name, command in serve_commands().items()
    }
    everywhere = f"0.0.0.0:{PORT}"
    assert addresses == {
        "systemd": None,
        "docker": None,
        "daemonset": everywhere,
        "sidecar": everywhere,
        "compose": everywhere,
    }


# systemd


DROP_IN = UNIT.with_name("torchperfd-ptrace.conf")


@pytest.mark.needs("systemd-analyze")
@pytest.mark.parametrize("drop_ins", [(), (DROP_IN,)])
def test_systemd_accepts_the_unit(tmp_path: Path, drop_ins: tuple[Path, ...]) -> None:
    text = UNIT.read_text(encoding="utf-8")
    copy = tmp_path / UNIT.name
    copy.write_text(text.replace("/usr/bin/torchperfd", "/bin/true"), encoding="utf-8")
    for each in drop_ins:
        folder = tmp_path / f"{UNIT.name}.d"
        folder.mkdir()
        shutil.copy(each, folder)
    check = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (check.returncode, check.stderr) == (0, "")


@pytest.mark.needs("systemd-analyze")
def test_unit_exposes_no_more_than_the_bound() -> None:
    check = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=23", "--no-pager", str(UNIT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stdout + check.stderr


def test_drop_in_adds_only_the_capability_to_trace() -> None:
    lines = [line for line in DROP_IN.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    capability = "CAP_SYS_PTRACE"
    assert lines == [
        "[Service]",
        f"CapabilityBoundingSet={capability}",
        f"AmbientCapabilities={capability}",
    ]


def test_unit_limits_memory_as_the_chart_does() -> None:
    settings = unit_settings()
    limit = daemonset_pod()["spec"]["containers"][0]["resources"]["limits"]["memory"]
    assert f"{settings['MemoryMax']}i" == limit
    # Without it systemd ends the daemon for an analysis that the kernel killed.
    assert settings["OOMPolicy"] == "continue"
    assert int(settings["TasksMax"]) >= 256


def test_the_unit_creates_what_the_daemon_writes_to() -> None:
    settings = unit_settings()
    assert settings["Type"] == "notify"
    assert f"/run/{settings['RuntimeDirectory']}" == str(Path(SOCKET).parent)
    assert f"/var/lib/{settings['StateDirectory']}" == CAPTURES
    assert settings["StateDirectoryMode"] == "0700"


def test_the_unit_hides_neither_gpus_nor_training_processes() -> None:
    hiding = {
        "PrivateDevices",
        "DevicePolicy",
        "DeviceAllow",
        "ProtectClock",
        "ProtectProc",
        "ProcSubset",
        "PrivateUsers",
        "PrivateNetwork",
        "DynamicUser",
    }
    assert not hiding & unit_settings().keys()


def test_unit_keeps_its_runtime_directory_over_restarts() -> None:
    # Containers bind-mount it: after a restart they must find the new daemon's socket in it.
    assert unit_settings()["RuntimeDirectoryPreserve"] == "yes"


def test_unit_restarts_however_the_daemon_ended() -> None:
    settings = unit_settings()
    assert settings["Restart"] == "always"
    assert settings["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert int(settings["WatchdogSec"]) >= 30


def test_readme_makes_the_folder_that_it_installs_the_user_into() -> None:
    readme = (DEPLOY / "systemd" / "README.md").read_text(encoding="utf-8")
    # Debian ships no /etc/sysusers.d; cp would fail there.
    assert "install -D -m 644 torchperfd.sysusers.conf /etc/sysusers.d/torchperfd.conf" in readme


def test_folder_in_run_is_the_same_at_boot_and_at_start() -> None:
    (line,) = re.findall("^d .+", UNIT.with_name("torchperfd.tmpfiles.conf").read_text(), re.MULTILINE)
    settings = unit_settings()
    assert line.split() == [
        "d",
        f"/run/{settings['RuntimeDirectory']}",
        settings["RuntimeDirectoryMode"],
        settings["User"],
        settings["Group"],
        "-",
    ]


# Debian


DEBIAN = DEPLOY / "debian"


def test_packaged_configuration_names_the_defaults(tmp_path: Path) -> None:
    text = (DEBIAN / "config.toml").read_text(encoding="utf-8")
    everything = re.sub("^#(?=[a-z])", "", text, flags=re.MULTILINE)
    defaults = everything.partition("# Prometheus")[0]
    for name, part in (("all", everything), ("defaults", defaults)):
        (tmp_path / name).write_text(part, encoding="utf-8")
    assert read_file(tmp_path / "all").values.keys() > read_file(tmp_path / "defaults").values.keys()
    expected = {
        option.key: option.default_value() for option in OPTIONS if option.key in tomllib.loads(defaults)
    }
    assert dict(read_file(tmp_path / "defaults").values) == expected


def test_package_runs_the_command_that_the_unit_starts() -> None:
    assert unit_settings()["ExecStart"].split()[0] == "/usr/bin/torchperfd"
    first = (DEBIAN / "torchperfd").read_text(encoding="utf-8").splitlines()[0]
    # Isolated: the environment of who calls it must not add other packages.
    assert first == "#!/usr/lib/torchperfd/bin/python3 -I"


@pytest.mark.parametrize("script", ["postinst", "prerm", "postrm"])
def test_maintainer_script_parses_and_ends_at_an_error(script: str) -> None:
    path = DEBIAN / script
    subprocess.run(["sh", "-n", str(path)], check=True)
    assert "\nset -e\n" in path.read_text(encoding="utf-8")
    assert os.access(path, os.X_OK)


# Docker


def test_the_image_is_built_from_files_that_reach_the_build() -> None:
    allowed = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    copies = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    sources = {source for copy in copies for source in copy.split()[:-1]}
    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)


def test_image_runs_unprivileged_with_a_health_check() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    assert re.search(r"^USER [1-9]\d*", text, re.MULTILINE)
    assert re.search(rf"^EXPOSE {PORT}$", text, re.MULTILINE)


def test_health_check_of_the_image_needs_no_http() -> None:
    """It works with TLS and a password of the page, and fails where no daemon answers."""
    found = re.search(r'CMD (\["python", .*\])$', DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    *options, code = json.loads(found[1])[1:]
    assert "/run/torchperfd/daemon.sock" in code
    with from_a_thread(serving) as served:
        for path, exit_code in ((served.socket, 0), (f"{served.socket}.none", 1)):
            command = [sys.executable, *options, code.replace("/run/torchperfd/daemon.sock", path)]
            done = subprocess.run(command, capture_output=True, timeout=60, check=False)
            assert done.returncode == exit_code, done.stderr


# Kubernetes


@pytest.mark.parametrize("name", ["daemonset", "sidecar"])
def test_pods_are_scraped_at_the_port_that_the_daemon_serves(name: str) -> None:
    pod = daemonset_pod() if name == "daemonset" else sidecar_pod()
    daemon = next(
        container
        for container in pod["spec"]["containers"] + pod["spec"].get("initContainers", [])
        if "serve" in container.get("args", [])
    )
    assert daemon["ports"][0] == {"name": "metrics", "containerPort": PORT}
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(PORT)
    context = daemon["securityContext"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert not context["allowPrivilegeEscalation"]
    assert context["readOnlyRootFilesystem"]


def test_daemonset_shares_the_sockets_directory_alone() -> None:
    spec = daemonset_pod()["spec"]
    on_host = {
        volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume
    }
    (daemon,) = spec["containers"]
    assert on_host[mounts(daemon)[str(Path(SOCKET).parent)]] == str(Path(SOCKET).parent)
    # Clients hand their captures over: the daemon makes its directory below a volume of the pod.
    assert mounts(daemon)[str(Path(CAPTURES).parent)] not in on_host


def test_the_daemonset_sees_every_gpu_and_takes_none() -> None:
    spec = daemonset_pod()["spec"]
    (daemon,) = spec["containers"]
    assert spec["runtimeClassName"] == "nvidia"
    assert environment(daemon)["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert environment(daemon)["NVIDIA_DRIVER_CAPABILITIES"] == "utility"
    assert not any("nvidia.com/gpu" in amounts for amounts in daemon["resources"].values())


def test_daemonset_can_ask_kubelet_and_see_gpu_processes() -> None:
    spec = daemonset_pod()["spec"]
    (daemon,) = spec["containers"]
    assert spec["hostPID"]
    assert daemon["securityContext"]["runAsUser"] == 0, "the kubelet's socket is for root"
    volume = mounts(daemon)[str(POD_RESOURCES.parent)]
    on_host = next(each["hostPath"] for each in spec["volumes"] if each["name"] == volume)
    # The directory, not the socket: a kubelet that restarts makes a new one.
    assert on_host == {"path": str(POD_RESOURCES.parent), "type": "Directory"}


def test_sidecar_shares_its_socket_alone_and_lets_job_end() -> None:
    spec = sidecar_pod()["spec"]
    (_, daemon), (train,) = spec["initContainers"], spec["containers"]
    assert daemon["restartPolicy"] == "Always"
    assert environment(train)["TORCHPERFD_SOCKET"] == options(daemon["args"])["--socket"]
    assert mounts(daemon)[str(Path(SOCKET).parent)] == mounts(train)[str(Path(SOCKET).parent)]
    # The daemon makes the captures directory below the volume, for itself alone.
    assert mounts(daemon)[str(Path(CAPTURES).parent)] not in mounts(train).values()


def test_training_pods_of_the_daemonset_mount_the_socket_only() -> None:
    readme = (DEPLOY / "kubernetes" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"hostPath: \{path: (\S+),", readme) == [str(Path(SOCKET).parent)]


# Compose


def test_what_compose_mounts_from_the_repository_exists() -> None:
    sources = [
        volume.split(":")[0]
        for service in compose().values()
        for volume in service.get("volumes", [])
        if isinstance(volume, str) and volume.startswith(".")
    ]
    assert len(sources) == 5
    assert all((DEPLOY / source).exists() for source in sources)
    assert (DEPLOY / compose()["daemon"]["build"]["context"] / "deploy/docker/Dockerfile").samefile(
        DOCKERFILE
    )


def test_compose_mounts_socket_and_captures_at_host_paths() -> None:
    binds = {volume["source"]: volume["target"] for volume in compose()["daemon"]["volumes"]}
    assert binds == {path: path for path in (str(Path(SOCKET).parent), CAPTURES)}


def test_compose_publishes_on_loopback_only() -> None:
    published = [port for service in compose().values() for port in service["ports"]]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_compose_wires_daemon_prometheus_and_grafana_together() -> None:
    services = compose()
    config = documents(DEPLOY / "compose" / "prometheus.yml")[0]
    (target,) = config["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target == f"daemon:{PORT}"
    assert "daemon" in services

    grafana = {
        volume.split(":")[1]: DEPLOY / volume.split(":")[0] for volume in services["grafana"]["volumes"]
    }
    datasources = grafana["/etc/grafana/provisioning/datasources"] / "prometheus.yaml"
    (source,) = documents(datasources)[0]["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    providers = grafana["/etc/grafana/provisioning/dashboards"] / "torchperfd.yaml"
    (provider,) = documents(providers)[0]["providers"]
    dashboards = provider["options"]["path"]
    assert (grafana[dashboards] / "run.json").exists()
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{dashboards}/fleet.json"


@pytest.mark.needs("promtool")
def test_promtool_accepts_prometheus_as_compose_lays_it_out(tmp_path: Path) -> None:
    for volume in compose()["prometheus"]["volumes"]:
        source, target = volume.split(":")[:2]
        if source.startswith("."):
            copy = tmp_path / Path(target).relative_to("/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(DEPLOY / source, copy)
    config = tmp_path / "etc" / "prometheus" / "prometheus.yml"
    check = subprocess.run(
        ["promtool", "check", "config", str(config)], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stdout + check.stderr
    assert re.search(r"[1-9]\d* rules found", check.stdout)


# Slurm


def run_sbatch(tmp_path: Path, *arguments: str, **extra: str) -> list[str]:
    """Run the batch script with the two Slurm programs it calls replaced; return what srun was given."""
    programs = {
        "scontrol": 'printf "n1\\nn2\\n"',
        "srun": (
            '[ "$(stat -c "%a %s" "$TORCHPERFD_FLEET_TOKEN_FILE")" = "600 44" ] || exit 9;'
            'printf "%s\\n" "run=$TORCHPERFD_RUN" "job=$TORCHPERFD_JOB" "peers=$TORCHPERFD_FLEET_PEERS" "$@"'
        ),
    }
    for name, body in programs.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        program.chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_PER_TASK": "64",
    } | extra
    result = subprocess.run(
        ["bash", str(SBATCH), *arguments],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert not list(tmp_path.glob(".torchperfd-fleet-*")), "the job's secret must not outlive it"
    return result.stdout.splitlines()


def test_the_batch_script_parses() -> None:
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)


def test_batch_script_starts_one_launcher_per_node(tmp_path: Path) -> None:
    assert run_sbatch(tmp_path) == [
        "run=slurm-4711",
        "job=train",
        "peers=slurm:env:24711",
        "--kill-on-bad-exit=1",
        "--cpus-per-task=64",
        "bash",
        "-c",
        'TORCHPERFD_FLEET_ADDRESS="$SLURMD_NODENAME:$0" exec "$@"',
        "24711",
        "torchrun",
        "--nnodes=2",
        "--nproc-per-node=8",
        "--rdzv-id=4711",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=n1:30211",
        "-m",
        "torchperfd",
        "run",
        "train.py",
    ]


def test_the_batch_script_passes_on_the_users_script_and_run(tmp_path: Path) -> None:
    given = run_sbatch(tmp_path, "other.py", "--note", "two words", TORCHPERFD_RUN="bert-17")
    assert given[0] == "run=bert-17"
    assert given[-4:] == ["run", "other.py", "--note", "two words"]


@pytest.mark.parametrize("folder", ["debian", "systemd", "docker", "kubernetes", "slurm", "compose"])
def test_each_deployment_states_its_use_and_its_untested_parts(folder: str) -> None:
    readme = (DEPLOY / folder / "README.md").read_text(encoding="utf-8")
    assert "## What has been run" in readme
