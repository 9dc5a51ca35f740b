"""Secrets and certificates of a fleet: they change while it runs, and calls without them are seen."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.unit.daemon.fleet_nodes import asking, certificates, may_all, start_node

from torchperfd_daemon.errors import TorchperfdError, UsageError
from torchperfd_daemon.fleet.credentials import Credentials, parse_tokens, read_credentials

TOKEN = "0123456789abcdef0123456789abcdef"
OLD_TOKEN = "fedcba9876543210fedcba9876543210"


def test_token_file_with_two_lines_sends_first_accepts_both() -> None:
    tokens = parse_tokens(f"{TOKEN}\n\n{OLD_TOKEN}\n".encode())
    assert tokens == (TOKEN, OLD_TOKEN)
    credentials = Credentials(tokens[0], None, tokens[1:])
    assert credentials.metadata() == (("authorization", f"Bearer {TOKEN}"),)
    accepted = [
        credentials.admits((("authorization", f"Bearer {each}"),)) for each in (TOKEN, OLD_TOKEN, "x" * 32)
    ]
    assert accepted == [True, True, False]


def test_token_file_with_nine_secrets_is_refused() -> None:
    with pytest.raises(UsageError, match="more than 8"):
        parse_tokens("\n".join(f"{TOKEN}{number}" for number in range(9)).encode())


async def test_fleet_changes_its_token_without_refusing_a_call(tmp_path: Path) -> None:
    in_force = {"node": Credentials(OLD_TOKEN), "asker": Credentials(OLD_TOKEN)}
    node = await start_node(tmp_path, [0], 1, lambda: in_force["node"])
    async with asking(tmp_path, [node.address], lambda: in_force["asker"]) as (view, _):
        answered = [len((await view.runs([], may_all)).runs)]
        # Accept both, then send the new one, then accept only that; in any order of the daemons.
        for credentials in (
            Credentials(OLD_TOKEN, None, (TOKEN,)),
            Credentials(TOKEN, None, (OLD_TOKEN,)),
            Credentials(TOKEN),
        ):
            for name in ("asker", "node"):
                in_force[name] = credentials
                answered.append(len((await view.runs([], may_all)).runs))
    assert answered == [1] * 7
    assert node.calls.ended == {("Fleet/ListRuns", "OK"): 7}
    assert node.calls.seconds["Fleet/ListRuns"] > 0
    assert node.interceptor.refused_calls == 0
    await node.server.stop(None)


async def test_call_with_wrong_token_is_refused_counted_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = await start_node(tmp_path, [0], 1, Credentials(TOKEN))
    async with asking(tmp_path, [node.address], Credentials(OLD_TOKEN)) as (view, _):
        for _ in range(3):
            answer = await view.runs([], may_all)
            assert [peer.reason for peer in answer.unreachable]
    assert node.interceptor.refused_calls == 3
    assert node.calls.ended == {}, "they could name any method"
    await node.server.stop(None)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "torchperfd.fleet"]
    assert line.startswith("refused /torchperfd.v1.Fleet/ListRuns from ipv4:127.0.0.1:")


async def test_new_connections_use_certificates_read_again(tmp_path: Path) -> None:
    old, new = certificates(tmp_path, "old"), certificates(tmp_path, "new")
    in_force = {"node": old, "asker": old}
    node = await start_node(tmp_path, [0], 1, lambda: in_force["node"])
    async with asking(tmp_path, [node.address], lambda: in_force["asker"]) as (view, _):
        assert len((await view.runs([], may_all)).runs) == 1
        in_force["node"] = in_force["asker"] = new
        assert len((await view.runs([], may_all)).runs) == 1
        in_force["asker"] = old
        assert len((await view.runs([], may_all)).unreachable) == 1
    await node.server.stop(None)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o660, 0o666])
def test_token_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(mode)
    with pytest.raises(TorchperfdError, match=f"can use {path}; `chmod 600"):
        read_credentials(path, None, None, None)
    path.chmod(0o600)
    assert read_credentials(path, None, None, None).token == TOKEN
    path.chmod(0o400)
    link = tmp_path / "link"
    link.symlink_to(path)
    assert read_credentials(link, None, None, None).token == TOKEN, "as Kubernetes mounts secrets"


SERVICE_READS = """
import os, sys
from pathlib import Path
from torchperfd_daemon.fleet.credentials import read_credentials
os.setgroups([])
os.setgid(9407)
os.setuid(9407)
try:
    print(read_credentials(Path(sys.argv[1]), None, None, None).token)
except Exception as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_token_of_root_is_given_to_the_group_of_a_service(mode: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "token")
        Path(folder).chmod(0o755)
        path.write_text(TOKEN)
        path.chmod(mode)
        command = [sys.executable, "-c", SERVICE_READS, str(path)]
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        advice = re.search("; as root: `(.+)`$", answer)
        assert advice, answer
        subprocess.run(advice[1], shell=True, check=True)
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{TOKEN}\n"
        with pytest.raises(TorchperfdError, match="; run this as the daemon's user"):
            read_credentials(path, None, None, None)


def test_token_file_of_another_kind_or_size_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)
    (tmp_path / "huge").chmod(0o600)
    for path, reason in (
        (tmp_path / "pipe", "is not a regular file"),
        (Path("/dev/zero"), "is not a regular file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "huge", "has more than 1,048,576 bytes"),
        (tmp_path / "none", "No such file"),
    ):
        with pytest.raises(TorchperfdError, match=reason):
            read_credentials(path, None, None, None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_token_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    os.chown(path, 61_184, 61_184)
    with pytest.raises(TorchperfdError, match="belongs to user 61184"):
        read_credentials(path, None, None, None)
