"""Integrations: what a framework knows of its own loop and torch's hooks cannot see.

One module per framework; it imports the framework, and nothing else of ours does. The
automatic hooks stay on and do the timing; an integration adds what they miss, and takes
care that a failure of ours never reaches the framework.
"""

import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from torchperfd import attachment
from torchperfd.events import codes
from torchperfd.safety.interrupts import is_from_script
from torchperfd.safety.logs import Faults

if TYPE_CHECKING:
    from torch import nn

    from torchperfd.client import Client
    from torchperfd.parts import Parts

# A name from these holds for every rank, and outranks what a framework calls its run.
_NAMED_BY_LAUNCHER: Final = ("TORCHPERFD_RUN", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "POD_UID")


class IntegrationSession:
    """Attaches the client for a framework's loop, if the script has not, and writes its events.

    Args:
        job: What people call this kind of run.
    """

    def __init__(self, job: str | None = None, run: str | None = None) -> None:
        self._job = job
        self._run = run
        self._ours = False
        self._client: Client | None = None
        # None while there is nothing to report.
        self._parts: Parts | None = None
        self._faults = Faults()

    def __reduce__(self) -> tuple[Any, ...]:
        # Frameworks pickle their callbacks: into spawned ranks, into exported models.
        return IntegrationSession, (self._job, self._run)

    @property
    def client(self) -> "Client | None":
        """The client, None before the loop begins; its report outlives the loop."""
        return self._client

    @property
    def reports(self) -> bool:
        """Whether there is something to report: the loop is followed, and this is its thread."""
        return self._parts is not None and self._parts.instruments.buffer.here()

    def mark(self, event: int, argument: int = 0) -> None:
        """Write an event, where there is something to report."""
        if self._parts is not None:
            self._parts.instruments.buffer.mark(event, argument)

    def begin(
        self,
        model: "nn.Module | None" = None,
        *,
        job: str | None = None,
        run: str | None = None,
        **launched_as: str,
    ) -> None:
        """Attach.

        Args:
            model: The model whose forward to time; found by itself when left out.
            job: Name of this kind of run, unless the script or the environment has one.
            run: Name of the run, unless the script or the launcher has one.
            launched_as: What a launcher puts into the environment, ``RANK`` and the like, where the
                framework is its own launcher and does not.
        """
        self._ours = self._ours or not attachment.is_attached()
        if any(os.environ.get(name) for name in _NAMED_BY_LAUNCHER):
            run = None
        job = self._job or os.environ.get("TORCHPERFD_JOB") or job
        absent = {name: value for name, value in launched_as.items() if name not in os.environ}
        os.environ.update(absent)
        try:
            self._client = attachment.attach(model, job=job, run=self._run or run)
        finally:
            for name in absent:
                del os.environ[name]
        self._parts = self._client.parts
        self._faults = self._parts.instruments.faults

    def watch_model(self, model: "nn.Module") -> None:
        """Time the forward of one more model."""
        if self._parts is not None:
            self._parts.instruments.hooks.add_model(model)

    def between_loops(self) -> None:
        """End the step in progress: what comes now belongs to none, until the next draw."""
        self.mark(codes.BETWEEN)

    def end(self) -> None:
        """The framework's loop is over: detach if this session attached, else only finish the loop."""
        self.between_loops()
        parts, self._parts = self._parts, None
        client = self._client
        if client is None or parts is None or not client.attached:
            return
        if self._ours:
            self._ours = False
            client.detach()
        else:
            parts.flusher.refresh(send=True)

    def slot(self, phase: str) -> int:
        """Return the slot of a phase, ours or one of at most 16 others; past those, ``other``'s."""
        return self._parts.instruments.names.slot(phase) if self._parts is not None else 0

    def spent(self, place: str) -> bool:
        """Return whether ``place`` has failed too often to be tried again."""
        return self._faults.spent(place)

    def fault(self, place: str, error: BaseException) -> None:
        """Count a failure of ours; the step in progress is lost, as with a hook's."""
        self._faults.note(place, error)
        self.mark(codes.ABANDON)


def drawn_by_torch(loader: Any) -> bool:
    """Return whether the automatic hooks see the draws: all that feeds the loop is a DataLoader."""
    from torch.utils.data import DataLoader

    if isinstance(loader, Mapping):
        loader = list(loader.values())
    if isinstance(loader, list | tuple):
        return bool(loader) and all(isinstance(part, DataLoader) for part in loader)
    return isinstance(loader, DataLoader)


F = TypeVar("F", bound=Callable[..., None])


def suppress_errors(method: F) -> F:
    """Keep failures of a method from the framework: counted, logged once, switched off after ten.

    Its object has the :class:`IntegrationSession` as ``session``.
    """
    place = f"integration {method.__module__.rpartition('.')[2]} {method.__name__}"

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.session.spent(place):
            return
        try:
            method(self, *args, **kwargs)
        except BaseException as error:
            if is_from_script(error):
                self.session.mark(codes.ABANDON)
                raise
            self.session.fault(place, error)

    return cast(F, guarded)
