"""The pages of ``compare --html`` and ``runs show --html``: the documents in them, and what a name may do."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.support.commands import Run
from tests.support.page_documents import CAPTURES, HOSTILE, long_run, two_captures, two_runs

from torchperfd.report.store import RunStore
from torchperfd_daemon import analysis
from torchperfd_daemon.pages import PageKind, render_page


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> Run:
    """Run a command beside two captures and three kept runs."""
    monkeypatch.setenv("TORCHPERFD_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("TORCHPERFD_CAPTURES_DIR", str(tmp_path / "captures"))
    monkeypatch.chdir(tmp_path)
    two_captures(tmp_path / "captures")
    store = RunStore(str(tmp_path / "runs"))
    for document in (*two_runs(), long_run()):
        store.keep(document)
    return run


def block(page: str) -> Any:
    """Return the document in a page, cut out as a browser would."""
    text = page.split('<script type="application/json" id="document">')[1].split("</script>")[0]
    return json.loads(text)


@pytest.mark.parametrize("kind", get_args(PageKind))
def test_page_allows_its_own_style_and_script_only(kind: PageKind) -> None:
    page = render_page(kind, HOSTILE, {"name": HOSTILE, "half": "\ud800"})
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert page.count("<script") == page.count("</script") == 2
    # Modules are joined to one script, for a browser loads none from a file.
    assert not re.search(r"^(import|export) ", page, re.MULTILINE)
    assert "<img" not in page
    assert block(page)["name"] == HOSTILE
    # No address is fetched, and no attribute runs code or has a style: the policy would refuse both.
    assert set(re.findall(r"https?://[^\s\"']+", page)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<[a-z]+[^>]* (on[a-z]+|style)=", page)
    page.encode()


def test_captures_page_has_the_document_of_json(run: Run) -> None:
    code, out, err = run("compare", *CAPTURES, "--html", "page.html", "--json")
    assert code == 0
    assert "torchperfd: wrote page.html (" in err
    page, document = Path("page.html").read_text(), json.loads(out)
    shown = block(page)
    for key in ("headline", "before", "after", "step", "phases", "device", "notes", "level"):
        assert shown[key] == document[key]
    assert document["headline"].startswith("B's steps take 3.9 ms, A's 2.9 ms (+34 %): +998 µs in void gemm")
    assert document["before"]["capture"]["run"] == "bert-17"
    assert document["before"]["capture"]["requested_at"] == 1_700_000_000
    assert "<title>bert-17 20260101-000000-aaaaaa → bert-18 &lt;/script&gt;" in page
    assert [row["status"] != "same" for row in shown["operators"]] == [True] * 3 + [False] * 10
    assert shown["rows"]["operators"] == len(document["operators"])
    assert HOSTILE in {row["name"] for row in shown["operators"]}


def test_captures_page_alone_prints_no_table(run: Run) -> None:
    code, out, err = run("compare", *CAPTURES, "--html", "page.html", "--workers", "1")
    assert (code, out) == (0, "")
    assert err.count("\n") == 1


def test_captures_page_of_two_ranks_is_of_one_capture(run: Run, tmp_path: Path) -> None:
    two_captures(tmp_path / "more", ranks=2)
    first = str(tmp_path / "more" / CAPTURES[0])
    assert run("compare", first, "--ranks", "0,1", "--html", "page.html")[0] == 0
    shown = block(Path("page.html").read_text())
    assert shown["before"]["capture"] == shown["after"]["capture"]
    assert [Path(shown[side]["paths"][0]).name for side in ("before", "after")] == [
        "rank0.json",
        "rank1.json",
    ]


def test_captures_page_keeps_rows_that_differ_of_too_many() -> None:
    def row(name: str, status: str, difference: float) -> dict[str, Any]:
        return {"name": name, "status": status, "difference_us": difference}

    rows = [row(f"op{each}", "same", 5000 - each) for each in range(4000)] + [row("new", "new", 1)]
    side = {"paths": ["a/rank0.json", "a/rank1.json"]}
    document: dict[str, Any] = {"before": side, "after": side, "operators": rows}
    document |= {name: [] for name in ("phases", "device", "launched", "kernels", "memory")}
    page = analysis.render_comparison_html(document)
    shown = block(page)
    assert [each["name"] for each in shown["operators"][:2]] == ["new", "op0"]
    assert (len(shown["operators"]), shown["rows"]["operators"]) == (3000, 4001)
    assert "<title>a → a · torchperfd</title>" in page


def test_runs_page_has_the_document_of_json(run: Run) -> None:
    code, out, _ = run("compare", "train-3", "slow", "--html", "page.html", "--json")
    assert code == 0
    page = Path("page.html").read_text()
    assert block(page) == json.loads(out)
    assert block(page)["headline"] in run("compare", "train-3", "slow")[1]
    assert block(page)["differing"][0]["after"] == f"2.14.0 {HOSTILE}"
    assert "<title>train-3f2a → slow-11 · torchperfd</title>" in page


def test_runs_page_alone_prints_nothing_and_keeps_the_limit(run: Run) -> None:
    code, out, err = run("compare", "train-3", "slow", "--html", "page.html", "--fail-above", "5%")
    assert (code, out) == (7, "")
    assert err.splitlines()[-1] == "torchperfd: a step of B is slower by more than the limit of 5.0%"
    assert Path("page.html").is_file()


def test_runs_page_refuses_workers(run: Run) -> None:
    code, _, err = run("compare", "train-3", "slow", "--html", "page.html", "--workers", "2")
    assert code == 2
    assert "--workers does not apply to two runs" in err


def test_run_page_shows_what_the_text_shows(run: Run) -> None:
    code, out, err = run("runs", "show", "ddp", "--html", "page.html")
    assert (code, out) == (0, "")
    assert "wrote page.html" in err
    page = Path("page.html").read_text()
    shown = block(page)
    text = " ".join(run("runs", "show", "ddp")[1].split())
    for part in (shown["headline"], shown["remarks"][0], dict(shown["facts"])["host"]):
        assert part in text
    assert f"SLOW RANK · {shown['card']['causes'][0]['head'].split(' · ', 1)[1]}" in text
    assert [row["is_named"] for row in shown["ranks"]] == [False, False, False, True]
    assert HOSTILE in shown["card"]["causes"][0]["parts"][0][1]
    assert "<title>run ddp · torchperfd</title>" in page


def test_run_page_that_cannot_be_written_is_one_line(run: Run) -> None:
    code, out, err = run("runs", "show", "ddp", "--html", "none/page.html")
    assert (code, out) == (1, "")
    assert err == "torchperfd: cannot write none/page.html: No such file or directory; name another file\n"
