"""Conversion between the messages about goodput and the daemon's own types."""

from torchperfd.v1 import control_pb2
from torchperfd_daemon.goodput import Bucket, RankGoodput, RunGoodput


def run_message(own: RunGoodput) -> control_pb2.RunGoodput:
    """Pack a run's goodput."""
    return control_pb2.RunGoodput(run=own.run, ranks=[_rank_message(rank) for rank in own.ranks])


def run_goodput(message: control_pb2.RunGoodput) -> RunGoodput:
    """Unpack a run's goodput; a bucket of a later version is left out."""
    return RunGoodput(message.run, [_rank(rank) for rank in message.ranks])


def _rank_message(own: RankGoodput) -> control_pb2.RankGoodput:
    return control_pb2.RankGoodput(
        rank=own.rank,
        since_unix_seconds=own.since_unix_seconds,
        until_unix_seconds=own.until_unix_seconds,
        starts=own.starts,
        gpus=own.gpus,
        running=own.running,
        bucket_seconds={bucket.value: seconds for bucket, seconds in own.seconds.items()},
    )


def _rank(message: control_pb2.RankGoodput) -> RankGoodput:
    return RankGoodput(
        rank=message.rank,
        since_unix_seconds=message.since_unix_seconds,
        until_unix_seconds=message.until_unix_seconds,
        starts=message.starts,
        gpus=message.gpus,
        running=message.running,
        seconds={bucket: message.bucket_seconds.get(bucket.value, 0.0) for bucket in Bucket},
    )
