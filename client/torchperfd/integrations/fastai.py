"""fastai: ``Learner(..., cbs=torchperfd.integrations.fastai.TorchperfdCallback())``.

fastai's optimizers are none of torch's, so that the automatic hooks see no optimizer, hence
no step, and cannot find the model. The callback reports both.
"""

import functools
from typing import TYPE_CHECKING, Any

import torch
from fastai.callback.core import Callback

from torchperfd.events import codes
from torchperfd.integrations import IntegrationSession, suppress_errors

if TYPE_CHECKING:
    from torchperfd.client import Client


class TorchperfdCallback(Callback):
    """Names the model, and times the learner's optimizer from the beginning of a fit to its end.

    Args:
        job: What people call this kind of run; the script's name by default.
        run: The run's name; the launcher's by default.
    """

    # After all others at the beginning: none of them may replace the optimizer afterwards.
    order = 100

    def __init__(self, *, job: str | None = None, run: str | None = None) -> None:
        self.session = IntegrationSession(job, run)

    @property
    def client(self) -> "Client | None":
        """The client, None before ``fit``."""
        return self.session.client

    @suppress_errors
    def before_fit(self) -> None:
        """Attach, unless this is no training: the learning rate finder, or predictions."""
        learner = self.learn
        self.run = not hasattr(learner, "lr_finder") and not hasattr(self, "gather_preds")
        if not self.run:
            return
        self.session.begin(learner.model)
        optimizer = learner.opt
        if isinstance(getattr(optimizer, "opt", None), torch.optim.Optimizer):
            return  # one of torch's, wrapped: the automatic hooks see it
        self._time(optimizer, "step", codes.OPTIMIZER, codes.OPTIMIZER_END)
        self._time(optimizer, "zero_grad", codes.ZERO, codes.ZERO_END)

    @suppress_errors
    def after_train(self) -> None:
        """The last step has ended: what an epoch ends with belongs to none."""
        self.session.between_loops()

    @suppress_errors
    def after_validate(self) -> None:
        """The last validation step has ended."""
        self.session.between_loops()

    @suppress_errors
    def after_fit(self) -> None:
        """Put the optimizer back as it was, flush, and detach if we attached."""
        for name in ("step", "zero_grad"):
            if hasattr(vars(self.learn.opt).get(name), "__wrapped__"):
                delattr(self.learn.opt, name)
        self.session.end()

    def _time(self, optimizer: Any, name: str, begin: int, end: int) -> None:
        if name in vars(optimizer):
            return  # a fit that was interrupted has left it timed
        original, own = getattr(optimizer, name), id(optimizer)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.session.mark(begin, own)
            try:
                return original(*args, **kwargs)
            finally:
                self.session.mark(end, own)

        setattr(optimizer, name, timed)
