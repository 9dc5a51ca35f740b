"""Words that the tree has retired stay away, and names of tests stay short."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.node import ROOT

RETIRED = re.compile(
    r"\b(?:"
    # Names of classes and modules.
    r"AbsentRank|Accountant|CaptureDesk|Cycle|Desk|Dialogue|Door|Doorkeeper|Follower|Gathered|Keeper|Ledger"
    r"|Meeting|OrderDesk|Patience|Precedence|Pump|Rhythm|Rota|Scene|Scribe|StackDesk|StackTeller"
    r"|Stretch|Surroundings|Tallies|Visitor|_Court|try_cause"
    # Metaphors.
    r"|beats|books?|campaigns?|dawdles?|deeds?|desks?|doors?|felt|glances|graves|hears?|heard|humbly|keepers?"
    r"|ledger|lessons?|nobody|obeys?|pulses?|pump|quietly|relieves?|scenes?|tallies|tally|tapes?|tells|tickets?"
    r"|told|visitors?|whoever"
    # Phrases.
    r"|[Bb]y turns|[Ff]or good|Nor does|says? of|(?<!\.)tell(?!\())\b"
)
"""Metaphors for classes and functions, and phrases; docs/glossary.md has the terms in use."""

WRITTEN = {".c", ".h", ".js", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}
PLACES = (
    *("client", "daemon", "cli", "tests", "benchmarks", "docs", "deploy", "grafana", "tools"),
    *("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml"),
)

LONGEST_TEST_NAME = 60


def written(*places: str) -> Iterator[Path]:
    """Yield the files that people write in, without generated code."""
    for place in places:
        for path in [ROOT / place] if (ROOT / place).is_file() else sorted((ROOT / place).rglob("*")):
            if path.suffix in WRITTEN and "_pb2" not in path.name and path != Path(__file__):
                yield path


def test_tree_retired_words_are_absent() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in written(*PLACES)
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
