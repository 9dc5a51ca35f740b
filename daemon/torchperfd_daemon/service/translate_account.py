"""Conversion of a rank's cumulative account, and of goodput, between messages and the daemon's own types."""

import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from torchperfd.model.loader_workers import LoaderFacts
from torchperfd.model.process import UNBOUND, Coordinate, CpuBinding, HostMemory
from torchperfd.model.source_lines import InputStages, SyncWait, TimedLine
from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon.goodput import Bucket, RankGoodput, RunGoodput
from torchperfd_daemon.service.message_fields import count, moment, nanoseconds, pack, quantity, unpack
from torchperfd_daemon.store import CudaMemory, GcTotal, KindTotal, PhaseTotal, Totals
from torchperfd_daemon.text import one_line

MAX_PHASES: Final = 32
MAX_PHASE_CHARACTERS: Final = 64

_MAX_GENERATIONS: Final = 4
_MAX_HOOKS: Final = 64
_MAX_DIMENSIONS: Final = 16
_MAX_REASON_CHARACTERS: Final = 256
_MAX_SYNC_WAITS: Final = 8
_MAX_LINES: Final = 8
_MAX_THREADS: Final = 2**16
_MAX_SWITCHES: Final = 8
_MAX_UUID_CHARACTERS: Final = 64
_MAX_FILE_CHARACTERS: Final = 1000
# 256 blocks of at most 28 columns need 58 KiB.
_MAX_BLOCKS_BYTES: Final = 64 << 10
_WHERE: Final = frozenset(("ring", "outbox"))
_ELSEWHERE: Final = "other"


def totals_from_message(message: session_pb2.Account) -> Totals:
    """Unpack a cumulative account; numbers out of range are limited, so that they harm this rank only."""
    kinds = {kind.kind: _kind_from_message(kind) for kind in message.kinds}
    cuda = message.cuda
    return Totals(
        train=kinds.get(session_pb2.STEP_KIND_TRAIN, KindTotal()),
        validate=kinds.get(session_pb2.STEP_KIND_VALIDATE, KindTotal()),
        recorded=count(message.recorded_steps),
        dropped=_dropped(message.dropped_steps),
        warmup=_kind_from_message(message.warmup),
        checkpoint=_phase_from_message(message.checkpoint) if message.HasField("checkpoint") else None,
        gc=tuple(
            GcTotal(count(pauses.calls), nanoseconds(pauses.ns)) for pauses in message.gc[:_MAX_GENERATIONS]
        ),
        compiled=_phase_from_message(message.compiled) if message.HasField("compiled") else None,
        background_saves=_phase_from_message(message.background_saves)
        if message.HasField("background_saves")
        else None,
        loader_ready=message.loader_ready if message.HasField("loader_ready") else None,
        cuda=CudaMemory(
            count(cuda.allocated_bytes),
            count(cuda.reserved_bytes),
            count(cuda.peak_bytes),
            one_line(cuda.device_uuid, _MAX_UUID_CHARACTERS),
        )
        if message.HasField("cuda")
        else None,
        host_memory=host_memory_from_message(message.host_memory)
        if message.HasField("host_memory")
        else None,
        flops_per_step=_quantity(message, "flops_per_step"),
        peak_flops=_quantity(message, "peak_flops"),
        overhead=_quantity(message, "overhead_ratio"),
        shed=message.shed_tiers,
        epoch=_phase_from_message(message.epoch),
        train_pass=_phase_from_message(message.train_pass),
        validate_pass=_phase_from_message(message.validate_pass),
        began_ns=moment(message.began_ns),
        ended_ns=moment(message.ended_ns),
        loader=loader_facts_from_message(message.loader) if message.HasField("loader") else None,
        hooks={
            one_line(hook.name, MAX_PHASE_CHARACTERS): one_line(hook.reason, _MAX_REASON_CHARACTERS)
            for hook in message.hooks[:_MAX_HOOKS]
        },
        coordinates=coordinates_from_messages(message.coordinates),
        sync_waits=tuple(
            SyncWait(
                one_line(wait.file, _MAX_FILE_CHARACTERS),
                wait.line,
                one_line(wait.call, MAX_PHASE_CHARACTERS),
                nanoseconds(wait.ns),
            )
            for wait in message.sync_waits[:_MAX_SYNC_WAITS]
        ),
        threads=thread_count(message.threads),
        cpus=message.cpus if 0 < message.cpus <= _MAX_THREADS else None,
        binding=_binding(message.binding.allowed, message.binding.share),
        switches=tuple(one_line(each, MAX_PHASE_CHARACTERS) for each in message.switches[:_MAX_SWITCHES]),
        epoch_starts=_phase_from_message(message.epoch_starts),
        collect_calls=_lines_from_messages(message.collect_calls),
        script_collectives=_lines_from_messages(message.script_collectives),
        graph_limit=one_line(message.graph_limit, _MAX_REASON_CHARACTERS),
        device_lag=_phase_from_message(message.device_lag),
        device_work=_phase_from_message(message.device_work),
        step_blocks=message.step_blocks if len(message.step_blocks) <= _MAX_BLOCKS_BYTES else b"",
    )


