"""Lightning: ``Trainer(callbacks=[torchperfd.integrations.lightning.Callback()])``.

Lightning calls ``training_step``, never the module itself, so that the automatic hooks see
no forward and no validation; it stops drawing where a loader's length ends; and it knows
what moves batches, what saves checkpoints and which callback takes how long. All of that it
reports to its profiler, once per action: ours turns the actions into phases. The callback names
the run and brings the profiler along, around whichever one the user has chosen.
"""

import os
import re
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from torchperfd.events import codes
from torchperfd.hooks.batches import samples_in
from torchperfd.integrations import IntegrationSession, drawn_by_torch, suppress_errors
from torchperfd.model.identity import read_launch

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from torchperfd.client import Client
else:
    # Both distributions may be there; a class of one is no callback of the other.
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        pl = sys.modules["pytorch_lightning"]
    else:
        try:
            pl = import_module("lightning.pytorch")
        except ImportError:
            pl = import_module("pytorch_lightning")

# A code and an argument, or None.
Event = tuple[int, int] | None
# What begins and ends with an action; None: nothing, or another part of us times it.
Action = tuple[Event, Event] | None

_HOOK: Final = re.compile(r"\[(?P<owner>\w+)\](?P<name>.*)\.(?P<hook>\w+)")
_DRAW: Final = re.compile(r"\[\w+\]\.(\w+?)(_dataloader)?_next")
# With these a loop is over, whatever comes first of them; the next begins with its first draw.
_EDGES: Final = re.compile(r"on_(train|validation|test|predict|sanity_check)(_epoch)?_(start|end)")
_FORWARDS: Final = frozenset(("training_step", "validation_step", "test_step", "predict_step"))
_WHOLE_LOOPS: Final = frozenset(("run_training_epoch", "run_training_batch"))


_UNHEARD_OF: Final[Action] = (None, None)


