"""What every hook gets: the ring buffer, the patches to undo, and what other hooks offer it."""

import functools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from torchperfd.events import Draws, EventBuffer, Timed, codes
from torchperfd.hooks.patches import Patches, keep_out_of_graphs, when_imported
from torchperfd.model.process import Coordinate, ProcessSettings
from torchperfd.safety.interrupts import is_from_script
from torchperfd.safety.logs import Faults, log
from torchperfd.steps.epochs import Iterators
from torchperfd.steps.replay import Replay

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from torchperfd.hooks.checkpoints import BackgroundSaves
    from torchperfd.hooks.compiler import Compilations
    from torchperfd.hooks.line_times import ScriptCollectives
    from torchperfd.hooks.loader_use import LoaderSampler
    from torchperfd.hooks.worker_stacks import WorkerStacks

# threading.current_thread() would add a thread that Python did not start, and enumerate() locks.
_threads: Final[dict[int, threading.Thread]] = threading._active  # type: ignore[attr-defined]

P = ParamSpec("P")
T = TypeVar("T")


class HookUnavailableError(Exception):
    """This torch has no place for a hook; the message names the missing part."""


class Models:
    """The models that the loop trains; none where the hook that finds them is off.

    Attributes:
        optimizers: Optimizers whose models have been looked for, by id.
        stepped: Optimizers that have stepped, by id.
        alive: Weak references to the models that were found.
        trained: Those of them that such an optimizer updates; all of them before there is one.
    """

    def __init__(self) -> None:
        self.optimizers: dict[int, weakref.ref[Optimizer]] = {}
        self.stepped: dict[int, weakref.ref[Optimizer]] = {}
        self.alive: list[weakref.ref[nn.Module]] = []
        self.trained: list[weakref.ref[nn.Module]] = []

    def add(self, model: "nn.Module") -> None:
        """Time the forward of ``model``; a second call has no effect."""

    def see(self, model: "nn.Module") -> None:
        """Remember a model that zeroes its gradients."""

    def before_step(self, optimizer: "Optimizer") -> None:
        """Look for models when an optimizer steps for the first time."""

    def look_for_model(self, optimizer: "Optimizer") -> None:
        """Look for the model of an optimizer."""

    def is_on_its_own(self, optimizer: "Optimizer") -> bool:
        """Return whether an optimizer shares no parameters with another."""
        return False

    def is_known(self, model: "nn.Module") -> bool:
        """Return whether the model is one of those that were found or named."""
        return False

    def living(self) -> "list[nn.Module]":
        """Return the models that were found and still exist."""
        return [model for reference in self.alive if (model := reference()) is not None]


