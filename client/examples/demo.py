"""The tour that `make demo` gives: one real training run, seen from every side.

Trains client/examples/train_remote_digits.py, unedited, under `torchperfd run`, and while it
trains lists it, captures five steps, and scrapes its metrics; afterwards it analyses the
trace. Everything it shows comes from commands that you can type yourself.
"""

import json
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUTPUT = Path("demo-out")
RUN = "digits-demo"
TIMEOUT_S = 60


def main() -> int:
    OUTPUT.mkdir(exist_ok=True)
    report = OUTPUT / "report.json"
    title("Train on handwritten digits, read one by one. The script does not import torchperfd")
    training = start(
        *("run", "--run", RUN, "--report", str(report)),
        str(HERE / "train_remote_digits.py"),
        "--epochs",
        "12",
    )
    try:
        wait_for_steps(training)
        title("While it trains: list the runs and their current phases")
        show("ps")
        title("Profile the next five steps, without stopping it")
        directory = capture()
        title("What Prometheus would scrape right now (a few of the series)")
        show_metrics()
        title("The training ends: the verdict, and what to change")
        code = training.wait()
    finally:
        if training.poll() is None:
            training.terminate()
            training.wait()
    if code:
        print(f"the training failed with exit code {code}", file=sys.stderr)
        return code
    title("The five captured steps: which operators cost the most?")
    show("analyze", str(directory), "--limit", "8")
    title("That was all of it")
    document = json.loads(report.read_text())
    print(f"trace    {directory / 'rank0.json'}  (opens in https://ui.perfetto.dev)")
    print(f"account  {report}  (schema {document['schema']})")
    print("your own script:  torchperfd run train.py")
    return 0


def command(*arguments: str) -> list[str]:
    print("$ torchperfd " + shlex.join(arguments), flush=True)
    return [sys.executable, "-m", "torchperfd", *arguments]


def start(*arguments: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command(*arguments))


def show(*arguments: str) -> None:
    subprocess.run(command(*arguments), check=True)


def ask(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "torchperfd", *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout if done.returncode == 0 else ""


def wait_for_steps(training: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and training.poll() is None:
        answer = ask("ps", "--json")
        runs = json.loads(answer)["runs"] if answer else []
        if any(rank["steps"] > 100 for run in runs if run["run"] == RUN for rank in run["ranks"]):
            return
        time.sleep(0.2)
    raise SystemExit("the training made no steps; see its output above")


def capture() -> Path:
    done = subprocess.run(
        # The run may be capturing by itself at this moment.
        command("capture", "--run", RUN, "--steps", "5", "--queue"),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    print(done.stdout, end="")
    return Path(done.stdout.splitlines()[0]).parent


def show_metrics() -> None:
    url = json.loads(ask("ps", "--json"))["metrics_url"]
    print(f"$ curl {url}")
    with urllib.request.urlopen(url, timeout=10) as response:
        page = response.read().decode()
    wanted = ("train_steps_total", "train_phase_seconds_total", "train_samples_total", "node_cpu")
    for line in page.splitlines():
        if line.startswith(tuple(f"torchperfd_{name}" for name in wanted)):
            print(line)
    (OUTPUT / "metrics.txt").write_text(page)
    print(f"({len(page.splitlines())} lines in all, kept in {OUTPUT / 'metrics.txt'})")


def title(text: str) -> None:
    print(f"\n━━ {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