class Profiler(pl.profilers.Profiler):
    """Turns Lightning's actions into phases; an action of the user's own becomes a phase of its name."""

    def __init__(
        self,
        *,
        job: str | None = None,
        run: str | None = None,
        around: "pl.profilers.Profiler | None" = None,
    ) -> None:
        super().__init__()
        self.session = IntegrationSession(job, run)
        self.draws = False
        """Whether batches come from what the automatic hooks do not see."""
        self._manual = False
        self._around = around
        self._trainer: Any = None
        self._actions: dict[str, Action] = {}

    @property
    def client(self) -> "Client | None":
        """The client, None before ``fit``."""
        return self.session.client

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Attach; Lightning calls this as ``fit``, ``validate`` and so on begin."""
        super().setup(stage, local_rank, log_dir)
        self.attach(getattr(self, "_lightning_module", None))

    @suppress_errors
    def attach(self, module: "pl.LightningModule | None") -> None:
        """Attach the client, unless it is."""
        self._actions.clear()
        if module is None:
            self.session.begin()
            return
        # What Lightning hands a profiler is a weak proxy; the trainer has the module itself.
        self._trainer = trainer = module.trainer
        module = trainer.lightning_module
        self._manual = not module.automatic_optimization
        run = None
        if trainer.world_size > 1:
            # Lightning's own launcher numbers the ranks only locally; they meet at this address.
            meeting_point = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
            run = "-".join((read_launch(sys.argv, sys.orig_argv).stem, *meeting_point))
        self.session.begin(
            None if self._manual else module,
            job=type(module).__name__,
            run=run,
            RANK=str(trainer.global_rank),
            WORLD_SIZE=str(trainer.world_size),
        )
        if self._manual:
            for part in module.children():
                if next(part.parameters(), None) is not None:
                    self.session.watch_model(part)

    def start(self, action_name: str) -> None:
        """An action begins."""
        if self._actions.get(action_name, _UNHEARD_OF) is not None:
            self._report(action_name, 0)
        if self._around is not None:
            self._around.start(action_name)

    def stop(self, action_name: str) -> None:
        """An action has ended."""
        if self._around is not None:
            self._around.stop(action_name)
        if self._actions.get(action_name) is not None:
            self._report(action_name, 1)

    def teardown(self, stage: str | None) -> None:
        """Flush, and detach if we attached."""
        if hasattr(self, "session"):
            self._end()
        super().teardown(stage)

    @suppress_errors
    def _end(self) -> None:
        self._trainer = None
        self.session.end()

    @suppress_errors
    def _report(self, action_name: str, side: int) -> None:
        if not self.session.reports:
            return
        if action_name not in self._actions:
            self._actions[action_name] = None  # until it is understood without failing
            self._actions[action_name] = self._understand(action_name)
        action = self._actions[action_name]
        event = action[side] if action is not None else None
        if event is not None:
            self.session.mark(*event)

    def _understand(self, action_name: str) -> Action:
        draw = _DRAW.fullmatch(action_name)
        if draw is not None:
            if self._is_seen(draw[1]):
                return None
            # A DataLoader may yet be at work somewhere inside: its draw is the same call.
            self.draws = True
            return (codes.OUTER_DRAW, 0), (codes.OUTER_DRAWN, 0)
        match = _HOOK.fullmatch(action_name)
        if match is None:
            return None if action_name in _WHOLE_LOOPS else self._phase(_own_phase(action_name))
        owner, name, hook = match.group("owner", "name", "hook")
        if _EDGES.fullmatch(hook):
            return (codes.BETWEEN, 0), None
        if owner == "Strategy":
            if hook == "batch_to_device":
                return self._phase("h2d")
            training = hook == "training_step"
            if hook not in _FORWARDS or (training and self._manual):
                # With manual optimization all else lies inside: there the module's parts are the forward.
                return None
            # Its end names no loss: that lies inside, too.
            return (codes.FORWARD if training else codes.EVALUATE, 0), (codes.EXIT, 0)
        if hook == "lr_scheduler_step":
            return self._phase("lr_scheduler")
        if hook == "configure_gradient_clipping" and self._trainer.gradient_clip_val is not None:
            return self._phase("clip_gradients")
        if not self._is_overridden(owner, name, hook):
            return None
        if owner == "Callback":
            return self._phase(_own_phase(name.partition("{")[0]))
        return self._phase("module_hooks") if hook.startswith("on_") else None

    def _is_overridden(self, owner: str, name: str, hook: str) -> bool:
        """Return whether a hook is overridden: most hooks of most callbacks are Lightning's empty ones."""
        trainer = self._trainer
        base = getattr(pl, owner, None)
        whose = {
            "Callback": [callback for callback in trainer.callbacks if callback.state_key == name],
            "LightningModule": [trainer.lightning_module],
            "LightningDataModule": [trainer.datamodule],
        }.get(owner, [])
        return any(
            getattr(type(one), hook, None) is not getattr(base, hook, None)
            for one in whose
            if not isinstance(one, Callback)
        )

    def _phase(self, name: str) -> Action:
        return (codes.ENTER, self.session.slot(name)), (codes.EXIT, 0)

    def _is_seen(self, stage: str) -> bool:
        name = "train_dataloader" if stage == "train" else f"{stage}_dataloaders"
        return drawn_by_torch(getattr(self._trainer, name))


class Callback(pl.Callback):
    """Brings the profiler along, names the run and counts the samples of unusual loaders.

    Args:
        job: What people call this kind of run; the module's class by default.
        run: The run's name; the launcher's by default.
    """

    def __init__(self, *, job: str | None = None, run: str | None = None) -> None:
        self._profiler = Profiler(job=job, run=run)
        self._replaced: pl.profilers.Profiler | None = None

    @property
    def session(self) -> IntegrationSession:
        """The session that writes events to the client."""
        return self._profiler.session

    @property
    def client(self) -> "Client | None":
        """The client, None before ``fit``."""
        return self.session.client

    @suppress_errors
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Attach, and receive the actions that the trainer reports to its profiler."""
        if isinstance(trainer.profiler, Profiler):
            self._profiler = trainer.profiler
            return
        self._profiler.attach(pl_module)
        self._replaced = trainer.profiler
        if not isinstance(self._replaced, pl.profilers.PassThroughProfiler):
            self._profiler._around = self._replaced
        trainer.profiler = self._profiler

    @suppress_errors
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Count the samples of a batch that no DataLoader drew."""
        if self._profiler.draws:
            self.session.mark(codes.SAMPLES, samples_in(batch))

    @suppress_errors
    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Flush, detach if we attached, and give the trainer its profiler back."""
        if self._replaced is not None:
            trainer.profiler, self._replaced = self._replaced, None
        self.session.end()

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: Any) -> None:
        """As :meth:`teardown`, which Lightning does not call then."""
        self.teardown(trainer, pl_module, "")


def _own_phase(name: str) -> str:
    """Return the name of a phase for an action that we do not know."""
    if name == "save_checkpoint" or "Checkpoint" in name:
        return "checkpoint"
    return "".join(letter for letter in name if letter.isprintable())[:64] or "unnamed"