@dataclass
class HookLinks:
    """What the hooks of a client share: what they measure besides events, and what they offer one another.

    What a hook sets has a default, so that any of them may be off.

    Attributes:
        places: The rank's place in each dimension that its device meshes, pipelines or split layers show.
        time_forward: Times the forward of a model.
        before_draw: Called with the iterator ahead of a draw; each returns whether the next draw is to be
            announced as well.
        draws: Times draws; None where they are not timed.
        backward: The replacement of ``torch.autograd.backward``.
    """

    iterators: Iterators
    loader_sampler: "LoaderSampler"
    compilations: "Compilations"
    background_saves: "BackgroundSaves"
    worker_stacks: "WorkerStacks"
    settings: ProcessSettings
    script_collectives: "ScriptCollectives"
    models: Models = field(default_factory=Models)
    places: dict[str, Coordinate] = field(default_factory=dict)
    time_forward: "Callable[[nn.Module], None] | None" = None
    before_draw: list[Callable[[Any], bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Descriptors, which are none in an instance.
        self.draws: Draws | None = None
        self.backward: Timed | None = None


class HookContext:
    """Belongs to one hook of one client.

    Attributes:
        reason: Why the hook is off, in one line; empty while it is on.
        patches: What the hook has replaced.
        handles: What else it has registered; each has a ``remove()`` method.
    """

    __slots__ = ("buffer", "faults", "handles", "links", "name", "patches", "reason", "replay")

    def __init__(
        self, name: str, buffer: EventBuffer, replay: Replay, faults: Faults, links: HookLinks
    ) -> None:
        self.name = name
        self.buffer = buffer
        self.replay = replay
        self.faults = faults
        self.links = links
        self.reason = ""
        self.patches = Patches()
        self.handles: list[Any] = []

    @property
    def active(self) -> bool:
        """False after uninstall and in forked children."""
        return self.buffer.thread != 0

    def adopts(self) -> bool:
        """Follow the calling thread, where an optimizer steps, if the one so far does not train.

        The thread that attaches need not be the one that trains. The first that steps is followed
        as long as it lives; a thread that only draws or evaluates is not.
        """
        buffer = self.buffer
        if not buffer.thread or self.on_autograds_thread():
            return False
        if buffer.thread in _threads:
            self.replay.catch_up()
            loop = self.replay.loop
            if loop.has_stepped or not loop.recorder.idle():
                return False
        buffer.thread = get_ident()
        buffer.write(codes.ADOPT)
        return True

    def on_autograds_thread(self) -> bool:
        """Return whether Python has not started the calling thread: it runs a backward."""
        thread = _threads.get(get_ident())
        return thread is None or isinstance(thread, threading._DummyThread)

    def absorb(self, error: BaseException, *, costs_step: bool = True) -> bool:
        """Handle an error that was raised within this hook.

        Args:
            error: What was raised, caught on the thread that calls.
            costs_step: The events of the step in progress are incomplete now, so that it is lost.

        Returns:
            True for an error of ours, which is counted; the hook goes off at the limit. False for what the
            script raised meanwhile, as its signal handlers do: raise it again.
        """
        from_script = is_from_script(error)
        if self.buffer.thread and (costs_step or from_script):
            self.buffer.write(codes.ABANDON)
        if from_script:
            return False
        place = f"hook {self.name}"
        self.faults.note(place, error)
        if self.faults.spent(place):
            self.turn_off(f"it failed too often, at last with {describe(error)}")
        return True

    def guard(self, function: Callable[P, T], otherwise: T) -> Callable[P, T]:
        """Return ``function`` for another hook to call: an error costs no step, and gives ``otherwise``."""

        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
            if self.reason:
                return otherwise
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                if not self.absorb(error, costs_step=False):
                    raise
                if isinstance(error, AttributeError | HookUnavailableError):
                    self.turn_off(describe(error))  # what this torch lacks will not come
                return otherwise

        return keep_out_of_graphs(guarded)

    def when_imported(self, module: str, action: Callable[[], None]) -> None:
        """Call ``action`` once the script has imported a module, now or later.

        It is never imported for this. A part that the module lacks turns the hook off.
        """
        pending = when_imported(module, self.guard(action, None))
        if pending is not None:
            self.handles.append(SimpleNamespace(remove=pending.cancel))

    def turn_off(self, reason: str) -> None:
        """Remove the hook for the rest of the run, and log the reason."""
        if not self.reason:
            self.reason = reason
            log.warning("hook off: %s: %s; what it measures stays empty", self.name, reason)
        self.take_off()

    def take_off(self) -> None:
        """Put back every original that the hook has replaced."""
        while self.handles:
            self.handles.pop().remove()
        self.patches.undo()


def describe(error: BaseException) -> str:
    lines = str(error).splitlines()
    if isinstance(error, HookUnavailableError) and lines:
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def own_attribute(owner: Any, name: str) -> Any:
    """Return an attribute of a class or module of torch as it is stored there.

    Raises:
        HookUnavailableError: This torch has no such attribute.
    """
    try:
        return vars(owner)[name]
    except KeyError:
        place = getattr(owner, "__qualname__", None) or owner.__name__
        raise HookUnavailableError(f"this torch has no {place}.{name}") from None
