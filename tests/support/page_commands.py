"""The shell commands of documentation pages, and those that a page says were not run.

``python -m tests.support.page_commands PAGE`` prints the commands of a page that were run, one a line;
``… PAGE LANGUAGE`` its blocks in a language.
"""

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.support.node import ROOT

PAGES: Final = (
    *sorted((ROOT / "deploy").rglob("*.md")),
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
    *(ROOT / "docs" / name for name in ("operating.md", "security.md")),
)
"""What operators read."""

_BLOCK: Final = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_NOT_RUN: Final = re.compile(r"^\*\*Not run:\*\* .+?(?=^$|\Z)", re.MULTILINE | re.DOTALL)
_REASON: Final = re.compile(r"((?:`[^`]+`(?:,\s|\sand\s)?)+)\s\(([^()]+)\)")
_SHELLS: Final = ("sh", "bash", "shell", "console", "")
_STEP: Final = "- run: "
_SUDO: Final = re.compile(r"^sudo (-u \w+ )?")


def blocks(text: str, *languages: str) -> Iterator[tuple[str, str]]:
    """Yield language and content of each fenced block in one of the languages."""
    for match in _BLOCK.finditer(text):
        if match[2] in languages:
            yield match[2], textwrap.dedent(match[3])


def commands(text: str) -> list[str]:
    """Return the commands of a page's blocks: a line each, and one for a line that is continued.

    In a console, and in a block without a language, they follow a dollar sign; in a workflow, ``run:``.
    """
    found = []
    for language, block in blocks(text, *_SHELLS, "yaml"):
        for raw in re.sub(r"\\\n\s*", "", block).splitlines():
            line = raw.strip()
            if language == "yaml":
                line = line.removeprefix(_STEP) if line.startswith(_STEP) else ""
            elif language in ("console", ""):
                line = line.removeprefix("$ ") if line.startswith("$ ") else ""
            line = re.sub(r"(^|\s+)#( .*)?$", "", line)
            if line:
                found.append(line)
    return found


def not_run(text: str) -> dict[str, str]:
    """Return the beginnings of commands that a page says were not run, with the reasons.

    The paragraph begins with ``**Not run:**``, names commands in code, and has the reason in parentheses.
    """
    return {
        name: " ".join(reason.split())
        for paragraph in _NOT_RUN.findall(text)
        for names, reason in _REASON.findall(paragraph)
        for name in re.findall(r"`([^`]+)`", names)
    }


def begins(line: str, name: str) -> bool:
    """Return whether a command begins with words, apart from ``sudo``."""
    return f"{_SUDO.sub('', line)} ".startswith(f"{name} ")


def command(page: Path, name: str) -> str:
    """Return the one command of a page that begins with words."""
    (found,) = (each for each in commands(page.read_text(encoding="utf-8")) if begins(each, name))
    return found


def run_commands(text: str) -> list[str]:
    """Return the commands of a page without those that it says were not run."""
    names = not_run(text)
    return [each for each in commands(text) if not any(begins(each, name) for name in names)]


if __name__ == "__main__":
    path, *language = sys.argv[1:]
    content = Path(path).read_text(encoding="utf-8")
    lines = [block for _, block in blocks(content, *language)] if language else run_commands(content)
    print("\n".join(lines))
