"""Text from outside reaches no terminal with characters that could drive it."""

import json
import re
from pathlib import Path

import pytest

from torchperfd.document.blocks import Bar, Bars, Code, Document, Facts, Heading, Item, Sentences
from torchperfd.document.markup import render_markdown
from torchperfd.document.tables import Table
from torchperfd.document.terminal import Page, render
from torchperfd.document.text import printable
from torchperfd.model.formatting import one_line
from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_cli import main
from torchperfd_cli.commands._daemon import clean
from torchperfd_daemon.captures import manifest
from torchperfd_daemon.untrusted_files import decode_clean

EVIL = "a\x1b]0;x\x07\x9b31m\u202eb\r\n\x7f\u2028"
TAME = "a?]0;x??31m?b????"
DRIVES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@pytest.mark.parametrize(
    ("text", "most", "line"),
    [
        (EVIL, 100, TAME),
        (EVIL, 3, "a?]"),
        ("knüll 漢", 100, "knüll 漢"),
        ("x" * 9, 4, "xxxx"),
        ("", 4, ""),
    ],
)
def test_one_line_replaces_what_is_not_printable(text: str, most: int, line: str) -> None:
    assert one_line(text, most) == line


def test_printable_keeps_lines() -> None:
    assert printable("a\n\tb\x1b[2J\n") == "a\n\tb?[2J\n"
    assert printable("plain") == "plain"


def test_clean_message_reaches_every_text() -> None:
    message = control_pb2.ListRunsResponse(
        runs=[
            control_pb2.Run(
                run=EVIL,
                ranks=[
                    control_pb2.RankStatus(
                        identity=session_pb2.RankIdentity(script=EVIL), phase_seconds={EVIL: 2.0, "b": 3.0}
                    )
                ],
            )
        ],
        nodes=[control_pb2.FleetNode(address=EVIL)],
    )
    clean(message)
    assert (message.runs[0].run, message.nodes[0].address) == (TAME, TAME)
    assert message.runs[0].ranks[0].identity.script == TAME
    assert dict(message.runs[0].ranks[0].phase_seconds) == {TAME: 2.0, "b": 3.0}
    # Bytes are no text.
    piece = clean(control_pb2.DownloadPiece(data=EVIL.encode(), size=7))
    assert (piece.data, piece.size) == (EVIL.encode(), 7)
    readings = control_pb2.GetReadingsResponse(readings=[control_pb2.Reading(labels={"a": EVIL})])
    assert clean(readings).readings[0].labels["a"] == TAME
    hello = clean(session_pb2.Hello(features=[EVIL, "b"]))
    assert list(hello.features) == [TAME, "b"]


def test_manifests_are_read_clean() -> None:
    document = {"capture_id": "one", "run": EVIL, "trigger": EVIL, "requested_at": 1.0}
    rank = {"rank": 0, "reason": EVIL, "node": EVIL}
    record = decode_clean(json.dumps({**document, "ranks": [rank]}).encode(), manifest.CaptureRecord)
    assert (record.run, record.trigger, record.ranks[0].reason, record.ranks[0].node) == (TAME,) * 4
    own = {"state": "complete", "file": "f", "bytes": 1, "sha256": "", "step_range": [1, 2], "options": {}}
    assert decode_clean(json.dumps({**rank, **own}).encode(), manifest.RankManifest).reason == TAME


def test_documents_keep_styles_and_drop_control_characters() -> None:
    blocks = (
        Heading(f"{EVIL}!", f"x{EVIL}y", "bad"),
        Sentences([EVIL]),
        Facts([(EVIL, EVIL)]),
        Code([EVIL]),
        Table([EVIL, "n"], [[EVIL, EVIL]], notes=[EVIL]),
        Bars(["a", "b", "c"], [Bar(EVIL, "1", 0.5), Bar("x", "1", None, EVIL)]),
        Item(1, Heading(EVIL), ()),
    )
    printed = render(Document([blocks]), Page(colour=True))
    assert not DRIVES.search(re.sub(r"\x1b\[[0-9;]*m", "", printed))
    assert "\x1b[1;31m" in printed
    assert not DRIVES.search(render_markdown(Document([blocks])))


@pytest.mark.parametrize("form", [(), ("--markdown",), ("--csv",)])
def test_analyze_of_evil_names_prints_none(
    form: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    events = [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{n}", "ts": n * 100, "dur": 90, "pid": 1,
         "tid": 1, "args": {}}
        for n in range(3)
    ]  # fmt: skip
    events += [
        {"ph": "X", "cat": "cpu_op", "name": EVIL, "ts": n * 100 + 5, "dur": 60, "pid": 1, "tid": 1,
         "args": {"Process Group Name": EVIL, "Collective name": EVIL}}
        for n in range(3)
    ]  # fmt: skip
    events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": EVIL}})
    path = tmp_path / "trace.json"
    device = {"id": 0, "name": EVIL, "totalGlobalMem": 1}
    path.write_text(json.dumps({"WARNING": [EVIL], "deviceProperties": [device], "traceEvents": events}))
    code = main.run_command(["analyze", str(path), *form])
    printed = capfd.readouterr()
    assert code == 0, printed.err
    assert "0;x??31m?b" in printed.out
    assert not DRIVES.search(printed.out + printed.err)
