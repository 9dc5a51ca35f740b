"""The live page beside a real job of two ranks: what a person would do in the first minutes."""

import json
import shutil
from pathlib import Path

import pytest
from tests.browser import Browser
from tests.support.node import Node, eventually, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium"), pytest.mark.timeout(400)]

# Rank 1 works longer than rank 0 before each exchange; the job ends once a file is there. Each rank writes
# down whether it reports more often, because a page is open.
SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
import torchperfd

client = torchperfd.attach()
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
ended = torch.zeros(1)
for _ in client.wrap(iter(int, 1)):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    time.sleep(0.12 if rank == 1 else 0.02)
    ended = torch.tensor([float(os.path.exists(sys.argv[1]))])
    dist.all_reduce(ended)
    optimizer.step()
    with open(f"{sys.argv[2]}/{rank}", "w") as file:
        file.write("often" if client.parts.flusher.is_watched else "as usual")
    if ended:
        break
dist.destroy_process_group()
"""

MAIN = "document.getElementById('view').innerText"
BANNER = "document.getElementById('banner').innerText"
SCOPE = "document.getElementById('scope').innerText"
NOTE = "document.querySelector('#stream .note').textContent"
# A tab that another one hides for half a minute, which passes at once.
TURN = """
(() => {{
  const wait = window.setTimeout;
  window.setTimeout = (call, ms) => wait(call, ms === 30000 ? 0 : ms);
  Object.defineProperty(document, "hidden", {{ value: {hidden}, configurable: true }});
  document.dispatchEvent(new Event("visibilitychange"));
  window.setTimeout = wait;
}})()
"""
FIRST = f"Number(/Steps (\\d+)\\u2013/.exec({NOTE})?.[1] ?? NaN)"
STEPS = f"Number(/Steps \\d+\\u2013(\\d+)/.exec({NOTE})?.[1] ?? NaN)"


def test_job_is_watched_captured_and_read(node: Node, tmp_path: Path) -> None:
    script, end = tmp_path / "slow_rank.py", tmp_path / "end"
    script.write_text(SCRIPT)

    def reports() -> set[str]:
        return {file.read_text() for file in tmp_path.glob("[01]")} - {""}

    node.start_daemon()
    with (
        node.running(
            *torchrun(2), str(script), str(end), str(tmp_path), TORCHPERFD_RUN="two-ranks"
        ) as process,
        Browser(online=True) as browser,
    ):
        browser.look_like(1280)
        base = f"http://127.0.0.1:{node.metrics_port}"
        browser.visit(f"{base}/")
        browser.wait_for(f"{MAIN}.includes('two-ranks')", "the run on the overview")
        eventually(lambda: reports() == {"as usual"}, 60, node.log)
        opened = node.command("open", "--print-url", "--run", "two-ranks")
        assert opened.returncode == 0, opened.stderr
        browser.visit(opened.stdout.strip())
        browser.wait_for("document.querySelector('h1').textContent === 'two-ranks'", "the run's view")
        assert browser.run("location.href") == f"{base}/#/run/two-ranks"

        first = browser.wait_for(STEPS, "a step")
        browser.wait_for(f"{STEPS} > {first}", "a later step")
        eventually(lambda: reports() == {"often"}, 30, node.log)
        # All steps are shown although their totals come at every second report only.
        begun = browser.wait_for(f"{STEPS} > {first} + 40 && [{FIRST}, {STEPS}]", "forty more steps")
        assert begun[0] == max(0, begun[1] - 255)
        browser.run(TURN.format(hidden="true"))
        eventually(lambda: reports() == {"as usual"}, 30, node.log)
        browser.run(TURN.format(hidden="false"))
        eventually(lambda: reports() == {"often"}, 30, node.log)
        browser.wait_for(f"{SCOPE}.includes('2 of 2 ranks report')", "both ranks")
        browser.wait_for("document.querySelector('tr.slow th')?.textContent === '1'", "the slow rank")
        browser.wait_for(f"{MAIN}.includes('slow rank') && {MAIN}.includes('rank 1 on')", "the verdict")

        browser.run("document.querySelector('[data-key=stacks]').click()")
        browser.wait_for(
            "document.querySelector('.stacks pre')?.textContent.includes('slow_rank.py')", "stacks"
        )

        browser.run("document.querySelector('[data-key=capture]').click()")
        browser.wait_for("document.querySelector('.outcome a')", "the capture")
        browser.run("document.querySelector('.outcome a').click()")
        browser.wait_for(f"{MAIN}.includes('2 of 2 ended')", "the capture's end")
        eventually(lambda: reports() == {"as usual"}, 30, node.log)
        browser.save_downloads(tmp_path)
        browser.run("document.querySelector('[data-key=\"file 1\"]').click()")
        eventually(lambda: [*tmp_path.glob("*rank1.json*")], 60)
        # The report is made at idle priority, which a busy job leaves no room for.
        end.touch()
        assert process.wait(60) == 0
        browser.run("document.querySelector('[data-key=report]').click()")
        report = browser.wait_for("document.getElementById('report-link')?.href", "the report")
        assert report.startswith(f"{base}/links/")
        browser.visit(report)
        browser.wait_for("document.body.innerText.includes('rank 1')", "the slow rank in the report")
        assert browser.complaints == []

        browser.visit(f"{base}/#/run/two-ranks")
        browser.wait_for(f"{MAIN}.includes('two-ranks') && {BANNER}.includes('This run ended 20')", "its end")
        assert browser.run("document.querySelectorAll('.title-row button').length") == 0
        node.stop_daemon()
        browser.wait_for(f"{BANNER}.includes('does not answer')", "the banner")
        node.start_daemon()
        browser.wait_for(f"!{BANNER}.includes('does not answer')", "the connection")
        # The new daemon has the run from the one before.
        browser.wait_for(f"{MAIN}.includes('finished')", "the run")
        assert "slow rank" in browser.run(MAIN)
        assert [run["run"] for run in json.loads(node.get("/api/v1/runs")[1])["finished"]] == ["two-ranks"]
        node.stop_daemon()
        browser.wait_for(f"{BANNER}.includes('does not answer')", "the banner")
        shutil.rmtree(node.captures / ".page")
        node.start_daemon()
        browser.wait_for(f"!{BANNER}.includes('does not answer')", "the connection")
        # This one has never seen the run, and the page still has what was known of it.
        browser.wait_for(f"{MAIN}.includes('Below is what was last known of it')", "that the run is unknown")
        assert "slow rank" in browser.run(MAIN)
        assert browser.complaints == []
        hosts = {url.split("/")[2] for url in browser.requests if url.startswith("http")}
        assert hosts == {f"127.0.0.1:{node.metrics_port}"}
