"""The hooks that write events, in Python; ``native/`` has the same in C."""

import weakref
from collections.abc import Callable
from threading import get_ident
from types import MethodType
from typing import Any

from torchperfd.events.codes import (
    EVALUATE_IN_TRAINING_MODE,
    EVALUATE_WITH_GRADIENTS,
    EventBuffer,
    call_back,
    evaluation_flags,
)


class _Function:
    """Replaces a function; bound and pickled like the original."""

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]:
        call: Callable[..., Any] = self  # type: ignore[assignment]
        return call if instance is None else MethodType(call, instance)

    def __reduce__(self) -> str:
        # By name. What wraps a function takes over its names.
        return str(self.__qualname__)  # type: ignore[attr-defined]


class Timed(_Function):
    """A function or method between two events.

    Attributes:
        original: What is called in between.
    """

    def __init__(
        self, buffer: EventBuffer, original: Callable[..., Any], begin: int, end: int, failed: int = -1
    ) -> None:
        self._buffer = buffer
        self.original = original
        self._begin = begin
        self._end = end
        self._failed = end if failed < 0 else failed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        buffer = self._buffer
        if get_ident() != buffer.thread or buffer.muted >> self._begin & 1:
            return self.original(*args, **kwargs)
        has_ended = False
        try:
            buffer.write(self._begin)
            try:
                result = self.original(*args, **kwargs)
            except BaseException:
                has_ended = buffer.mark(self._failed)
                raise
            has_ended = buffer.mark(self._end)
            return result
        except BaseException:
            if not has_ended:
                buffer.forget_step()
            raise


class Draws(_Function):
    """The ``__next__`` of an iterator over batches, between two events.

    Args:
        begin: Code of the event before.
        end: Code of the event after, whose argument is the number of samples.
        failed: Code of the event after where there is no batch.
        plain: The class of iterators without workers: what they draw needs no announcement.
        tensor: The class of plain tensors, of which C has a shorter way to the length.
        ahead: Called instead of writing the first event, where that may be another one; returns
            whether the draw is to be timed.
        samples_in: Counts the samples of unusual batches.
        grad_enabled: Returns whether gradients are computed.
        models: Weak references to the models that are trained; may change.

    Attributes:
        watching: Whether every draw goes through ``ahead``.
        known: Samples of the batch that is being drawn, 0 if unknown, ``ONE_OR_BATCH`` where it is one sample
            or one whole batch of a data set; set while the original is at work.
    """

    def __init__(
        self,
        buffer: EventBuffer,
        original: Callable[[Any], Any],
        begin: int,
        end: int,
        failed: int,
        plain: type,
        tensor: type,
        ahead: Callable[[Any], bool],
        samples_in: Callable[[Any], int],
        grad_enabled: Callable[[], bool],
        models: "list[weakref.ref[Any]]",
    ) -> None:
        self.watching = True
        self.known = 0
        self._buffer = buffer
        self._original = original
        self._begin = begin
        self._end = end
        self._failed = failed
        self._plain = plain
        self._ahead = ahead
        self._samples_in = samples_in
        self._grad_enabled = grad_enabled
        self._models = models

    def __call__(self, iterator: Any) -> Any:
        if get_ident() != self._buffer.thread:
            return self._original(iterator)
        # A data set may draw from another iterator meanwhile.
        around, self.known = self.known, 0
        try:
            return self._draw(iterator)
        finally:
            self.known = around

    def _draw(self, iterator: Any) -> Any:
        buffer = self._buffer
        has_ended = False
        try:
            if self.watching or buffer.steps_open or type(iterator) is not self._plain:
                if call_back(self._ahead, iterator) is not True:
                    has_ended = True
                    return self._original(iterator)
            else:
                flags = evaluation_flags(self._grad_enabled, self._models)
                buffer.write(self._begin, id(iterator) | flags)
            try:
                batch = self._original(iterator)
            except BaseException:
                buffer.write(self._failed, id(iterator))
                has_ended = True
                raise
            samples = self.known if self.known > 0 else call_back(self._samples_in, batch)
            buffer.write(self._end, samples if isinstance(samples, int) else 0)
            return batch
        except BaseException:
            if not has_ended:
                buffer.forget_step()
            raise


