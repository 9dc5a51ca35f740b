"""What a capture records: the one list of its options, for the client, the daemon and their messages."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Self

from torchperfd.model.messages import pack, unpack

if TYPE_CHECKING:
    from torchperfd.v1 import session_pb2


class CaptureKind(StrEnum):
    """What a capture is made of: traces of torch.profiler, or snapshots of CUDA memory with its history."""

    TRACE = "trace"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What shall be captured, and for how many training steps. Subclasses limit the values.

    Attributes:
        record_shapes: The shapes of operator inputs.
        with_stack: Python stacks.
        profile_memory: Allocations.
        kind: The value of a :class:`CaptureKind`.
        with_flops: What FLOPs are counted from: shapes and scalars of operator inputs. The count itself torch
            writes into no trace.
        with_modules: Which module runs. Of modules that TorchScript has not compiled, torch records that
            among Python stacks only, so that these are recorded, too.
        automatic: The run's own capture, not its user's, whose captures wait for its end instead of being
            refused.
    """

    steps: int = 5
    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False
    kind: str = CaptureKind.TRACE
    with_flops: bool = False
    with_modules: bool = False
    automatic: bool = False

    @classmethod
    def from_message(cls, message: "session_pb2.CaptureOptions", *, unknown: str | None = None) -> Self:
        """Return the options of a message.

        Args:
            unknown: The kind to take for one of a newer version; its number by default.

        Raises:
            ValueError: The class allows no such values.
        """
        from torchperfd.v1 import session_pb2

        kinds = {
            session_pb2.CAPTURE_KIND_UNSPECIFIED: CaptureKind.TRACE,
            session_pb2.CAPTURE_KIND_TRACE: CaptureKind.TRACE,
            session_pb2.CAPTURE_KIND_MEMORY: CaptureKind.MEMORY,
        }
        return unpack(message, cls, kind=kinds.get(message.kind, unknown or str(message.kind)))

    def to_message(self) -> "session_pb2.CaptureOptions":
        from torchperfd.v1 import session_pb2

        is_memory = self.kind == CaptureKind.MEMORY
        kind = session_pb2.CAPTURE_KIND_MEMORY if is_memory else session_pb2.CAPTURE_KIND_TRACE
        return pack(session_pb2.CaptureOptions, self, kind=kind)
