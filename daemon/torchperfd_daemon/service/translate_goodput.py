"""Conversion between the messages about goodput and the daemon's own types."""

from torchperfd.v1 import control_pb2
from torchperfd_daemon.goodput import Bucket, RankGoodput, RunGoodput
from torchperfd_daemon.service.fields import pack, unpack


def run_message(own: RunGoodput) -> control_pb2.RunGoodput:
    """Pack a run's goodput."""
    return control_pb2.RunGoodput(run=own.run, ranks=[_rank_message(rank) for rank in own.ranks])


def run_goodput(message: control_pb2.RunGoodput) -> RunGoodput:
    """Unpack a run's goodput; a bucket of a later version is left out."""
    return RunGoodput(message.run, [_rank(rank) for rank in message.ranks])


def _rank_message(own: RankGoodput) -> control_pb2.RankGoodput:
    seconds = {bucket.value: seconds for bucket, seconds in own.seconds.items()}
    return pack(control_pb2.RankGoodput, own, bucket_seconds=seconds)


def _rank(message: control_pb2.RankGoodput) -> RankGoodput:
    seconds = {bucket: message.bucket_seconds.get(bucket.value, 0.0) for bucket in Bucket}
    return RankGoodput(**unpack(message, RankGoodput), seconds=seconds)
