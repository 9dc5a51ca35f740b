"""A clock that moves only by command, and a loop that is played by hand against it."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

import pytest
from _pytest.mark.structures import ParameterSet

from torchperfd.steps.loop import Loop
from torchperfd.steps.loop_state import UNKNOWN
from torchperfd.steps.phases import TRAIN, VALIDATE, PhaseNames, StepBatch
from torchperfd.steps.recorder import Recorder
from torchperfd.v1.contract import MAX_USER_PHASES

WALL_AHEAD = 1_700_000_000_000_000_000
"""How far the scripted wall clock is ahead of the monotonic one."""

NAMES = PhaseNames()

_CALL: Final = re.compile(
    r"(?P<call>[a-zA-Z.][<>]?)(?P<ns>[\de]*)(\*(?P<samples>\d+))?([@#](?P<number>\d+))?(?P<how>(![geo?])*)"
)
_LETTERS: Final = {
    "data": "d",
    "forward": "f",
    "loss": "l",
    "backward": "b",
    "optimizer": "o",
    "zero_grad": "z",
    "other": ".",
}
"""Phases that :func:`steps_as_text` writes as one letter."""


def all_names() -> PhaseNames:
    """Return names of which every slot is taken."""
    names = PhaseNames()
    for number in range(MAX_USER_PHASES):
        names.slot(f"mine {number} ✓")
    return names


class Clock:
    """Nanoseconds; the recorder's and the loop's clock."""

    def __init__(self, now: int = 1000) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now

    def advance(self, ns: int) -> None:
        """Let time pass."""
        self.now += ns


@dataclass(frozen=True)
class Step:
    """A drained step, readable; ``phases`` maps a name to (calls, exclusive nanoseconds)."""

    kind: str
    index: int
    duration: int
    phases: dict[str, tuple[int, int]]
    samples: int = 0
    start: int = field(default=0, compare=False)


def unpack(drained: Iterable[StepBatch], names: PhaseNames = NAMES) -> list[Step]:
    """Return drained steps one by one, without the phases that did not occur."""
    return [
        Step(
            kind={TRAIN: "train", VALIDATE: "validate"}[batch.kind[number]],
            index=batch.index[number],
            duration=batch.duration[number],
            phases={
                names.name(slot): (columns.calls[number], columns.ns[number])
                for slot, columns in batch.phases.items()
                if columns.calls[number] or columns.ns[number]
            },
            samples=batch.samples[number],
            start=batch.start[number] - WALL_AHEAD,
        )
        for batch in drained
        for number in range(batch.count)
    ]


def steps_as_text(steps: list[Step]) -> list[str]:
    """Return a line for each run of equal steps.

    In ``2x train 227 s8: d4x4 f40``, each of two training steps takes 227 ns, has 8 samples, draws 4 times in
    4 ns and is 40 ns in one forward. A step that does not begin where the one before has ended has a ``|``.
    """
    lines = []
    for number, step in enumerate(steps):
        assert sum(ns for _, ns in step.phases.values()) == step.duration, step
        assert step.index == sum(each.kind == step.kind for each in steps[:number]), step
        before = steps[number - 1]
        gap = "| " if number and step.start != before.start + before.duration else ""
        phases = " ".join(
            f"{_LETTERS.get(name, name + ' ')}{'' if calls == 1 else f'{calls}x'}{ns}"
            for name, (calls, ns) in sorted(step.phases.items(), key=_order)
        )
        samples = f" s{step.samples}" if step.samples else ""
        lines.append(f"{gap}{step.kind} {step.duration}{samples}: {phases}")
    runs = [(line, len(list(run))) for line, run in groupby(lines)]
    return [line if times == 1 else f"{times}x {line}" for line, times in runs]


def _order(phase: tuple[str, tuple[int, int]]) -> int:
    return [*_LETTERS].index(phase[0]) if phase[0] in _LETTERS else len(_LETTERS)


def scripted_cases(text: str) -> list[ParameterSet]:
    """Return the parameters ``script`` and ``outcome`` of each case of a text.

    A case is its name, its script and, after a ``=``, its outcome, divided by ``;``. An empty line ends it.
    """
    cases = []
    for block in re.split(r"\n\s*\n", text.strip()):
        name, *lines = block.strip().splitlines()
        if not name.startswith("#"):
            script, outcome = " ".join(" ".join(lines).split()).split(" = ")
            cases.append(pytest.param(script, outcome.split("; "), id=name))
    return cases


def _calls(script: str) -> Iterator[re.Match[str]]:
    """Return the calls of a script one by one, those in ``3(…)`` as many times as it says."""
    while "(" in script:
        script = re.sub(r"(\d+)\(([^()]*)\)", lambda found: f"{found[2]} " * int(found[1]), script)
    for word in script.split():
        found = _CALL.fullmatch(word)
        assert found, word
        yield found


class ScriptedLoop:
    """Makes the hook calls that a training script causes, each of which takes a given time."""

    def __init__(self) -> None:
        self._depths: list[int] = []
        self.clock = Clock()
        self.recorder = Recorder(self.clock, capacity=64)
        self.recorder.wall_offset = WALL_AHEAD
        self.loop = Loop(self.recorder, self.clock, self.clock)

    def draw(self, ns: int = 1, samples: int = 0, iterator: int = 8, **how: bool) -> None:
        self.loop.draw_begin(iterator, **how)
        self.clock.advance(ns)
        self.loop.draw_end(samples)

    def exhausted(self, ns: int = 1, iterator: int = 8, **how: bool) -> None:
        """A draw that finds its loader at the end."""
        self.loop.draw_begin(iterator, **how)
        self.clock.advance(ns)
        self.loop.draw_stop(iterator)

    def forward(self, ns: int = 1) -> None:
        self.loop.forward_begin(gradients=True)
        self.clock.advance(ns)
        self.loop.forward_end()

    def backward(self, ns: int = 1) -> None:
        depth = self.recorder.depth
        self.loop.backward_begin()
        self.clock.advance(ns)
        self.loop.backward_end(depth)

    def optimizer_step(self, ns: int = 1) -> None:
        self.loop.optimizer_begin()
        self.clock.advance(ns)
        self.loop.optimizer_end()

    def zero_grad(self, ns: int = 1) -> None:
        self.loop.zero_begin()
        self.clock.advance(ns)
        self.loop.exit()

    def other(self, ns: int) -> None:
        """The script does something that no hook sees."""
        self.clock.advance(ns)

    def train_on_batch(self) -> None:
        """What a plain script does with a batch: 100 ns of it forward, 200 backward, and so on."""
        self.forward(100)
        self.other(20)  # the loss
        self.backward(200)
        self.optimizer_step(50)
        self.zero_grad(5)
        self.other(7)

    def play(self, script: str) -> None:
        """Make the calls of a script, such as ``3(d11*4@16 f100 .20 b200 o50#1) x F``.

        A number of nanoseconds follows a call; without one it takes 1 ns. ``<`` begins a call and ``>`` ends
        it, for calls within it::

            d1*4@16   draw 4 samples from iterator 16 (8 without one); !g without gradients,
                      !e in evaluation mode
            x1@16     a draw that finds iterator 16 exhausted
            c1*4 c>   a draw by the closure of an optimizer, and one that finds the end
            f100      forward; e40 without gradients, in evaluation mode; a7 the same in training
                      mode; m40 in evaluation mode, a backward may follow
            b200 z5   backward, zero_grad; .20 the script does something that no hook sees
            o50#1     a step of optimizer 1; !o called off; w#1 one on a thread of autograd;
                      n#1 optimizer 1 is made
            B         train_on_batch
            g@16 p    iterator 16 is gone (!? perhaps), a loop over a loader begins
            s*4       client.step() with 4 samples; u< u> a phase of the user
            E M A F   evaluation mode, training mode, a hook has failed, the loop is over
        """
        for found in _calls(script):
            ns = int(float(found["ns"])) if found["ns"] else 1
            samples, how = int(found["samples"] or 0), found["how"]
            number = int(found["number"]) if found["number"] else None
            self._play(found["call"], ns, samples, number, how)

    def _play(self, call: str, ns: int, samples: int, number: int | None, how: str) -> None:
        loop = self.loop
        iterator, optimizer = 8 if number is None else number, number or UNKNOWN
        mode = {"gradients": "!g" not in how, "evaluation_mode": "!e" in how}
        match call:
            case "d":
                self.draw(ns, samples, iterator, **mode)
            case "d<":
                loop.draw_begin(iterator, **mode)
            case "d>":
                loop.draw_end(samples)
            case "x":
                self.exhausted(ns, iterator, **mode)
            case "x>":
                loop.draw_stop(iterator)
            case "c":
                loop.closure_draw_begin()
                self.clock.advance(ns)
                loop.draw_end(samples)
            case "c>":
                loop.closure_draw_begin()
                loop.draw_stop()
            case "f":
                self.forward(ns)
            case "e" | "a" | "m":
                loop.forward_begin(False, evaluation_mode=call != "a", backward_may_follow=call == "m")
                self.clock.advance(ns)
                loop.forward_end()
            case "b":
                self.backward(ns)
            case "b<":
                self._depths.append(self.recorder.depth)
                loop.backward_begin()
            case "b>":
                loop.backward_end(self._depths.pop())
            case "z":
                self.zero_grad(ns)
            case ".":
                self.clock.advance(ns)
            case "o":
                loop.optimizer_begin(optimizer)
                self.clock.advance(ns)
                loop.optimizer_end(optimizer, called_off="!o" in how)
            case "o<":
                loop.optimizer_begin(optimizer)
            case "o>":
                loop.optimizer_end(optimizer)
            case "w":
                loop.stepped_elsewhere(optimizer)
            case "n":
                loop.optimizer_made(optimizer)
            case "g":
                loop.left(iterator, for_sure="!?" not in how)
            case "u<":
                loop.enter(NAMES.slot("epoch"))
            case "s":
                loop.client_step(samples)
            case _:
                plain = {
                    "B": self.train_on_batch,
                    "p": loop.pass_begins,
                    "u>": loop.exit,
                    "E": loop.evaluation_mode,
                    "M": loop.training_mode,
                    "A": loop.abandon,
                    "F": loop.finish,
                }
                plain[call]()

    def outcome(self) -> list[str]:
        """Return the steps since the last look, and what the loop has counted."""
        loop, recorder = self.loop, self.recorder
        counted = {
            "micro": loop.micro_batches,
            "skipped": loop.skipped,
            "open": int(recorder.is_open),
            "depth": recorder.depth,
        }
        counts = " ".join(f"{name} {number}" for name, number in counted.items() if number)
        return [*steps_as_text(self.steps()), *([counts] if counts else [])] or ["no step"]

    def steps(self) -> list[Step]:
        """Take what was recorded since the last look."""
        return unpack(self.recorder.drain())