def coordinates_from_messages(messages: Sequence[session_pb2.Coordinate]) -> tuple[Coordinate, ...]:
    """Unpack a rank's place in each dimension of its job."""
    return tuple(
        Coordinate(one_line(each.dimension, MAX_PHASE_CHARACTERS), each.rank, each.size)
        for each in messages[:_MAX_DIMENSIONS]
        if each.rank < each.size
    )


def coordinates_to_messages(own: Sequence[Coordinate]) -> list[session_pb2.Coordinate]:
    """Pack a rank's place in each dimension of its job."""
    return [pack(session_pb2.Coordinate, each) for each in own]


def _lines_from_messages(messages: Sequence[session_pb2.TimedLine]) -> tuple[TimedLine, ...]:
    return tuple(
        TimedLine(
            one_line(each.file, _MAX_FILE_CHARACTERS),
            each.line,
            one_line(each.call, MAX_PHASE_CHARACTERS),
            count(each.calls),
            nanoseconds(each.ns),
        )
        for each in messages[:_MAX_LINES]
    )


def host_memory_from_message(message: session_pb2.HostMemory) -> HostMemory:
    """Unpack the memory of a process on the host."""
    return HostMemory(count(message.resident_bytes), count(message.peak_bytes))


def thread_count(value: int) -> int | None:
    """Return a number of threads; None for one that no process has, 0 included."""
    return value if 1 <= value <= _MAX_THREADS else None


def _binding(allowed: int, share: int) -> CpuBinding:
    return CpuBinding(allowed, share) if 0 < allowed < share <= _MAX_THREADS else UNBOUND


def loader_facts_from_message(message: session_pb2.LoaderUse) -> LoaderFacts | None:
    """Unpack how a rank uses its loader; None for figures that no loader has."""
    known = {field.name: value for field, value in message.ListFields()}
    if "stages" in known:
        known["stages"] = InputStages.from_message(message.stages)
    facts = LoaderFacts(**known)
    return facts if facts.is_sound() else None


def input_stages_from_message(message: session_pb2.InputStages) -> InputStages | None:
    """Unpack what the stages of making a batch take; None for figures that no loader has."""
    stages = InputStages.from_message(message)
    return stages if LoaderFacts(stages=stages).is_sound() else None


def loader_facts_to_message(own: LoaderFacts) -> session_pb2.LoaderUse:
    """Pack how a rank uses its loader."""
    stages = None if own.stages is None else pack(session_pb2.InputStages, own.stages)
    return pack(session_pb2.LoaderUse, own, stages=stages)


