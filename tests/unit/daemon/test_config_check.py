"""``torchperfd config check``: a configuration with all that it names, as a daemon would take it."""

import os
from pathlib import Path

import pytest
from tests.support.commands import Run
from tests.unit.daemon.fleet_nodes import certificates

from torchperfd_daemon.config.effective import find_files
from torchperfd_daemon.config.options import OPTIONS

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def configured(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run a command with a file of these lines; files that it names are in the working directory."""
    for name in {option.variable for option in OPTIONS} | {"TORCHPERFD_CONFIG"}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(find_files, "__defaults__", (tmp_path / "no.toml",))
    monkeypatch.chdir(tmp_path)
    for name, content, mode in (
        ("token", TOKEN, 0o600),
        ("open-token", TOKEN, 0o644),
        ("text.pem", "no certificate", 0o600),
        ("peers.json", '[{"targets": ["node1:9408", "node2:9408"]}]', 0o644),
        ("other.json", '{"targets": []}', 0o644),
        ("web.yml", "http_server_config: {headers: {X-Frame-Options: DENY}}", 0o644),
        ("wrong-web.yml", "tls_server_config: {cert_file: none.pem, key_file: none.key}", 0o644),
    ):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(mode)

    def run_with(lines: str, *command: object) -> tuple[int, str, str]:
        (tmp_path / "a.toml").write_text(f'socket = "d.sock"\ncaptures_dir = "captures"\n{lines}\n')
        return run(*command, "--config", "a.toml")

    return run_with


def test_valid_configuration_is_one_line_and_changes_nothing(
    configured: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHPERFD_INTERVAL", "2")
    lines = f"""
    admin_group = "{os.getgid()}"
    fleet_address = "0.0.0.0:9408"
    fleet_token_file = "token"
    fleet_peers = "file:peers.json"
    web_config_file = "web.yml"
    [[trigger]]
    when = "stall"
    [[trigger]]
    every = "10m"
    """
    before = sorted(path.name for path in tmp_path.iterdir())
    assert configured(lines, "config", "check") == (
        0,
        "the configuration is valid (a.toml, TORCHPERFD_INTERVAL); triggers: 2, peers: 2\n",
        "",
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "a.toml"])


def test_no_configuration_at_all_is_valid(configured: Run, run: Run) -> None:
    line = "the configuration is valid (all defaults); triggers: 0, peers: 0\n"
    assert run("config", "check") == (0, line, "")


def test_certificates_of_another_key_are_refused(configured: Run, tmp_path: Path) -> None:
    for name in ("one", "two"):
        certificates(tmp_path, name)
    tls = 'fleet_tls_ca = "one/ca.pem"\nfleet_tls_cert = "one/node.pem"\nfleet_tls_key = '
    assert configured(f'{tls} "one/node.key"', "config", "check")[0] == 0
    code, out, err = configured(f'{tls} "two/node.key"', "config", "check")
    assert (code, out) == (2, "")
    assert "one/node.pem and " in err
    assert "two/node.key are not a certificate and its key; name a PEM certificate" in err


@pytest.mark.parametrize(
    ("lines", "code", "reason"),
    [
        ('intervall = "2"', 2, "did you mean interval?"),
        ('[[trigger]]\nwhen = "stal"', 2, "did you mean stall?"),
        ('admin_group = "no such group"', 2, "there is no group 'no such group'"),
        ('fleet_address = "0.0.0.0:9408"', 2, "without credentials"),
        ('collectors = ["gpus"]', 2, "'gpus' is none of the choices; use all, or some of cpu, memory, disk,"),
        ('collectors = ["gpu"]\nuser_label = true', 2, "needs the collector owners"),
        ('collectors = ["owners"]\nkubernetes_events = true', 2, "needs the collectors gpu and owners"),
        ("kubernetes_events = true", 2, "this is no pod of Kubernetes"),
        ('otlp = "localhost:4318"', 2, "write it like http://localhost:4318"),
        ('metrics_level = "essentials"', 2, "did you mean essential?"),
        ('fleet_token_file = "none"', 1, "No such file or directory"),
        ('fleet_token_file = "open-token"', 1, "`chmod 600"),
        ('fleet_tls_key = "text.pem"', 2, "TLS between daemons needs three files"),
        (
            'fleet_tls_cert = "text.pem"\nfleet_tls_key = "text.pem"\nfleet_tls_ca = "text.pem"',
            2,
            "are not a certificate and its key",
        ),
        ('lake = "ftp://bucket"', 2, "is no URL of an object store"),
        ('lake = "file:///mnt/lake"\nlake_cluster = "a/b"', 2, "cannot be a cluster's name"),
        ('fleet_peers = "node1"', 2, "'node1' is not HOST:PORT"),
        ('fleet_peers = "job"', 2, "give --fleet-address HOST:PORT, too"),
        ('web_config_file = "none.yml"', 2, "name a readable file with --web.config.file"),
        ('web_config_file = "wrong-web.yml"', 2, "none.pem"),
    ],
)
def test_check_refuses_what_a_daemon_refuses(configured: Run, lines: str, code: int, reason: str) -> None:
    answer = configured(lines, "config", "check")
    assert answer[:2] == (code, "")
    assert reason in answer[2]
    assert answer[2].count("\n") == 1
    assert configured(lines, "serve") == answer


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("--socket", "x" * 108, "the kernel allows 107"),
        ("--captures-upload", "file://{}/captures/copies", "is in the captures directory"),
    ],
)
def test_check_takes_the_flags_of_serve(
    configured: Run, tmp_path: Path, flag: str, value: str, reason: str
) -> None:
    code, out, err = configured("", "config", "check", flag, value.format(tmp_path))
    assert (code, out) == (2, "")
    assert reason in err


@pytest.mark.parametrize(
    ("peers", "code", "reason"),
    [
        ("file:none.json", 1, "cannot read the fleet's peers from none.json: No such file"),
        ("file:other.json", 2, "not in the format of file_sd"),
        ("slurm:env", 1, "SLURM_JOB_NODELIST is not set"),
    ],
)
def test_check_reads_peers_that_a_daemon_reads_later(
    configured: Run, monkeypatch: pytest.MonkeyPatch, peers: str, code: int, reason: str
) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    answer = configured(f'fleet_peers = "{peers}"', "config", "check")
    assert answer[:2] == (code, "")
    assert reason in answer[2]
