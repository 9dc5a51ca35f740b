"""Between the client's own types and the messages of the protocol. Imports protobuf."""

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence

from google.protobuf.message import DecodeError

from torchperfd._version import __revision__, __version__
from torchperfd.events import NATIVE
from torchperfd.model.identity import Identity
from torchperfd.model.messages import fill, pack, unpack
from torchperfd.model.process import GroupProgress
from torchperfd.model.totals import PhaseTotals
from torchperfd.steps.phases import TRAIN, VALIDATE, PhaseNames, StepBatch
from torchperfd.steps.step_series import Arrivals, BlockSums
from torchperfd.steps.totals import KindTotals, Totals
from torchperfd.v1 import contract, session_pb2


def hello(identity: Identity, torch_version: str) -> session_pb2.ClientMessage:
    return session_pb2.ClientMessage(
        hello=session_pb2.Hello(
            api=session_pb2.ApiRange(min=contract.API_MIN, max=contract.API_MAX),
            features=[
                *contract.FEATURES,
                contract.NATIVE_HOOKS if NATIVE else contract.REFERENCE_HOOKS,
            ],
            client_version=__version__,
            client_revision=__revision__,
            identity=pack(session_pb2.RankIdentity, identity, torch_version=torch_version),
        )
    )


def step_batch(
    batches: Sequence[StepBatch], names: PhaseNames, arrivals: Arrivals | None = None
) -> session_pb2.ClientMessage:
    """Pack drained steps; phases that never occur in them take no room, nor do arrivals."""
    batch = session_pb2.StepBatch(
        count=sum(batch.count for batch in batches),
        kind=join_columns(each.kind for each in batches),
        start_ns=join_columns(each.start for each in batches),
        duration_ns=join_columns(each.duration for each in batches),
        next_step=max((each.index[-1] + 1 for each in batches if each.kind[0] == TRAIN), default=0),
    )
    for slot in sorted({slot for each in batches for slot in each.phases}):
        columns = (each.phases[slot].ns if slot in each.phases else _zeros(each.count) for each in batches)
        batch.phases.add(phase=names.name(slot), ns=join_columns(columns))
    if arrivals is not None and arrivals.step:
        batch.arrivals.step = join_columns([arrivals.step])
        batch.arrivals.first_ns = join_columns([arrivals.first_ns])
        batch.arrivals.last_ns = join_columns([arrivals.last_ns])
    return session_pb2.ClientMessage(steps=batch)


def collective_report(request_id: int, groups: Sequence[GroupProgress]) -> session_pb2.ClientMessage:
    packed = [pack(session_pb2.GroupProgress, group) for group in groups]
    return session_pb2.ClientMessage(
        collective_report=session_pb2.CollectiveReport(request_id=request_id, groups=packed)
    )


def totals_to_message(
    totals: Totals,
    names: PhaseNames,
    recorded: int,
    dropped: Mapping[str, int],
    blocks: BlockSums | None = None,
) -> session_pb2.ClientMessage:
    """Pack the totals since attach; with the blocks of steps once the loop has ended."""
    message = pack(
        session_pb2.Account, totals, recorded_steps=recorded, dropped_steps=dict(dropped), warmup=None
    )
    # Set even without a save: a missing field means an older client.
    message.checkpoint.SetInParent()
    for kind in (TRAIN, VALIDATE):
        if totals.of(kind).steps:
            _pack_kind(message.kinds.add(), kind, totals.of(kind), names)
    if totals.warmup.steps:
        _pack_kind(message.warmup, TRAIN, totals.warmup, names)
    if blocks is not None:
        message.step_blocks = _pack_blocks(blocks, names)
    return session_pb2.ClientMessage(account=message)


def totals_from_message(message: session_pb2.Account, names: PhaseNames) -> Totals:
    """Unpack another rank's totals; user phases it names get slots in ``names``."""
    kinds = {each.kind: _kind_from_message(each, names) for each in message.kinds}
    return unpack(
        message,
        Totals,
        train=kinds.get(session_pb2.STEP_KIND_TRAIN, KindTotals()),
        validate=kinds.get(session_pb2.STEP_KIND_VALIDATE, KindTotals()),
        warmup=_kind_from_message(message.warmup, names),
    )


def blocks_from_message(message: session_pb2.Account, names: PhaseNames) -> BlockSums | None:
    """Unpack another rank's blocks of steps; None where it has sent none, or they are damaged."""
    packed = session_pb2.StepBlocks()
    try:
        packed.ParseFromString(message.step_blocks)
        step_ns = _read_column(packed.step_ns)
        phase_ns = {names.slot(each.phase): _read_column(each.ns) for each in packed.phases}
    except (DecodeError, ValueError):
        return None
    columns = (step_ns, *phase_ns.values())
    if not step_ns or not packed.steps or any(len(each) != len(step_ns) or min(each) < 0 for each in columns):
        return None
    return BlockSums(packed.steps, step_ns, phase_ns)


def _pack_blocks(blocks: BlockSums, names: PhaseNames) -> bytes:
    packed = session_pb2.StepBlocks(steps=blocks.steps, step_ns=join_columns([array("q", blocks.step_ns)]))
    for slot, column in blocks.phase_ns.items():
        packed.phases.add(phase=names.name(slot), ns=join_columns([array("q", column)]))
    return packed.SerializeToString()


def _read_column(packed: bytes) -> tuple[int, ...]:
    column = array("q", packed)
    if sys.byteorder != "little":
        column.byteswap()
    return tuple(column)


def _pack_kind(packed: session_pb2.KindAccount, kind: int, totals: KindTotals, names: PhaseNames) -> None:
    packed.kind = session_pb2.StepKind.ValueType(kind)
    fill(packed, totals, ("phases",))
    for slot in range(len(names)):
        if totals.phases[slot].calls:
            fill(packed.phases.add(phase=names.name(slot)), totals.phases[slot])


def _kind_from_message(packed: session_pb2.KindAccount, names: PhaseNames) -> KindTotals:
    totals = unpack(packed, KindTotals, phases=KindTotals().phases)
    for phase in packed.phases:
        # Names past the last slot share one, so several phases may meet there.
        slot = names.slot(phase.phase)
        totals.phases[slot] = totals.phases[slot].plus(unpack(phase, PhaseTotals))
    return totals


def _zeros(steps: int) -> "array[int]":
    return array("q", bytes(8 * steps))


def join_columns(columns: "Iterable[array[int] | memoryview[int]]") -> bytes:
    """Return columns, one behind the other, as the protocol has them: little-endian."""
    if sys.byteorder == "little":
        return b"".join(columns)
    joined = array("q", b"".join(columns))
    joined.byteswap()
    return joined.tobytes()
