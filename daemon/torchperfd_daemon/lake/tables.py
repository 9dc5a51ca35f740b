"""The tables of the lake: their columns, the names of their objects, and the content of these.

An object is written by one node, once. Its name says which batch of the node's journal it holds, so that a
repeated upload replaces it with the same rows.
"""

import gzip
import io
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from torchperfd.v1.contract import PHASES
from torchperfd_daemon.errors import UsageError
from torchperfd_daemon.goodput.totals import Bucket

Kind = Literal["text", "integer", "number"]
Row = Mapping[str, Any]

PARQUET: Final = "parquet"
JSON_LINES: Final = "jsonl.gz"
"""What is written without pyarrow; gzip, since Python has it and all engines read it."""

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]")
_CLUSTER: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_GZIP_LEVEL: Final = 6


@dataclass(frozen=True, slots=True)
class Column:
    """A column.

    Attributes:
        help: Its meaning in `history --json`.
        is_large: Whether readers leave it in the objects until they need it.
    """

    name: str
    kind: Kind
    help: str
    is_large: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table; each of its rows begins with the columns of ``COMMON``."""

    name: str
    help: str
    own: tuple[Column, ...]

    @property
    def columns(self) -> tuple[Column, ...]:
        """All columns."""
        return (*COMMON, *self.own)


def _texts(**names: str) -> tuple[Column, ...]:
    return tuple(Column(name, "text", words) for name, words in names.items())


def _integers(**names: str) -> tuple[Column, ...]:
    return tuple(Column(name, "integer", words) for name, words in names.items())


def _numbers(**names: str) -> tuple[Column, ...]:
    return tuple(Column(name, "number", words) for name, words in names.items())


COMMON: Final = _texts(
    node="host name of the node that wrote the row",
    run="run",
    job="job name",
    owner="name of the user whose process it is",
)
_SPAN: Final = _numbers(since_unix_seconds="start of the span", until_unix_seconds="its end")
_COST: Final = (
    *_texts(
        cause="as in `diagnose --json`; `none` is healthy",
        evidence="measurements, in words, without lines of the script",
        fix="what to change",
    ),
    *_numbers(
        step_seconds="step that the cost is a part of",
        cost_seconds_per_step="what the cause costs",
        saves_seconds="predicted saving of the fix per step; 0 without a prediction",
    ),
)

TABLES: Final = {
    table.name: table
    for table in (
        Table(
            "steps",
            "training steps of a rank that ended in ten seconds",
            (
                *_numbers(time_unix_seconds="start of the ten seconds"),
                *_integers(rank="rank", steps="number of steps"),
                *_numbers(
                    seconds="their sum",
                    longest_seconds="the longest",
                    **{f"{phase}_seconds": f"their time in `{phase}`" for phase in PHASES},
                    user_seconds="their time in phases of the script's own",
                ),
            ),
        ),
        Table(
            "goodput",
            "what a rank's time was spent on, in the hour before the row",
            (
                *_SPAN,
                *_integers(rank="rank", gpus="its GPUs", starts="processes so far"),
                *_numbers(**{f"{bucket.value}_seconds": f"time in `{bucket.value}`" for bucket in Bucket}),
            ),
        ),
        Table(
            "verdicts",
            "a verdict on a run while it stood, at most an hour",
            (
                *_SPAN,
                *_COST,
                *_integers(
                    position="0 is the verdict, others are further causes",
                    culprit_rank="rank to blame; null for all",
                    gpus="GPUs of the run's ranks here",
                ),
                *_texts(
                    culprit_node="its node",
                    phase="phase",
                    account="JSON of the step's account, as in `diagnose --json`",
                ),
                *_numbers(lost_seconds="time that the cause cost the run in the span"),
            ),
        ),
        Table(
            "runs",
            "a run's ranks of one node, once all have ended",
            (
                *_SPAN,
                *_texts(
                    ending="`finished`, `failed`, or `left` without a word",
                    outcome="what the run made of an earlier promise",
                ),
                *_integers(
                    ranks="ranks here", world_size="ranks of the job", gpus="GPUs here", steps="steps"
                ),
                *_numbers(
                    samples="samples of all ranks here", mean_step_seconds="mean step, without the first"
                ),
                *_COST,
                *_texts(
                    torch_version="version of PyTorch",
                    python_version="version of Python",
                    client_version="version of torchperfd in the process",
                    slurm_job_id="Slurm's job",
                    pod_uid="Kubernetes' pod",
                ),
                Column(
                    "report", "text", "JSON of what `compare --lake` needs of the run's report", is_large=True
                ),
            ),
        ),
        Table(
            "captures",
            "a capture that has ended",
            (
                *_SPAN,
                *_texts(
                    capture_id="id", trigger="what asked for it", state="state", reason="why not complete"
                ),
                *_integers(ranks="ranks", bytes="size of the traces"),
            ),
        ),
    )
}
"""All tables, by name."""

STEPS, GOODPUT, VERDICTS, RUNS, CAPTURES = TABLES


def check_cluster(name: str) -> str:
    """Return a cluster's name if it can be part of an object's name.

    Raises:
        UsageError: It cannot.
    """
    if not _CLUSTER.fullmatch(name):
        raise UsageError(
            f"{name[:80]!r} cannot be a cluster's name",
            "use up to 64 letters, digits, dots, dashes and underscores in --lake-cluster",
        )
    return name


def day_of(unix_seconds: float) -> str:
    """Return the UTC date, which is the partition of rows that were recorded then."""
    return time.strftime("%Y-%m-%d", time.gmtime(unix_seconds))


def object_key(table: str, date: str, cluster: str, name: str) -> str:
    """Return the key of an object, below the lake's prefix."""
    return f"table={table}/date={date}/cluster={cluster}/{name}"


def object_name(node: str, journal: str, sequence: int, form: str) -> str:
    """Return the name of the object of one batch, which no other batch of any node has."""
    return f"{_UNSAFE.sub('_', node)[:64]}-{journal}-{sequence:08d}.{form}"


def json_lines(documents: Iterable[bytes]) -> bytes:
    """Compress rows, one JSON object each; equal rows give equal bytes."""
    # Without a time in its header.
    return gzip.compress(b"".join(each + b"\n" for each in documents), _GZIP_LEVEL, mtime=0)


def parquet(table: str, content: bytes) -> bytes:
    """Return compressed JSON lines as a Parquet file; imports pyarrow."""
    import pyarrow as pa
    import pyarrow.json as pa_json
    import pyarrow.parquet as pq

    types = {"text": pa.string(), "integer": pa.int64(), "number": pa.float64()}
    schema = pa.schema([pa.field(column.name, types[column.kind]) for column in TABLES[table].columns])
    # What a row lacks is null; what a later version has put into the journal is left out.
    parsing = pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    reading = pa_json.ReadOptions(use_threads=False)
    rows = pa_json.read_json(io.BytesIO(gzip.decompress(content)), reading, parsing)
    output = io.BytesIO()
    # Small files, in which the schema for Arrow alone, statistics and dictionaries of numbers are the half.
    pq.write_table(
        rows.select(schema.names),
        output,
        compression="zstd",
        store_schema=False,
        write_statistics=[name for name in schema.names if name.endswith("unix_seconds")],
        use_dictionary=[column.name for column in TABLES[table].columns if column.kind == "text"],
    )
    return output.getvalue()
