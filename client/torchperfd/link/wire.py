"""Between the client's own types and the messages of the protocol. Imports protobuf."""

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from google.protobuf.message import DecodeError

from torchperfd._version import __revision__, __version__
from torchperfd.events import NATIVE
from torchperfd.hooks.process_groups import GroupProgress
from torchperfd.model.identity import Identity
from torchperfd.model.loader_workers import LoaderFacts
from torchperfd.model.process import Coordinate, CpuBinding, HookState, HostMemory
from torchperfd.model.source_lines import InputStages, SyncWait, TimedLine
from torchperfd.steps.phases import TRAIN, VALIDATE, PhaseNames, StepBatch
from torchperfd.steps.step_series import Arrivals, BlockSums
from torchperfd.steps.totals import CudaMemory, GcTotals, KindTotals, PhaseTotals, Totals
from torchperfd.v1 import contract, session_pb2


def hello(identity: Identity, torch_version: str) -> session_pb2.ClientMessage:
    """Return the first message of a session."""
    return session_pb2.ClientMessage(
        hello=session_pb2.Hello(
            api=session_pb2.ApiRange(min=contract.API_MIN, max=contract.API_MAX),
            features=[
                *contract.FEATURES,
                contract.NATIVE_HOOKS if NATIVE else contract.REFERENCE_HOOKS,
            ],
            client_version=__version__,
            client_revision=__revision__,
            identity=session_pb2.RankIdentity(
                run=identity.run,
                rank=identity.rank,
                world_size=identity.world_size,
                local_rank=identity.local_rank,
                node_rank=identity.node_rank,
                job_name=identity.job_name,
                node=identity.node,
                pid_namespace=identity.pid_namespace,
                pid=identity.pid,
                process_start_ticks=identity.process_start_ticks,
                script=identity.script,
                torch_version=torch_version,
                python_version=identity.python_version,
                slurm_job_id=identity.slurm_job_id,
                pod_uid=identity.pod_uid,
                command=identity.command,
            ),
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
    """Pack how far each process group is."""
    report = session_pb2.CollectiveReport(request_id=request_id)
    for group in groups:
        report.groups.add(
            name=group.name,
            description=group.description,
            begun=group.begun,
            number=group.number,
            call=group.call,
            sizes=group.sizes,
        )
    return session_pb2.ClientMessage(collective_report=report)


def totals_to_message(
    totals: Totals,
    names: PhaseNames,
    recorded: int,
    dropped: Mapping[str, int],
    blocks: BlockSums | None = None,
) -> session_pb2.ClientMessage:
    """Pack the totals since attach; with the blocks of steps once the loop has ended."""
    message = session_pb2.Account(
        recorded_steps=recorded,
        dropped_steps=dict(dropped),
        loader_ready=totals.ready,
        flops_per_step=totals.flops_per_step,
        peak_flops=totals.peak_flops,
        overhead_ratio=totals.overhead,
        shed_tiers=totals.degradation_level,
        began_ns=totals.began_ns,
        ended_ns=totals.ended_ns,
        threads=totals.threads,
        cpus=totals.cpus,
        switches=totals.switches,
        graph_limit=totals.graph_limit,
    )
    for kind in (TRAIN, VALIDATE):
        if totals.of(kind).steps:
            _pack_kind(message.kinds.add(), kind, totals.of(kind), names)
    if totals.warmup.steps:
        _pack_kind(message.warmup, TRAIN, totals.warmup, names)
    # Set even without a save: a missing field means an older client.
    message.checkpoint.SetInParent()
    for packed, times in (
        (message.checkpoint, totals.checkpoint),
        (message.epoch, totals.epoch),
        (message.train_pass, totals.train_pass),
        (message.validate_pass, totals.validate_pass),
        (message.compiled, totals.compiled),
        (message.background_saves, totals.background_saves),
        (message.epoch_starts, totals.epoch_starts),
        (message.device_lag, totals.device_lag),
        (message.device_work, totals.device_work),
    ):
        if times.calls:
            _pack_phase(packed, times)
    for pauses in totals.gc:
        message.gc.add(calls=pauses.calls, ns=pauses.ns)
    for hook in totals.hooks:
        message.hooks.add(name=hook.name, reason=hook.reason)
    for place in totals.coordinates:
        message.coordinates.add(dimension=place.dimension, rank=place.rank, size=place.size)
    for wait in totals.sync_waits:
        message.sync_waits.add(**asdict(wait))
    for own, packed_lines in (
        (totals.collect_calls, message.collect_calls),
        (totals.script_collectives, message.script_collectives),
    ):
        for line in own:
            packed_lines.add(**asdict(line))
    if totals.loader is not None:
        message.loader.CopyFrom(session_pb2.LoaderUse(**asdict(totals.loader)))
    if totals.binding.allowed:
        message.binding.CopyFrom(session_pb2.CpuBinding(**asdict(totals.binding)))
    if blocks is not None:
        message.step_blocks = _pack_blocks(blocks, names)
    if totals.host_memory is not None:
        message.host_memory.CopyFrom(session_pb2.HostMemory(**asdict(totals.host_memory)))
    if totals.cuda is not None:
        message.cuda.allocated_bytes = totals.cuda.allocated
        message.cuda.reserved_bytes = totals.cuda.reserved
        message.cuda.peak_bytes = totals.cuda.peak
        message.cuda.device_uuid = totals.cuda.device_uuid
    return session_pb2.ClientMessage(account=message)


def totals_from_message(message: session_pb2.Account, names: PhaseNames) -> Totals:
    """Unpack another rank's totals; user phases it names get slots in ``names``."""
    totals = Totals(
        began_ns=message.began_ns,
        ended_ns=message.ended_ns,
        checkpoint=_phase_from_message(message.checkpoint),
        gc=tuple(GcTotals(pauses.calls, pauses.ns) for pauses in message.gc),
        compiled=_phase_from_message(message.compiled),
        background_saves=_phase_from_message(message.background_saves),
        ready=message.loader_ready if message.HasField("loader_ready") else None,
        epoch=_phase_from_message(message.epoch),
        train_pass=_phase_from_message(message.train_pass),
        validate_pass=_phase_from_message(message.validate_pass),
        flops_per_step=message.flops_per_step if message.HasField("flops_per_step") else None,
        peak_flops=message.peak_flops if message.HasField("peak_flops") else None,
        overhead=message.overhead_ratio if message.HasField("overhead_ratio") else None,
        degradation_level=message.shed_tiers,
        hooks=tuple(HookState(hook.name, hook.reason) for hook in message.hooks),
        coordinates=tuple(Coordinate(each.dimension, each.rank, each.size) for each in message.coordinates),
        sync_waits=tuple(SyncWait(each.file, each.line, each.call, each.ns) for each in message.sync_waits),
        threads=message.threads if message.HasField("threads") else None,
        cpus=message.cpus if message.HasField("cpus") else None,
        binding=CpuBinding(message.binding.allowed, message.binding.share),
        switches=tuple(message.switches),
        epoch_starts=_phase_from_message(message.epoch_starts),
        collect_calls=tuple(map(_line_from_message, message.collect_calls)),
        script_collectives=tuple(map(_line_from_message, message.script_collectives)),
        graph_limit=message.graph_limit,
        device_lag=_phase_from_message(message.device_lag),
        device_work=_phase_from_message(message.device_work),
    )
    if message.HasField("host_memory"):
        memory = message.host_memory
        totals.host_memory = HostMemory(memory.resident_bytes, memory.peak_bytes)
    if message.HasField("cuda"):
        cuda = message.cuda
        totals.cuda = CudaMemory(cuda.allocated_bytes, cuda.reserved_bytes, cuda.peak_bytes, cuda.device_uuid)
    if message.HasField("loader"):
        totals.loader = _loader_from_message(message.loader)
    for packed in message.kinds:
        if packed.kind in (TRAIN, VALIDATE):
            _read_kind(packed, totals.of(packed.kind), names)
    _read_kind(message.warmup, totals.warmup, names)
    return totals


def _line_from_message(packed: session_pb2.TimedLine) -> TimedLine:
    return TimedLine(packed.file, packed.line, packed.call, packed.calls, packed.ns)


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


def _loader_from_message(packed: session_pb2.LoaderUse) -> LoaderFacts:
    known = {field.name: value for field, value in packed.ListFields()}
    if "stages" in known:
        known["stages"] = InputStages.from_message(known["stages"])
    return LoaderFacts(**known)


def _pack_kind(packed: session_pb2.KindAccount, kind: int, totals: KindTotals, names: PhaseNames) -> None:
    packed.kind = session_pb2.StepKind.ValueType(kind)
    packed.steps, packed.step_ns, packed.samples = totals.steps, totals.ns, totals.samples
    packed.sum_squares_ns2, packed.tokens = totals.squares, totals.tokens
    packed.micro_batches, packed.skipped = totals.micro_batches, totals.skipped
    for slot in range(len(names)):
        if totals.phases[slot].calls:
            _pack_phase(packed.phases.add(phase=names.name(slot)), totals.phases[slot])


def _read_kind(packed: session_pb2.KindAccount, totals: KindTotals, names: PhaseNames) -> None:
    totals.steps, totals.ns, totals.samples = packed.steps, packed.step_ns, packed.samples
    totals.squares, totals.tokens = packed.sum_squares_ns2, packed.tokens
    totals.micro_batches, totals.skipped = packed.micro_batches, packed.skipped
    for phase in packed.phases:
        # Names past the last slot share one, so several phases may meet there.
        own, received = totals.phases[names.slot(phase.phase)], _phase_from_message(phase)
        own.calls += received.calls
        own.ns += received.ns
        own.squares += received.squares
        own.device_ns += received.device_ns
        own.device_calls += received.device_calls


def _pack_phase(packed: session_pb2.PhaseAccount, totals: PhaseTotals) -> None:
    packed.calls, packed.ns, packed.sum_squares_ns2 = totals.calls, totals.ns, totals.squares
    if totals.device_calls:
        packed.device_ns, packed.device_calls = totals.device_ns, totals.device_calls


def _phase_from_message(packed: session_pb2.PhaseAccount) -> PhaseTotals:
    return PhaseTotals(packed.calls, packed.ns, packed.sum_squares_ns2, packed.device_ns, packed.device_calls)


def _zeros(steps: int) -> "array[int]":
    return array("q", bytes(8 * steps))


def join_columns(columns: "Iterable[array[int] | memoryview[int]]") -> bytes:
    """Return columns, one behind the other, as the protocol has them: little-endian."""
    if sys.byteorder == "little":
        return b"".join(columns)
    joined = array("q", b"".join(columns))
    joined.byteswap()
    return joined.tobytes()