class IndexLists(_Function):
    """The next indices of an iterator over batches: their number is that of the samples.

    Args:
        draws: Times the draw that asked for them.
        plain: The class of iterators without workers.
        kind: Name of the attribute of an iterator that holds the kind of its data set.
        map_style: The kind of those that have indices.
        note: Called with an iterator and what is no list of several indices.
        otherwise: Called in place of the original for other iterators, and on other threads.
    """

    def __init__(
        self,
        buffer: EventBuffer,
        original: Callable[[Any], Any],
        draws: Draws,
        plain: type,
        kind: str,
        map_style: object,
        note: Callable[[Any, Any], None],
        otherwise: Callable[[Any], Any],
    ) -> None:
        self._buffer = buffer
        self.original = original
        self._draws = draws
        self._plain = plain
        self._kind = kind
        self._map_style = map_style
        self._note = note
        self._otherwise = otherwise

    def __call__(self, iterator: Any) -> Any:
        if type(iterator) is not self._plain or get_ident() != self._buffer.thread:
            return self._otherwise(iterator)
        indices = self.original(iterator)
        kind = getattr(iterator, self._kind, None) if type(indices) is list and len(indices) > 1 else None
        if kind is None:
            call_back(self._note, iterator, indices)
        elif kind is self._map_style:
            self._draws.known = len(indices)
        return indices


class Forward:
    """The call of one module, between two events.

    Args:
        module: The module, held by a weak reference.
        compiled: What is called instead of the module's own method, if anything.
        method: Name of that method.
        grad_enabled: Returns whether gradients are computed.
        train: Code of the event before a call for training.
        evaluate: Code of the event before any other call.
        end: Code of the event after.
    """

    def __init__(
        self,
        buffer: EventBuffer,
        module: Any,
        compiled: Callable[..., Any] | None,
        method: str,
        grad_enabled: Callable[[], bool],
        train: int,
        evaluate: int,
        end: int,
    ) -> None:
        self._buffer = buffer
        self._module = weakref.ref(module)
        self._compiled = compiled
        self._method = method
        self._grad_enabled = grad_enabled
        self._train = train
        self._evaluate = evaluate
        self._end = end

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module.

        Raises:
            ReferenceError: The module is gone.
        """
        buffer, module = self._buffer, self._module()
        if module is None:
            raise ReferenceError("the module whose call was timed is gone")
        call = self._compiled or getattr(module, self._method)
        if get_ident() != buffer.thread:
            return call(*args, **kwargs)
        flags = 0 if module.training else EVALUATE_WITH_GRADIENTS
        if not self._grad_enabled():
            flags ^= EVALUATE_IN_TRAINING_MODE if module.training else EVALUATE_WITH_GRADIENTS
        trains = module.training and not flags
        code = self._train if trains else self._evaluate
        if buffer.muted >> code & 1:
            return call(*args, **kwargs)
        has_ended = False
        try:
            buffer.write(code, flags)
            try:
                return call(*args, **kwargs)
            finally:
                has_ended = buffer.mark(self._end)
        except BaseException:
            if not has_ended:
                buffer.forget_step()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        # Where a module is copied or pickled together with its dict, the copy has nothing here.
        return type(None), ()


class Steps:
    """What the hooks around every optimizer step call.

    Args:
        known: Weak references to optimizers, by id.
        begin: Code of the event before a step.
        end: Code of the event after.
    """

    def __init__(
        self, buffer: EventBuffer, known: "dict[int, weakref.ref[Any]]", begin: int, end: int
    ) -> None:
        self._buffer = buffer
        self._known = known
        self._begin = begin
        self._end = end

    def begin(self, optimizer: object) -> bool:
        """Write that a known optimizer steps, unless another step is at work; return whether that is so."""
        buffer, own = self._buffer, id(optimizer)
        if get_ident() != buffer.thread or buffer.steps_open:
            return False
        reference = self._known.get(own)
        if reference is None or reference() is not optimizer:
            return False
        buffer.steps_open += 1  # first: if the script raises here, it is as with a step that raises
        buffer.write(self._begin, own)
        return True

    def end(self, optimizer: object) -> bool:
        """Write that a step has ended if this is the thread that is followed; return whether it is."""
        buffer = self._buffer
        if get_ident() != buffer.thread:
            return False
        if buffer.steps_open:
            buffer.steps_open -= 1
        buffer.write(self._end, id(optimizer))
        return True
