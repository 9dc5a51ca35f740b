"""Capture messages: options and outcomes of captures as the wire has them."""

from typing import TYPE_CHECKING

from torchperfd.captures.capture import MEMORY, TRACE, CaptureOptions, CaptureOutcome, RankCapture

if TYPE_CHECKING:
    from torchperfd.v1 import session_pb2


def options_from(message: "session_pb2.CaptureOptions") -> CaptureOptions:
    """Unpack what to record.

    Raises:
        ValueError: There is no such capture.
    """
    from torchperfd.v1 import session_pb2

    kinds = {
        session_pb2.CAPTURE_KIND_UNSPECIFIED: TRACE,
        session_pb2.CAPTURE_KIND_TRACE: TRACE,
        session_pb2.CAPTURE_KIND_MEMORY: MEMORY,
    }
    return CaptureOptions(
        steps=message.steps,
        record_shapes=message.record_shapes,
        with_stack=message.with_stack,
        profile_memory=message.profile_memory,
        # A newer daemon may know more of them.
        kind=kinds.get(message.kind, str(message.kind)),
        with_flops=message.with_flops,
        with_modules=message.with_modules,
        automatic=message.automatic,
    )


def options_message(options: CaptureOptions) -> "session_pb2.CaptureOptions":
    """Pack what was recorded."""
    from torchperfd.v1 import session_pb2

    return session_pb2.CaptureOptions(
        steps=options.steps,
        record_shapes=options.record_shapes,
        with_stack=options.with_stack,
        profile_memory=options.profile_memory,
        kind=(session_pb2.CAPTURE_KIND_MEMORY if options.kind == MEMORY else session_pb2.CAPTURE_KIND_TRACE),
        with_flops=options.with_flops,
        with_modules=options.with_modules,
        automatic=options.automatic,
    )


def result_message(
    capture: RankCapture, outcome: CaptureOutcome, *, self_started: bool
) -> "session_pb2.ClientMessage":
    """Pack how a capture of this rank ended."""
    from torchperfd.v1 import session_pb2

    options = capture.options
    launches, kernels = capture.kernel_counts
    result = session_pb2.CaptureResult(
        capture_id=capture.capture_id,
        ok=outcome.ok,
        reason=outcome.reason,
        retry=outcome.retry,
        start_step=outcome.start_step,
        steps=options.steps,
        steps_made=capture.steps_made,
        file=outcome.file,
        bytes=outcome.bytes,
        sha256=outcome.sha256,
        self_started=self_started,
        options=options_message(options),
        pause_seconds=capture.pause_seconds,
        launches=launches,
        kernels=kernels,
    )
    return session_pb2.ClientMessage(capture_result=result)
