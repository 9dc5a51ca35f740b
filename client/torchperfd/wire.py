"""Between the client's own types and the messages of the protocol. Imports protobuf."""

import sys
from array import array
from collections.abc import Mapping

from torchperfd._version import __version__
from torchperfd.account import Account, KindAccount
from torchperfd.identity import Identity
from torchperfd.phases import PhaseNames
from torchperfd.recorder import CALLS, DURATION, INDEX, KIND, NS, SAMPLES, START, TRAIN, VALIDATE, Rows
from torchperfd.v1 import contract, session_pb2


def hello(identity: Identity, torch_version: str) -> session_pb2.ClientMessage:
    """Return the first message of a session."""
    return session_pb2.ClientMessage(
        hello=session_pb2.Hello(
            api=session_pb2.ApiRange(min=contract.API_MIN, max=contract.API_MAX),
            features=contract.FEATURES,
            client_version=__version__,
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
            ),
        )
    )


def step_batch(rows: Rows, names: PhaseNames) -> session_pb2.ClientMessage:
    """Pack drained steps; phases that never occur in them take no room."""
    batch = session_pb2.StepBatch(
        count=rows.count,
        index=_bytes(rows.column(INDEX)),
        kind=_bytes(rows.column(KIND)),
        start_ns=_bytes(rows.column(START)),
        duration_ns=_bytes(rows.column(DURATION)),
        samples=_bytes(rows.column(SAMPLES)),
    )
    for slot in range(len(names)):
        calls = rows.column(CALLS + slot)
        if any(calls):
            batch.phases.add(phase=names.name(slot), ns=_bytes(rows.column(NS + slot)), calls=_bytes(calls))
    return session_pb2.ClientMessage(steps=batch)


def account_message(
    account: Account, names: PhaseNames, recorded: int, dropped: Mapping[str, int]
) -> session_pb2.ClientMessage:
    """Pack the totals since attach."""
    message = session_pb2.Account(recorded_steps=recorded, dropped_steps=dict(dropped))
    for kind in (TRAIN, VALIDATE):
        totals = account.of(kind)
        if not totals.steps:
            continue
        packed = message.kinds.add(
            kind=session_pb2.StepKind.ValueType(kind),
            steps=totals.steps,
            step_ns=totals.ns,
            samples=totals.samples,
        )
        for slot in range(len(names)):
            phase = totals.phases[slot]
            if phase.calls:
                packed.phases.add(
                    phase=names.name(slot), calls=phase.calls, ns=phase.ns, sum_squares_ns2=phase.squares
                )
    return session_pb2.ClientMessage(account=message)


def read_account(message: session_pb2.Account, names: PhaseNames) -> Account:
    """Unpack another rank's totals; user phases it names get slots in ``names``."""
    account = Account()
    for packed in message.kinds:
        if packed.kind not in (TRAIN, VALIDATE):
            continue
        totals: KindAccount = account.of(packed.kind)
        totals.steps, totals.ns, totals.samples = packed.steps, packed.step_ns, packed.samples
        for phase in packed.phases:
            own = totals.phases[names.slot(phase.phase)]
            own.calls += phase.calls
            own.ns += phase.ns
            own.squares += phase.sum_squares_ns2
    return account


def _bytes(column: "array[int]") -> bytes:
    if sys.byteorder == "big":
        column = array("q", column)
        column.byteswap()
    return column.tobytes()
