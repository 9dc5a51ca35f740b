"""Captures of a service: their owner and root can do everything with them, another user nothing.

One table of attempts of another user, made on a real daemon of root by processes that are really these users.
"""

import contextlib
import hashlib
import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.node import eventually
from tests.support.shared_node import ADA, BOB, Shared, line
from tests.unit.daemon.traces import document, event

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")

TRACE = document(
    [event("ProfilerStep#1", 0, 100_000, cat="user_annotation"), event("private_kernel", 0, 40_000)]
)
PREPARED = f"""
TRACE = {TRACE.encode()!r}
# Of the daemon's settings, which a user's environment does not have.
del os.environ["TORCHPERFD_CAPTURES_DIR"]

def file_of(content):
    descriptor = os.memfd_create("file")
    os.write(descriptor, content)
    return descriptor

def manifest_of(capture_id, rank=0):
    return json.dumps({{
        "schema": "torchperfd.capture.rank/1", "capture_id": capture_id, "run": "any", "rank": rank,
        "state": "complete", "reason": "", "file": f"rank{{rank}}.json", "bytes": len(TRACE),
        "sha256": hashlib.sha256(TRACE).hexdigest(), "step_range": [1, 2], "options": {{"steps": 1}},
    }}).encode()
"""
RANK = f"""{PREPARED}
rank = Rank(SOCKET, "baseline")
welcome = rank.receive().welcome
print(json.dumps([welcome.captures_dir, len(welcome.handover_token)]), flush=True)
capture_id = rank.receive().prepare_capture.capture_id
rank.say(capture_ack=session_pb2.CaptureAck(capture_id=capture_id, ready=True, next_step=1, step_seconds=0.1))
commit = rank.receive().commit_capture
files = {{"rank0.json": file_of(TRACE), "rank0.manifest.json": file_of(manifest_of(capture_id))}}
reason = ""
if "keep" not in sys.argv:
    try:
        Handover(SOCKET, 0, welcome.handover_token).send(capture_id, files)
    except HandoverError as error:
        reason = str(error)
rank.say(capture_result=session_pb2.CaptureResult(
    capture_id=capture_id, ok=True, start_step=commit.start_step, steps=commit.steps, file="rank0.json",
    bytes=len(TRACE), sha256=hashlib.sha256(TRACE).hexdigest(), steps_made=1,
))
print(json.dumps(reason), flush=True)
sys.stdin.read()
"""
ATTEMPTS = f"""{PREPARED}
found = {{}}

def attempt(name, act):
    try:
        found[name] = act()
    except OSError as error:
        found[name] = error.strerror
    except HandoverError as error:
        found[name] = str(error)

folder = f"{{CAPTURES}}/{{ID}}"
attempt("list the directory", lambda: os.listdir(CAPTURES))
attempt("list the capture", lambda: os.listdir(folder))
for name in ("rank0.json", "manifest.json", "rank0.manifest.json", "analysis.json"):
    attempt(f"read {{name}}", lambda name=name: open(f"{{folder}}/{{name}}").read())
    attempt(f"write {{name}}", lambda name=name: open(f"{{folder}}/{{name}}", "w").close())
    attempt(f"plant a link {{name}}", lambda name=name: os.symlink("/etc/passwd", f"{{folder}}/{{name}}"))
attempt("plant a pin", lambda: open(f"{{folder}}/.pinned", "w").close())
attempt("plant a pipe", lambda: os.mkfifo(f"{{folder}}/rank1.json"))
attempt("rename the trace", lambda: os.rename(f"{{folder}}/rank0.json", f"{{folder}}/rank9.json"))
attempt("delete the trace", lambda: os.unlink(f"{{folder}}/rank0.json"))
attempt("make a capture", lambda: os.mkdir(f"{{CAPTURES}}/20260101-000000-abcdef"))
attempt("make trash", lambda: os.mkdir(f"{{CAPTURES}}/.removed-deep"))
attempt("link the trace", lambda: os.link(f"{{folder}}/rank0.json", f"/tmp/{{os.getpid()}}"))
listed = command("captures", "list", "--json")
attempt("list captures", lambda: (listed[0], json.loads(listed[1])["total"]))
for words in (("get", ID, "-o", "/tmp/none"), ("show", ID), ("pin", ID), ("unpin", ID), ("rm", ID)):
    attempt(f"captures {{words[0]}}", lambda words=words: command("captures", *words))
attempt("analyze", lambda: command("analyze", ID))
attempt("compare", lambda: command("compare", ID, ID))

rank = Rank(SOCKET, "mallorys")
token = rank.receive().welcome.handover_token
trace = file_of(TRACE)
pipe = os.pipe()[0]
directory = os.open("/tmp", os.O_RDONLY)
other = "20260101-000001-abcdef"

def hand_over(name, token, capture_id, files):
    attempt(name, lambda: Handover(SOCKET, 0, token).send(capture_id, files, 20.0))

hand_over("hand over without a session", "0" * 32, ID, {{"rank0.json": trace}})
hand_over("hand over without a token", "", ID, {{"rank0.json": trace}})
hand_over("hand over into another's capture", token, ID, {{"rank0.json": trace}})
hand_over("hand over another rank", token, other, {{"rank7.json": trace}})
hand_over("hand over the capture's manifest", token, other, {{"manifest.json": trace}})
hand_over("hand over an analysis", token, other, {{"analysis.json": trace}})
hand_over("hand over a pin", token, other, {{".pinned": trace}})
hand_over("hand over a path", token, other, {{"../../rank0.json": trace}})
hand_over("hand over to a path", token, "../x", {{"rank0.json": trace}})
hand_over("hand over a pipe", token, other, {{"rank0.json": pipe}})
hand_over("hand over a directory", token, other, {{"rank0.json": directory}})
hand_over("hand over a false manifest", token, other, {{"rank0.manifest.json": trace}})
print(json.dumps(found))
"""
DENIED = "Permission denied"
OTHERS = "belongs to another user; ask that user, root or a member of the admin_group"
OWN = """
del os.environ["TORCHPERFD_CAPTURES_DIR"]
results = {}
os.mkdir(PLACE)
for words in (
    ("captures", "list", "--json"), ("captures", "get", ID, "-o", PLACE), ("captures", "show", ID),
    ("captures", "pin", ID), ("captures", "rm", ID), ("captures", "unpin", ID), ("analyze", ID),
    ("captures", "rm", ID),
):
    code, printed = command(*words)
    results.setdefault(words[1] if words[0] == "captures" else words[0], []).append([code, printed])
results["file"] = open(f"{PLACE}/{ID}/rank0.json").read()
print(json.dumps(results))
"""


