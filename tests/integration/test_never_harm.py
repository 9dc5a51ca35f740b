"""Training must come out bit-identical, whatever becomes of the daemon."""

import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
from tests.support.node import EXAMPLE, Node, eventually, new_node, side_by_side

pytestmark = pytest.mark.slow

EPOCHS = 8


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("never_harm") / "train.py"
    path.write_text(
        "import os, sys, time, torch\n"
        f"sys.path.insert(0, {str(EXAMPLE.parent)!r})\n"
        "from train_digits import accuracy, build_loaders, build_model, train_epoch\n"
        "epochs, pause, go_on = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]\n"
        "torch.manual_seed(0)\n"
        "train, test = build_loaders(32, 0)\n"
        "model = build_model()\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)\n"
        "for epoch in range(epochs):\n"
        "    time.sleep(pause if epoch else 0.0)\n"
        "    while epoch == epochs - 1 and not os.path.exists(go_on):\n"
        "        time.sleep(0.05)\n"
        "    print(train_epoch(model, train, optimizer).hex(), accuracy(model, test).hex(), flush=True)\n"
    )
    return path


def _plain(node: Node, script: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(script), str(EPOCHS), "0", str(script)],
        env=node.env,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def _run(
    node: Node, script: Path, meanwhile: Callable[[], None] = lambda: None, *, pause: float = 0.0
) -> list[str]:
    """Train under torchperfd.

    ``meanwhile`` runs after the first epoch was printed, and the last epoch begins only after it.
    """
    command = (sys.executable, "-m", "torchperfd", "run", "--no-daemon", "--quiet")
    go_on = node.directory / "go_on"
    with node.running(*command, str(script), str(EPOCHS), str(pause), str(go_on)) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        meanwhile()
        go_on.touch()
        rest, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    return (first + rest).splitlines()


def with_a_daemon(node: Node, script: Path) -> list[str]:
    node.start_daemon()
    reported = _run(node, script)
    assert node.metric("torchperfd_ingest_events_total") == EPOCHS * (45 + 12)
    return reported


def without_a_daemon(node: Node, script: Path) -> list[str]:
    return _run(node, script)


def a_daemon_killed_and_started_again(node: Node, script: Path) -> list[str]:
    node.start_daemon()

    def kill_and_restart() -> None:
        eventually(lambda: node.metric("torchperfd_clients") == 1, 20, node.log)
        node.stop_daemon(signal.SIGKILL)
        node.start_daemon()
        # The client must be back within 10 s; its totals survive, since they are cumulative.
        eventually(lambda: node.metric("torchperfd_clients") == 1, 10, node.log)

    reported = _run(node, script, kill_and_restart, pause=0.5)
    assert node.metric("torchperfd_train_steps_total{") == EPOCHS * 45
    return reported


def a_daemon_stopped_for_20_seconds(node: Node, script: Path) -> list[str]:
    daemon = node.start_daemon()

    def stop_for_20_seconds() -> None:
        eventually(lambda: node.metric("torchperfd_clients") == 1, 20, node.log)
        daemon.send_signal(signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            # Waits in vain, which is the point: nothing else shows that 20 s have passed.
            daemon.wait(20)
        daemon.send_signal(signal.SIGCONT)

    reported = _run(node, script, stop_for_20_seconds, pause=2.5)
    assert node.metric("torchperfd_train_steps_total{") == EPOCHS * 45
    return reported


def a_daemon_stopped_for_good(node: Node, script: Path) -> list[str]:
    daemon = node.start_daemon()

    def stop() -> None:
        eventually(lambda: node.metric("torchperfd_clients") == 1, 20, node.log)
        daemon.send_signal(signal.SIGSTOP)

    return _run(node, script, stop)


# The one that waits longest begins first.
UNDER_TORCHPERFD = (
    a_daemon_stopped_for_20_seconds,
    a_daemon_killed_and_started_again,
    with_a_daemon,
    without_a_daemon,
    a_daemon_stopped_for_good,
)
Outcomes = dict[str, Future[list[str]]]


@pytest.fixture(scope="module")
def outcomes(script: Path) -> Outcomes:
    """What the script printed in every scenario, on a node of its own; ``plain`` is plain Python."""

    def play(scenario: Callable[[Node, Path], list[str]]) -> list[str]:
        with new_node() as node:
            return scenario(node, script)

    scenarios = {each.__name__: partial(play, each) for each in UNDER_TORCHPERFD}
    return side_by_side({**scenarios, "plain": partial(play, _plain), "plain again": partial(play, _plain)})


def test_plain_python_repeats_itself(outcomes: Outcomes) -> None:
    """Without this the other comparisons would prove nothing."""
    assert len(outcomes["plain"].result()) == EPOCHS
    assert outcomes["plain again"].result() == outcomes["plain"].result()


@pytest.mark.parametrize("scenario", [each.__name__ for each in UNDER_TORCHPERFD])
def test_training_comes_out_as_under_plain_python(scenario: str, outcomes: Outcomes) -> None:
    assert outcomes[scenario].result() == outcomes["plain"].result()


def test_drops_are_counted_and_exported(node: Node, tmp_path: Path) -> None:
    """Steps that a client could not keep while no daemon listened show on the next one's page."""
    script = tmp_path / "fast.py"
    script.write_text(
        "import sys, time, torchperfd\n"
        "client = torchperfd.attach()\n"
        "for _ in range(60):\n"
        "    for _ in range(1000): client.step()\n"
        "    client.report()\n"  # drains the ring, so that only the outbox overflows
        "print('made', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, str(script)], env=node.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        node.start_daemon()
        series = 'torchperfd_ingest_dropped_events_total{where="outbox"}'
        eventually(lambda: (node.metric(series) or 0) > 0, 15, node.log)

        def reported() -> float:
            return (node.metric(series) or 0) + (node.metric("torchperfd_ingest_events_total") or 0)

        eventually(lambda: reported() == 60_000, 15, lambda: f"{reported():.0f} of 60000\n{node.log()}")
        assert node.metric("torchperfd_train_steps_total{") == 60_000
        process.communicate(input="")
