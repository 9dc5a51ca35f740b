"""Words that the tree has retired stay away, and names of tests stay short."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.node import ROOT

RETIRED = re.compile(
    r"\b(?:AbsentRank|Accountant|CaptureDesk|Dialogue|Doorkeeper|Follower|Keeper|Ledger|OrderDesk|Patience"
    r"|Precedence|Pump|Rhythm|Rota|Scribe|StackDesk|StackTeller|Stretch|Surroundings|Visitor|_Court"
    r"|campaign|dawdles?|deeds|graves|humbly|lesson|pulse|ticket|quietly|relieves?|Nor does)\b"
)
"""Metaphors for classes and functions, and phrases; docs/glossary.md has the terms in use."""

LONGEST_TEST_NAME = 60


def written(*places: str) -> Iterator[Path]:
    """Yield the files that people write in, without generated code."""
    for place in places:
        for path in [ROOT / place] if (ROOT / place).is_file() else sorted((ROOT / place).rglob("*")):
            if path.suffix in {".py", ".c", ".h", ".md"} and "_pb2" not in path.name:
                yield path


def test_tree_retired_words_are_absent() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in written("client", "daemon", "docs", "README.md")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in RETIRED.finditer(line)
    ]
    assert found == []


def test_tests_names_are_short() -> None:
    names = [
        name
        for path in written("tests")
        for name in re.findall(
            r"^ *(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE
        )
    ]
    assert names
    assert [name for name in names if len(name) > LONGEST_TEST_NAME] == []