@pytest.fixture
def node() -> Iterator[Shared]:
    with contextlib.closing(Shared()) as made:
        made.captures.mkdir(mode=0o1777, parents=True)
        made.captures.chmod(0o1777)
        yield made


def captured(node: Shared, ada: "subprocess.Popen[str]") -> str:
    """Have root capture Ada's rank; return the capture's id."""
    assert json.loads(line(ada)) == ["", 32], "no directory is named to her"
    capture_id: str = node.json("capture", "--run", "baseline", "--steps", "1")["capture_id"]
    assert json.loads(line(ada)) == ""
    return capture_id


def tree(directory: Path) -> dict[str, tuple[int, int, str]]:
    """Return mode, owner and hash of all files of the captures in a directory."""
    return {
        str(path.relative_to(directory)): (
            stat.S_IMODE(path.lstat().st_mode),
            path.lstat().st_uid,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in directory.glob("2*/**/*")
    }


def test_captures_of_a_user_are_closed_to_another(node: Shared) -> None:
    node.start_shared("--analyze-captures")
    assert stat.S_IMODE(node.captures.stat().st_mode) == 0o700, "an older version left it open to all"
    with node.user(ADA, RANK) as ada:
        capture_id = captured(node, ada)
        folder = node.captures / capture_id
        eventually((folder / "analysis.json").exists, 60, node.log)
        names = f"ID, CAPTURES = {capture_id!r}, {str(node.captures)!r}\n"
        before = tree(node.captures)
        found: dict[str, Any] = node.as_user(BOB, f"{names}{ATTEMPTS}")
        # The kernel's protection of links is no part of the design: it is recorded beside the table.
        protected = Path("/proc/sys/fs/protected_symlinks").read_text().strip()
        print(f"fs.protected_symlinks={protected}", *(f"{name}: {found[name]}" for name in found), sep="\n")
        assert tree(node.captures) == before
    assert len(found) >= 26
    on_disk = [
        name for name in found if not name.startswith(("captures", "analyze", "compare", "hand", "list c"))
    ]
    assert {name: found[name] for name in on_disk} == dict.fromkeys(on_disk, DENIED)
    assert found["list captures"] == [0, 0]
    for name in ("get", "show", "pin", "unpin", "rm"):
        code, words = found[f"captures {name}"]
        assert code != 0
        assert OTHERS in words
    for name in ("analyze", "compare"):
        assert found[name][0] != 0
        assert "private_kernel" not in found[name][1]
    reasons = {
        "without a session": "the daemon has no session of this process",
        "without a token": "the daemon has no session of this process",
        "into another's capture": "takes no part in capture",
        "another rank": "is no file of rank 0",
        "the capture's manifest": "is no file of rank 0",
        "an analysis": "is no file of rank 0",
        "a pin": "is no file of rank 0",
        "a path": "is no file of rank 0",
        "to a path": "is no capture id",
        "a pipe": "rank0.json is no regular file",
        "a directory": "rank0.json is no regular file",
        "a false manifest": "is no manifest",
    }
    for name, reason in reasons.items():
        assert reason in (found[f"hand over {name}"] or ""), name
    log = node.log()
    assert "Traceback" not in log
    assert "was open to other users (mode 1777)" in log
    assert log.count("refused: capture ") >= 5
    # All that is kept is the daemon's, except the traces, which are read as their user.
    assert {
        path.name: (stat.S_IMODE(path.stat().st_mode), path.stat().st_uid) for path in folder.iterdir()
    } == {
        "manifest.json": (0o600, 0),
        "rank0.manifest.json": (0o600, 0),
        "analysis.json": (0o600, 0),
        "rank0.json": (0o600, ADA),
    }


def test_owner_of_a_capture_can_do_all_of_it(node: Shared) -> None:
    node.start_shared("--analyze-captures")
    with node.user(ADA, RANK) as ada:
        capture_id = captured(node, ada)
        eventually((node.captures / capture_id / "analysis.json").exists, 60, node.log)
        root = node.json("captures", "list")["captures"]
        assert [(each["capture_id"], each["ranks"][0]["uid"]) for each in root] == [(capture_id, ADA)]
        assert "private_kernel" in node.command("analyze", capture_id).stdout
        place = f"/tmp/torchperfd-test-{os.getpid()}"
        done = node.as_user(ADA, f"import json\nID, PLACE = {capture_id!r}, {place!r}\n{OWN}")
    try:
        assert json.loads(done["list"][0][1])["captures"][0]["capture_id"] == capture_id
        assert done["file"] == TRACE
        assert [code for code, _ in done["get"] + done["pin"] + done["unpin"] + done["show"]] == [0] * 4
        assert done["analyze"][0][0] == 0
        assert "private_kernel" in done["analyze"][0][1]
        assert [code for code, _ in done["rm"]] == [1, 0], "a pinned one stays"
        assert not (node.captures / capture_id).exists()
    finally:
        subprocess.run(["rm", "-r", place], check=False)


def test_trace_that_is_not_handed_over_fails_its_rank(node: Shared) -> None:
    node.start_shared()
    code = f"import sys\nsys.argv.append('keep')\n{RANK}"
    with node.user(ADA, code) as ada:
        line(ada)
        done = node.command("capture", "--run", "baseline", "--steps", "1", "--json")
    assert done.returncode == 1
    (rank,) = json.loads(done.stdout)["ranks"]
    assert (rank["state"], rank["reason"]) == (
        "failed",
        "it has not handed its trace over to the daemon",
    )


OLD = """
rank = Rank(SOCKET, "baseline", features=("steps", "account", "capture"))
rank.receive()
print("ready", flush=True)
sys.stdin.read()
"""


def test_client_of_an_older_version_is_named_as_such(node: Shared) -> None:
    node.start_shared()
    with node.user(ADA, OLD) as ada:
        assert line(ada) == "ready"
        done = node.command("capture", "--run", "baseline", "--steps", "1", "--json")
    assert done.returncode == 1
    assert "is too old to hand its trace over to this daemon" in json.loads(done.stdout)["ranks"][0]["reason"]
