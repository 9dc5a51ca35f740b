"""Transformers: ``Trainer(callbacks=[torchperfd.integrations.transformers.TorchperfdCallback()])``.

The automatic hooks time the Trainer's loop. The callback names the run and the
model, separates the saving of checkpoints from the rest of a step, and detaches at the end.
"""

from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import TrainerCallback

from torchperfd.events import codes
from torchperfd.integrations import IntegrationSession, suppress_errors

if TYPE_CHECKING:
    from torchperfd.client import Client


class TorchperfdCallback(TrainerCallback):
    """Names the run after ``TrainingArguments.run_name``, and marks checkpoints.

    Args:
        job: What people call this kind of run; the model's class by default.
        run: The run's name; the launcher's, else ``run_name``, by default.
    """

    def __init__(self, *, job: str | None = None, run: str | None = None) -> None:
        self.session = IntegrationSession(job, run)
        self._saving = False

    @property
    def client(self) -> "Client | None":
        """The client, None before ``train()``."""
        return self.session.client

    @suppress_errors
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Attach."""
        # Older versions fill an unset run_name with the output directory.
        named = args.run_name if args.run_name != args.output_dir else None
        self._saving = False
        self.session.begin(model, job=type(model).__name__ if model is not None else None, run=named)

    @suppress_errors
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A save that was announced has not come."""
        self._saved()

    @suppress_errors
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Next come logging, evaluation and saving, as far as ``control`` requests them."""
        if not control.should_log and not control.should_evaluate:
            self._save_begins(control)

    @suppress_errors
    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Logging is done; evaluation or saving is next."""
        if not control.should_evaluate:
            self._save_begins(control)

    @suppress_errors
    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The evaluation is over, and with it its last step; saving is next."""
        self.session.between_loops()
        self._save_begins(control)

    @suppress_errors
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The checkpoint is written."""
        self._saved()

    @suppress_errors
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last step has ended: what an epoch ends with belongs to none."""
        self.session.between_loops()

    @suppress_errors
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Flush, and detach if we attached."""
        self.session.end()

    def _save_begins(self, control: Any) -> None:
        if control.should_save and not self._saving:
            self._saving = True
            self.session.mark(codes.SAVE)

    def _saved(self) -> None:
        if self._saving:
            self._saving = False
            self.session.mark(codes.SAVE_END)
