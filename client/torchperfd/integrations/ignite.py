"""Ignite: ``torchperfd.integrations.ignite.attach(trainer)``, and the same for evaluators.

The automatic hooks time an engine's loop without changes, as long as a DataLoader feeds it. What
is attached here besides: batches from anything else are drawn and counted, and what happens
when an epoch is complete belongs to no step.
"""

from typing import TYPE_CHECKING

from ignite.engine import Engine, Events

from torchperfd.events import codes
from torchperfd.hooks.batches import samples_in
from torchperfd.integrations import IntegrationSession, drawn_by_torch, suppress_errors

if TYPE_CHECKING:
    from torch import nn

    from torchperfd.client import Client


def attach(
    engine: Engine, model: "nn.Module | None" = None, *, job: str | None = None, run: str | None = None
) -> "EngineSession":
    """Follow an engine's runs; do so before other handlers are added, to leave their time out of steps.

    Args:
        engine: A trainer or an evaluator.
        model: The model whose forward to time; found by itself when left out.
        job: What people call this kind of run; the script's name by default.
        run: The run's name; the launcher's by default.
    """
    session = EngineSession(model, job=job, run=run)
    for event, handler in (
        (Events.STARTED, session.started),
        (Events.GET_BATCH_STARTED, session.draw_begins),
        (Events.GET_BATCH_COMPLETED, session.drawn),
        (Events.EPOCH_COMPLETED, session.epoch_completed),
        (Events.TERMINATE, session.completed),
        (Events.COMPLETED, session.completed),
    ):
        # Never EXCEPTION_RAISED: an engine with a handler for it does not raise.
        engine.add_event_handler(event, handler)
    return session


class EngineSession:
    """What follows one engine; made by :func:`attach`."""

    def __init__(self, model: "nn.Module | None", *, job: str | None, run: str | None) -> None:
        self.session = IntegrationSession(job, run)
        self._model = model
        self._drawing = False

    @property
    def client(self) -> "Client | None":
        """The client, None before the engine runs."""
        return self.session.client

    @suppress_errors
    def started(self, engine: Engine) -> None:
        """Attach; a step of the engine that runs this one has ended."""
        self.session.begin(self._model)
        self.session.between_loops()

    @suppress_errors
    def draw_begins(self, engine: Engine) -> None:
        """Draw, unless it is a DataLoader that does: the automatic hooks see those."""
        if self.session.reports and not drawn_by_torch(engine.state.dataloader):
            self._drawing = True
            self.session.mark(codes.OUTER_DRAW)

    @suppress_errors
    def drawn(self, engine: Engine) -> None:
        """The batch is here; its samples count once."""
        if self._drawing:
            self._drawing = False
            self.session.mark(codes.OUTER_DRAWN, samples_in(engine.state.batch))

    @suppress_errors
    def epoch_completed(self, engine: Engine) -> None:
        """The last step has ended."""
        self._drawing = False
        self.session.between_loops()

    @suppress_errors
    def completed(self, engine: Engine) -> None:
        """Flush, and detach if we attached."""
        self.session.end()
