"""The process of one trial: runs the script with changes, measures some of its steps, and ends.

Run by :func:`torchperfd.model.own_commands.script_command`, with the arguments
SPECIFICATION REQUESTS ANSWERS; the specification is JSON. The answer is written on the descriptor
``ANSWERS``. When ``REQUESTS`` ends, because the command is gone, the process ends with its group.
"""

import dataclasses
import json
import multiprocessing.util
import os
import random
import signal
import sys
import threading
import time
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any, Final

from torchperfd.attachment import attach
from torchperfd.hooks.patches import when_imported
from torchperfd.launch.script import Script
from torchperfd.steps.totals import KindTotals
from torchperfd_cli.bench.worker_process import explain, read_requests, send_answer
from torchperfd_cli.tune.trial import Change, Trial

if TYPE_CHECKING:
    from torchperfd.client import Client
    from torchperfd_cli.tune.torch_patches import TorchPatches

MIN_STEPS: Final = 3
_TOO_LATE: Final = 124
_POLL_S: Final = 0.05
_WARM_STEPS: Final = 3
_WARM_S: Final = 0.5
_MAX_CLOSE_S: Final = 5.0
_MAX_SETTLE_S: Final = 3.0
_WAITS: Final = 0.03
"""The loop waits for its loader if it does so in a larger share of a step."""


