"""Documents over HTTP: what they hold, that they are the commands', and what each caller may see."""

import base64
import gzip
import time
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.daemon.http_api import OWNER, TOKEN, Page, with_page
from tests.unit.daemon.kept import add
from tests.unit.daemon.live_runs import NOW, RANKS, STEPS, train

from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.metrics.page import MetricsPage
from torchperfd_daemon.store.model import RankIdentity, State, StepColumns
from torchperfd_daemon.store.store import p50_and_p95
from torchperfd_daemon.views import live
from torchperfd_daemon.web.access import Access, Reader
from torchperfd_daemon.web.app import build_app
from torchperfd_daemon.web.config_file import WebConfigFile

NS = 1_000_000_000


def join(page: Page, run: str = "a", rank: int = 0, uid: int | None = 1234, **more: Any) -> Any:
    identity = RankIdentity(
        run, rank, more.pop("world", 2), script="/home/ada/train.py", node="node-a", **more
    )
    record = page.served.store.join(identity, uid)
    record.state = State.TRAINING
    return record


@with_page
async def test_runs_have_their_ranks_rates_and_coverage(page: Page) -> None:
    train(page.served.store, "one straggler")
    document = await page.get("runs")
    [run] = document["runs"]
    assert document["schema"] == "torchperfd.ps/1"
    assert (run["run"], run["state"], len(run["ranks"])) == ("bert-17", "training", RANKS)
    assert run["steps_per_second"] == pytest.approx(1 / run["step_seconds"])
    assert run["verdict"]["cause"]
    assert any(value for value in run["sparkline"]["step_seconds"])
    view = document["view"]
    assert (view["scope"], view["ranks_known"], view["ranks_reporting"]) == ("node", RANKS, RANKS)
    assert view["newest_unix_seconds"] == pytest.approx(NOW)
    assert view["age_seconds"] > 0


@with_page
async def test_a_missing_rank_is_counted_and_never_a_row(page: Page) -> None:
    join(page, world=16)
    document = await page.get("runs/a")
    assert len(document["run"]["ranks"]) == 1
    assert document["run"]["step_seconds"] is None
    view = document["view"]
    assert (view["ranks_known"], view["ranks_reporting"], view["ranks_elsewhere"]) == (16, 1, 15)


@with_page
async def test_documents_are_those_of_the_commands(page: Page) -> None:
    train(page.served.store, "one straggler")
    ranks = await page.get("runs/bert-17/ranks?last=64")
    assert ranks["schema"] == "torchperfd.ranks/1"
    answer = await Reader(page.parts).steps("bert-17", 64, Access.STRANGER)
    assert ranks["runs"] == [live.run_dict(each) for each in live.runs(answer.ranks)]
    assert [rank["rank"] for rank in ranks["runs"][0]["ranks"] if rank["slow"]] == [2]
    steps = await page.get("runs/bert-17/ranks/2/steps?last=5")
    assert (steps["schema"], len(steps["step_seconds"])) == ("torchperfd.steps/1", 5)
    diagnosis = await page.get("runs/bert-17/diagnose")
    assert diagnosis["schema"] == "torchperfd.diagnosis/1"
    assert [verdict["run"] for verdict in diagnosis["verdicts"]] == ["bert-17"]
    assert (await page.get("goodput"))["schema"] == "torchperfd.goodput/1"
    assert (await page.get("info"))["node"] == "node-a"


