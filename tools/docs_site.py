"""Build the documentation site.

    python tools/docs_site.py [--out site]

Copies every Markdown page of the repository, and what these link to, into one folder, adds the pages and
sections that are generated from code, and has mkdocs build the site from it. A page that is missing from the
menu, a link to nothing and an anchor that does not exist are errors. Beside each HTML page lies its
Markdown; ``llms.txt`` lists them all.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[1]
_LINK: Final = re.compile(r"\]\(([^)#\s]+)")
_BROKEN_FENCE: Final = re.compile(r"```|<p><code>(?:sh|yaml|python|text|console|json)\n")
"""A fence that Markdown did not recognise, and that a reader sees."""
_LEFT_OUT: Final = ("tests/", ".github/")
_GENERATED: Final = "docs/reference"
_SECTION: Final = re.compile(r"<!-- generated: (.+?) -->\n")


def build(out: Path) -> None:
    """Build the site.

    Raises:
        SystemExit: A link, an anchor or the menu is wrong; the message has which.
    """
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "source"
        pages = list(copy_pages(source))
        for page in pages:
            (source / page).write_text(with_sections((source / page).read_text()))
        for style in (ROOT / "docs").glob("*.css"):
            _copy(style, source)
        for name, text in generated_pages().items():
            page = source / _GENERATED / name
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(text)
            pages.append(page.relative_to(source))
        settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
        settings["docs_dir"] = str(source)
        config = Path(directory) / "mkdocs.yml"
        config.write_text(yaml.safe_dump(settings))
        # Not --quiet, which hides warnings from --strict as well.
        command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
        command += ["-f", str(config), "-d", str(out.resolve())]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        found = [line for line in done.stderr.splitlines() if not line.startswith("INFO")]
        if done.returncode:
            sys.exit("\n".join(found))
        if broken := [str(page) for page in out.rglob("*.html") if _BROKEN_FENCE.search(page.read_text())]:
            sys.exit(f"a fence of code is shown as text in {', '.join(sorted(broken))}")
        for page in pages:
            shutil.copy(source / page, out / page)
        (out / "llms.txt").write_text(list_of_pages(settings, source))


def copy_pages(source: Path) -> Iterator[Path]:
    """Copy all pages and the files that they link to; yield the pages' paths below the root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.split():
        if name.startswith(_LEFT_OUT):
            continue
        page = ROOT / name
        _copy(page, source)
        yield Path(name)
        for target in _LINK.findall(page.read_text()):
            linked = (page.parent / target).resolve()
            if "://" not in target and linked.is_file() and linked.suffix != ".md" and ROOT in linked.parents:
                _copy(linked, source)


def _copy(file: Path, source: Path) -> None:
    into = source / file.relative_to(ROOT)
    into.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, into)


def generated_pages() -> dict[str, str]:
    """Return the pages that come from code, by file name."""
    sys.path.insert(0, str(ROOT))  # for a run of this file, which has its own folder there
    from tools.reference import pages

    return pages()


def with_sections(text: str) -> str:
    """Return a page with the sections that come from code in place of their marks."""
    if not _SECTION.search(text):
        return text
    sys.path.insert(0, str(ROOT))  # for a run of this file, which has its own folder there
    from tools.reference import sections

    made = sections()
    return _SECTION.sub(lambda mark: made[mark[1]], text)


def list_of_pages(settings: dict[str, Any], source: Path) -> str:
    """Return ``llms.txt``: the pages of the menu with their first sentence."""
    lines = [f"# {settings['site_name']}", "", f"> {settings['site_description']}", ""]
    for title, entry in _menu(settings["nav"]):
        if entry is None:
            lines += ["", f"## {title}", ""]
        else:
            sentence = first_sentence((source / entry).read_text())
            lines.append(f"- [{title}]({entry}): {sentence}" if sentence else f"- [{title}]({entry})")
    return "\n".join(lines) + "\n"


def _menu(entries: list[dict[str, Any]]) -> Iterator[tuple[str, str | None]]:
    for entry in entries:
        ((title, inside),) = entry.items()
        if isinstance(inside, str):
            yield title, inside
        else:
            yield title, None
            yield from _menu(inside)


def first_sentence(page: str) -> str:
    """Return the first sentence of a page's first paragraph; empty where it has only lists and tables."""
    paragraphs = (part.strip() for part in re.sub(r"```.*?```", "", page, flags=re.DOTALL).split("\n\n"))
    text = next((part for part in paragraphs if part[:1].isalnum() or part[:1] in "*`["), "")
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(text.split())).replace("**", "")
    return re.split(r"(?<=[.?!])\s", text)[0].removesuffix(":")


def main() -> None:
    """Build the site into a folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=ROOT / "site")
    build(parser.parse_args().out)


if __name__ == "__main__":
    main()