class TrialRun:
    """Measures a script that runs in this process.

    Args:
        specification: Script and ``changes``, as :mod:`torchperfd_cli.tune.trial_process` sends them.
    """

    def __init__(self, specification: dict[str, Any], answers: IO[str]) -> None:
        self._specification = specification
        self._out = answers
        self._changes = [Change.from_dict(each) for each in specification["changes"]]
        self._patches: TorchPatches | None = None
        self._client: Client | None = None
        self._began: KindTotals | None = None
        self.requests: SimpleQueue[dict[str, Any]] = SimpleQueue()
        """To measure so many ``steps`` and ``seconds`` at least."""
        self._ending = threading.Lock()

    def run(self) -> None:
        """Run the script; the process ends within."""
        random.seed(0)
        # Registered first, so that torch is changed before hooks time it.
        when_imported("torch", self._torch_is_imported)
        self._client = attach(job="tune")
        threading.Thread(target=self._watch, name="torchperfd-tune", daemon=True).start()
        target = self._specification["target"]
        script = Script(target, tuple(self._specification["arguments"]), self._specification["is_module"])
        problem = ""
        try:
            script.execute()
        except SystemExit as error:
            problem = f"the script exited with {error.code!r}" if error.code else ""
        except BaseException as error:  # noqa: BLE001 - the script's own, whatever it is
            problem = f"the script raised {explain(error)}"
        self._ending.acquire()  # never released: the process ends here
        self._end(self._script_has_ended(problem))

    def _torch_is_imported(self) -> None:
        from torchperfd_cli.tune.torch_patches import TorchPatches

        patches = TorchPatches(self._changes)
        patches.install()
        self._patches = patches

    def _watch(self) -> None:
        try:
            last = self._answer_requests()
        except Exception as error:  # noqa: BLE001 - of a device, when losses are read
            last = {"failed": f"the steps could not be measured: {explain(error)}"}
        self._ending.acquire()
        self._end(last)

    def _answer_requests(self) -> dict[str, Any]:
        """Answer until a deadline passes; return what is to be answered then."""
        deadline = time.monotonic() + self._specification["timeout"]
        first_step: float | None = None
        while True:
            time.sleep(_POLL_S)
            steps, now = self._train_totals().steps, time.monotonic()
            if first_step is None and steps:
                first_step = now
            if steps >= self._warm_steps() and first_step is not None and now - first_step >= _WARM_S:
                break
            if now > deadline:
                return self._too_late(steps)
        self._hold()
        send_answer(self._out, {"ready": True})
        while True:
            request = self.requests.get()
            if not self._measure(request, time.monotonic() + self._specification["timeout"]):
                return self._too_late(0)

    def _measure(self, request: dict[str, Any], deadline: float) -> bool:
        assert self._patches is not None
        self._began = None
        before = self._train_totals().steps
        self._patches.gate.open()
        while True:
            time.sleep(_POLL_S)
            train, now = self._train_totals(), time.monotonic()
            # The step that was held, and batches that workers have made meanwhile, are not measured.
            if self._began is None:
                if train.steps > before + self._batches_ahead():
                    self._began = train.copy()
            else:
                done = train.minus(self._began)
                is_enough = done.steps >= request["steps"] and done.ns >= request["seconds"] * 1e9
                if is_enough or (now > deadline and done.steps >= MIN_STEPS):
                    trial = self._trial(done)
                    self._hold(trial)
                    send_answer(self._out, trial)
                    return True
            if now > deadline:
                return False

    def _hold(self, trial: dict[str, Any] | None = None) -> None:
        """Hold training, until its workers have nothing to do either."""
        assert self._patches is not None
        self._patches.gate.close(_MAX_CLOSE_S)
        if trial is not None and trial["phases"].get("data", 0.0) > _WAITS * trial["step_seconds"]:
            time.sleep(min(_MAX_SETTLE_S, self._batches_ahead() * trial["step_seconds"]))

    def _batches_ahead(self) -> int:
        facts = self._patches.facts() if self._patches is not None else None
        ahead = max((each.workers * each.prefetch for each in facts.loaders), default=0) if facts else 0
        for change in self._changes:
            values = dict(change.values)
            ahead = max(ahead, values.get("num_workers", 0) * values.get("prefetch_factor", 2))
        return ahead

    def _warm_steps(self) -> int:
        return _WARM_STEPS + self._batches_ahead()

    def _train_totals(self) -> KindTotals:
        assert self._client is not None
        return self._client.report().totals.train

    def _too_late(self, steps: int) -> dict[str, Any]:
        seconds = self._specification["timeout"]
        made = f"{steps} training steps within {seconds:g} s, too few to measure{self._hint(steps)}"
        return {"failed": made, "exit_code": _TOO_LATE}

    def _script_has_ended(self, problem: str) -> dict[str, Any]:
        assert self._client is not None
        totals = self._client.report().totals
        done = totals.train.minus(self._began) if self._began is not None else totals.steady()
        if not problem and done.steps >= MIN_STEPS:
            return {**self._trial(done), "has_ended": True}
        steps = totals.train.steps
        made = f"the script ended after {steps} training steps, too few to measure{self._hint(steps)}"
        return {"failed": problem or made}

    def _hint(self, steps: int) -> str:
        advice = "" if steps or self._client is None else self._client.advice
        return f": {advice}" if advice else ""

    def _trial(self, done: KindTotals) -> dict[str, Any]:
        assert self._client is not None
        assert self._patches is not None
        report = self._client.report()
        names = report.names
        phases = {
            names.name(slot): done.phases[slot].ns / done.steps / 1e9
            for slot in range(len(names))
            if done.phases[slot].ns
        }
        trial = Trial(
            step_seconds=done.mean_seconds,
            steps=done.steps,
            phases=phases,
            losses=self._patches.loss_values(),
            batches=self._patches.batch_sums(),
            facts=self._patches.facts(),
            loader=report.totals.loader,
        )
        return dataclasses.asdict(trial)

    def _end(self, answer: dict[str, Any]) -> None:
        send_answer(self._out, answer)
        # Whatever the script would do now, and its workers with it.
        os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run one trial."""
    specification = json.loads(sys.argv[1])
    requests, answers = int(sys.argv[2]), int(sys.argv[3])
    os.set_inheritable(requests, False)
    os.set_inheritable(answers, False)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    # A run of a few seconds is not one that the node's daemon should know.
    os.environ["TORCHPERFD_SOCKET"] = os.devnull
    multiprocessing.util.get_temp_dir = lambda: specification["folder"]
    with os.fdopen(answers, "w") as out:
        run = TrialRun(specification, out)
        arguments = os.fdopen(requests), run.requests
        threading.Thread(target=read_requests, args=arguments, daemon=True).start()
        run.run()