@with_page
async def test_table_of_ranks_is_of_the_steps_of_the_tiles(page: Page) -> None:
    """Once steps have been slow for a while, no view of the present has a mean with faster ones."""
    rank = join(page)
    took = array("q", [NS // 10] * 60 + [NS // 2] * 40)
    ended = array("q", [int(NOW * NS) - sum(took[step + 1 :]) for step in range(len(took))])
    page.served.store.add_steps(rank, StepColumns(ended, took, {"forward": took}))
    own = (await page.get("runs/a"))["run"]["ranks"][0]
    [table] = (await page.get("runs/a/ranks"))["runs"]
    assert own["step_seconds"] == own["step_p50_seconds"] == table["ranks"][0]["step_seconds"] == 0.5
    [longer] = (await page.get("runs/a/ranks?last=256"))["runs"]
    assert longer["step_seconds"] < 0.3


@with_page
async def test_run_has_percentiles_of_its_steps_and_ranks(page: Page) -> None:
    train(page.served.store, "healthy")
    run = (await page.get("runs/bert-17"))["run"]
    for own, rank in zip(run["ranks"], page.served.store.ranks(), strict=True):
        p50, p95 = p50_and_p95(rank.history.newest_durations())
        assert own["step_p50_seconds"] == pytest.approx(float(p50) / NS, abs=1e-7)
        assert own["step_p95_seconds"] == pytest.approx(float(p95) / NS, abs=1e-7)
    whole = run["step_percentiles"]
    assert whole["p50_seconds"] < whole["p95_seconds"]
    assert whole["slowest"]["rank"] in range(RANKS)
    join(page)
    without_steps = (await page.get("runs/a"))["run"]
    assert without_steps["step_percentiles"] is None
    assert "step_p50_seconds" not in without_steps["ranks"][0]


@with_page
async def test_history_has_seconds_steps_and_what_stands_out(page: Page) -> None:
    train(page.served.store, "one straggler")
    document = await page.get("runs/bert-17/history")
    assert [rank["rank"] for rank in document["ranks"]] == [*range(RANKS)]
    for rank in document["ranks"]:
        seconds, steps = rank["seconds"], rank["steps"]
        lengths = {len(seconds[name]) for name in seconds if name != "phase_seconds"}
        assert lengths == {len(column) for column in seconds["phase_seconds"].values()}
        assert len(steps["end_unix_seconds"]) == len(steps["own_seconds"]) == STEPS
        assert steps["first_step"] == 1000 - STEPS
    assert document["across"]["outliers"][0]["rank"] == 2
    assert document["across"]["own"]["max_rank"] == [2] * len(document["across"]["unix_seconds"])
    assert document["ranks_here"] == [*range(RANKS)]
    narrow = await page.get("runs/bert-17/history?ranks=1,3&steps=4&seconds=0&phases=0")
    assert [rank["rank"] for rank in narrow["ranks"]] == [1, 3]
    assert len(narrow["ranks"][0]["steps"]["step_seconds"]) == 4
    assert "phase_seconds" not in narrow["ranks"][0]["steps"]
    assert narrow["ranks"][0]["seconds"]["unix_seconds"] == []
    later = await page.get(f"runs/bert-17/history?since={NOW - 0.01}")
    assert [len(rank["steps"]["step_seconds"]) for rank in later["ranks"]] == [1] * RANKS


@with_page
async def test_waits_that_are_not_measured_are_null(page: Page) -> None:
    train(page.served.store, "healthy", measure_waits=False)
    document = await page.get("runs/bert-17/history")
    steps = document["ranks"][0]["steps"]
    assert steps["wait_seconds"] is None
    assert steps["own_seconds"] == steps["step_seconds"]


WRONG = [
    ("runs/none", 404),
    ("runs/none/history", 404),
    ("runs/none/ranks", 404),
    ("runs/bert-17/ranks/99/steps", 404),
    ("runs/bert-17/ranks/x/steps", 404),
    ("runs/bert-17/ranks?last=0", 400),
    ("runs/bert-17/ranks?last=x", 400),
    ("runs/bert-17/history?seconds=601", 400),
    ("runs/bert-17/history?since=nan", 400),
    ("runs/bert-17/history?ranks=5-1000000", 400),
    ("runs/bert-17/history?ranks=-1", 400),
    ("runs/bert-17/history?phases=yes", 400),
    ("runs?fleet=1", 400),
    ("captures/20260101-000000-abcdef", 404),
    ("captures/..%2F..%2Fetc", 404),
    ("captures?limit=0", 400),
    ("events2", 404),
    ("../../etc/passwd", 404),
]


@with_page
async def test_wrong_requests_have_an_error_with_a_problem(page: Page) -> None:
    train(page.served.store, "healthy")
    for path, code in WRONG:
        answer = await page.ask(f"/api/v1/{path}")
        assert answer.status_code == code, (path, answer.text)
        if answer.headers["content-type"] == "application/json":
            assert answer.json()["error"]["problem"]


@with_page
async def test_a_run_is_found_by_a_unique_prefix_and_with_slashes(page: Page) -> None:
    for run in ("exp/1", "exp/2", "bert"):
        join(page, run)
    assert (await page.get("runs/be"))["run"]["run"] == "bert"
    assert (await page.get("runs/exp%2F1"))["run"]["run"] == "exp/1"
    answer = await page.ask("/api/v1/runs/exp")
    assert answer.status_code == 404
    assert "2 runs begin with exp" in answer.json()["error"]["problem"]


@with_page
async def test_a_stranger_sees_no_script_path_and_no_stack(page: Page) -> None:
    join(page)
    hidden = Verdict(Cause.HANG, "a", "node-a", 0, "", "stands in secret.py:12", 0.0, "", stalled_seconds=9)
    page.served.verdicts["a"] = hidden
    for path in ("runs", "runs/a", "diagnose", "runs/a/diagnose"):
        for headers in ({}, {"authorization": "Basic YTpi"}):
            text = str(await page.get(path, **headers))
            assert "train.py" not in text
            assert "secret.py" not in text
        owner = str(await page.get(path, **{"x_torchperfd_token": TOKEN}))
        assert "secret.py" in owner
    assert "train.py" in str(await page.get("runs", authorization=f"Bearer {TOKEN}"))


@with_page
async def test_a_stranger_sees_that_captures_exist_and_no_more(page: Page) -> None:
    capture_id = "20260101-000000-abcdef"
    add(page.served.catalog, capture_id, reason="at /home/ada/secret.py")
    [row] = (await page.get("captures"))["captures"]
    assert row["capture_id"] == capture_id
    assert {"reason", "directory", "options", "pinned"} & row.keys() == set()
    assert {"file", "sha256", "reason", "pid", "uid"} & row["ranks"][0].keys() == set()
    assert (await page.get("captures"))["directory"] is None
    assert "secret" not in str(await page.get(f"captures/{capture_id}"))
    whole = await page.get("captures", **{"x_torchperfd_token": TOKEN})
    assert whole["captures"][0]["ranks"][0]["file"] == "rank0.json"
    assert "secret" in str(await page.get(f"captures/{capture_id}", **{"x_torchperfd_token": TOKEN}))
    for rest in ("analysis", "report", f"comparison/{capture_id}", "files/rank0.json"):
        answer = await page.ask(f"/api/v1/captures/{capture_id}/{rest}")
        assert answer.status_code == 401


@with_page
async def test_capture_id_is_completed_from_a_unique_prefix(page: Page) -> None:
    for capture_id in ("20260101-000000-abcdef", "20260102-000000-abcdef"):
        add(page.served.catalog, capture_id)
    assert (await page.get("captures/20260102"))["capture_id"] == "20260102-000000-abcdef"
    for given, words in (("202601", "2 captures begin with"), ("20270101-000000-abcdef", "no capture")):
        answer = await page.ask(f"/api/v1/captures/{given}")
        assert answer.status_code == 404
        assert words in answer.text


@with_page
async def test_a_wrong_token_is_refused_for_reading_and_acting(page: Page) -> None:
    join(page)
    for token in ("", "wrong", TOKEN[:-1], f"{TOKEN}x", "é"):
        for name, value in (("x-torchperfd-token", token), ("authorization", f"Bearer {token}")):
            sent = {name: value.encode()}
            assert (await page.ask("/api/v1/runs", headers=sent)).status_code == 401
            answer = await page.ask("/api/v1/runs/a/capture", "POST", headers=sent)
            assert answer.status_code == 401


@with_page
async def test_acting_needs_the_token_and_the_own_page(page: Page) -> None:
    join(page)
    acts = (
        "runs/a/capture",
        "runs/a/stacks",
        "captures/x/cancel",
        "captures/x/report",
        "captures/x/comparison/y",
        "captures/x/link",
    )
    for path in acts:
        assert (await page.ask(f"/api/v1/{path}", "POST")).status_code == 401
        for foreign in ({"origin": "https://evil.example"}, {"sec-fetch-site": "same-site"}):
            assert (await page.post(path, **foreign)).status_code == 403
        assert (await page.post(path, host="evil.example")).status_code == 421


BODIES = (
    *(b"[]", b"{", b'{"steps": 0}', b'{"steps": 1e9}', b'{"unknown": 1}'),
    *(b'{"ranks": [-1]}', b'{"kind": 1}', b"\xff"),
)


@with_page
async def test_wrong_bodies_are_refused(page: Page) -> None:
    join(page)
    for body in BODIES:
        answer = await page.ask("/api/v1/runs/a/capture", "POST", content=body, headers=OWNER)
        assert answer.status_code == 400, answer.text
    typed = {**OWNER, "content-type": "text/plain"}
    answer = await page.ask("/api/v1/runs/a/stacks", "POST", content=b"{}", headers=typed)
    assert answer.status_code == 400


@with_page
async def test_acting_on_what_is_not_there_is_refused(page: Page) -> None:
    join(page)
    for path, code in (
        ("runs/none/capture", 404),
        ("runs/a/capture", 404),
        ("captures/20260101-000000-abcdef/cancel", 404),
        ("captures/20260101-000000-abcdef/report", 404),
        ("captures/20260101-000000-abcdef/comparison/20260101-000001-abcdef", 404),
    ):
        answer = await page.post(path)
        assert answer.status_code == code, answer.text
        assert answer.json()["error"]["problem"]


@with_page
async def test_files_are_sent_to_the_owner_and_through_links(page: Page) -> None:
    capture_id = "20260101-000000-abcdef"
    add(page.served.catalog, capture_id, {0: b"trace" * 1000})
    answer = await page.ask(f"/api/v1/captures/{capture_id}/files/rank0.json", headers=OWNER)
    assert answer.content == b"trace" * 1000
    assert "attachment" in answer.headers["content-disposition"]
    link = (await page.post(f"captures/{capture_id}/link", {"file": "rank0.json"})).json()["url"]
    assert (await page.ask(link)).content == b"trace" * 1000
    assert (await page.ask(f"{link}x")).status_code == 404
    for name in ("../../x", "rank9.json", "", ".hidden"):
        answer = await page.post(f"captures/{capture_id}/link", {"file": name})
        assert answer.status_code == 404


@with_page
async def test_long_answers_are_compressed(page: Page) -> None:
    train(page.served.store, "healthy")
    path = "/api/v1/runs/bert-17/history"
    zipped = await page.ask(path, headers={"accept-encoding": "gzip"})
    plain = await page.ask(path, headers={"accept-encoding": "identity"})
    assert zipped.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain.headers
    assert zipped.json()["ranks"] == plain.json()["ranks"]
    assert len(gzip.compress(plain.content)) < len(plain.content)


@with_page
async def test_run_that_ended_stays_listed_with_its_verdict(page: Page) -> None:
    record = join(page, "done")
    column = array("q", [NS] * 3)
    began = int(time.time())
    ends = array("q", [(began + step) * NS for step in range(3)])
    page.served.store.add_steps(record, StepColumns(ends, column, {}))
    page.served.verdicts["done"] = Verdict(Cause.INPUT_BOUND, "done", "", None, "data", "slow", 0.1, "")
    page.api.past.sample()
    record.state = State.FINISHED
    page.served.store.leave(record)
    page.api.past.sample()
    run = (await page.get("runs/done"))["run"]
    assert (run["state"], run["step_seconds"], run["steps_per_second"]) == ("finished", 1.0, None)
    page.served.store.forget(record)
    del page.served.verdicts["done"]
    page.api.past.sample()
    document = await page.get("runs")
    assert document["runs"] == []
    [row] = document["finished"]
    assert (row["run"], row["state"], row["verdict"]["cause"]) == ("done", "finished", "input-bound")
    assert row["ended_unix_seconds"] == pytest.approx(began + 2)
    ended = (await page.get("runs/done"))["run"]
    assert (ended["run"], ended["step_percentiles"]) == ("done", run["step_percentiles"])
    assert run["step_percentiles"]["slowest"] == {"rank": 0, "p50_seconds": 1.0, "p95_seconds": 1.0}


@with_page
async def test_run_without_ranks_is_finished_if_all_of_them_had(page: Page) -> None:
    first, second = join(page, rank=0, pid=1), join(page, rank=1, pid=2)
    first.state = State.FINISHED
    page.served.store.leave(first)
    assert (await page.get("runs/a"))["run"]["state"] == "training"
    page.served.store.leave(second)
    assert (await page.get("runs/a"))["run"]["state"] == "gone"
    second.state = State.FINISHED
    assert (await page.get("runs/a"))["run"]["state"] == "finished"


@with_page
async def test_web_configuration_guards_the_interface_beside_the_token(page: Page, tmp_path: Path) -> None:
    bcrypt = pytest.importorskip("bcrypt")
    file = tmp_path / "web.yml"
    file.write_text(f"basic_auth_users: {{ada: {bcrypt.hashpw(b'right', bcrypt.gensalt(4)).decode()}}}")
    join(page)
    guarded = build_app(MetricsPage([]), lambda: True, WebConfigFile(file), page.api.routes())
    page = replace(page, app=guarded)
    user = {"authorization": "Basic " + base64.b64encode(b"ada:right").decode()}
    for path in ("/", "/api/v1/runs", "/api/v1/events", "/assets/index.html", "/links/x"):
        assert (await page.ask(path)).status_code == 401
        # The token is no password.
        assert (await page.ask(path, headers=OWNER)).status_code == 401
        assert (await page.ask(path, headers={"authorization": f"Bearer {TOKEN}"})).status_code == 401
    stranger = await page.ask("/api/v1/runs", headers=user)
    assert (stranger.status_code, stranger.json()["view"]["access"]) == (200, "stranger")
    owner = await page.ask("/api/v1/runs", headers={**user, **OWNER})
    assert owner.json()["view"]["access"] == "owner"
    assert (await page.ask("/api/v1/runs/a/stacks", "POST", headers=user)).status_code == 401