def totals_to_message(own: Totals) -> session_pb2.Account:
    """Pack a cumulative account."""
    return pack(
        session_pb2.Account,
        own,
        recorded_steps=own.recorded,
        dropped_steps=own.dropped,
        kinds=[
            _kind_to_message(session_pb2.STEP_KIND_TRAIN, own.train),
            _kind_to_message(session_pb2.STEP_KIND_VALIDATE, own.validate),
        ],
        warmup=_kind_to_message(session_pb2.STEP_KIND_TRAIN, own.warmup) if own.warmup.steps else None,
        checkpoint=_phase_to_message("", own.checkpoint) if own.checkpoint is not None else None,
        gc=[pack(session_pb2.GcAccount, pauses) for pauses in own.gc],
        compiled=_phase_to_message("", own.compiled) if own.compiled is not None else None,
        background_saves=_phase_to_message("", own.background_saves)
        if own.background_saves is not None
        else None,
        cuda=session_pb2.CudaMemory(
            allocated_bytes=own.cuda.allocated,
            reserved_bytes=own.cuda.reserved,
            peak_bytes=own.cuda.peak,
            device_uuid=own.cuda.device_uuid,
        )
        if own.cuda is not None
        else None,
        host_memory=None if own.host_memory is None else pack(session_pb2.HostMemory, own.host_memory),
        overhead_ratio=own.overhead,
        shed_tiers=own.shed,
        epoch=_phase_to_message("", own.epoch),
        train_pass=_phase_to_message("", own.train_pass),
        validate_pass=_phase_to_message("", own.validate_pass),
        loader=loader_facts_to_message(own.loader) if own.loader is not None else None,
        hooks=[session_pb2.HookState(name=name, reason=reason) for name, reason in own.hooks.items()],
        coordinates=coordinates_to_messages(own.coordinates),
        sync_waits=[pack(session_pb2.SyncWait, wait) for wait in own.sync_waits],
        binding=pack(session_pb2.CpuBinding, own.binding) if own.binding.allowed else None,
        epoch_starts=_phase_to_message("", own.epoch_starts),
        collect_calls=[pack(session_pb2.TimedLine, each) for each in own.collect_calls],
        script_collectives=[pack(session_pb2.TimedLine, each) for each in own.script_collectives],
        device_lag=_phase_to_message("", own.device_lag),
        device_work=_phase_to_message("", own.device_work),
    )


def _kind_from_message(message: session_pb2.KindAccount) -> KindTotal:
    return KindTotal(
        steps=count(message.steps),
        ns=nanoseconds(message.step_ns),
        samples=count(message.samples),
        phases={
            one_line(phase.phase, MAX_PHASE_CHARACTERS): _phase_from_message(phase)
            for phase in message.phases[:MAX_PHASES]
        },
        squares=quantity(message.sum_squares_ns2),
        micro_batches=count(message.micro_batches),
        skipped=count(message.skipped),
        tokens=count(message.tokens),
    )


def _kind_to_message(kind: session_pb2.StepKind.ValueType, own: KindTotal) -> session_pb2.KindAccount:
    return pack(
        session_pb2.KindAccount,
        own,
        kind=kind,
        step_ns=own.ns,
        phases=[_phase_to_message(name, phase) for name, phase in own.phases.items()],
        sum_squares_ns2=own.squares,
    )


def _phase_from_message(message: session_pb2.PhaseAccount) -> PhaseTotal:
    return PhaseTotal(
        count(message.calls),
        nanoseconds(message.ns),
        quantity(message.sum_squares_ns2),
        nanoseconds(message.device_ns),
        count(message.device_calls),
    )


def _phase_to_message(name: str, own: PhaseTotal) -> session_pb2.PhaseAccount:
    return pack(session_pb2.PhaseAccount, own, phase=name, sum_squares_ns2=own.squares)


def _dropped(message: Mapping[str, int]) -> dict[str, int]:
    """Return lost steps by place; places unknown to this version are counted as one."""
    found: dict[str, int] = {}
    for where, steps in message.items():
        place = where if where in _WHERE else _ELSEWHERE
        found[place] = count(found.get(place, 0) + count(steps))
    return found


def _quantity(
    message: session_pb2.Account, field: Literal["flops_per_step", "peak_flops", "overhead_ratio"]
) -> float | None:
    """Return an optional field; None where it is absent or not a quantity."""
    value = float(getattr(message, field))
    return value if message.HasField(field) and 0 <= value < math.inf else None


def run_goodput_to_message(own: RunGoodput) -> control_pb2.RunGoodput:
    """Pack a run's goodput."""
    return control_pb2.RunGoodput(run=own.run, ranks=[_rank_goodput_to_message(rank) for rank in own.ranks])


def run_goodput_from_message(message: control_pb2.RunGoodput) -> RunGoodput:
    """Unpack a run's goodput; a bucket of a later version is left out."""
    return RunGoodput(message.run, [_rank_goodput_from_message(rank) for rank in message.ranks])


def _rank_goodput_to_message(own: RankGoodput) -> control_pb2.RankGoodput:
    seconds = {bucket.value: seconds for bucket, seconds in own.seconds.items()}
    return pack(control_pb2.RankGoodput, own, bucket_seconds=seconds)


def _rank_goodput_from_message(message: control_pb2.RankGoodput) -> RankGoodput:
    seconds = {bucket: message.bucket_seconds.get(bucket.value, 0.0) for bucket in Bucket}
    return RankGoodput(**unpack(message, RankGoodput), seconds=seconds)
