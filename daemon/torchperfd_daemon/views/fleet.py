"""Which daemons of a fleet have answered a request."""

from typing import Any

from torchperfd.v1 import control_pb2

Answer = control_pb2.ListRunsResponse | control_pb2.GetStepsResponse | control_pb2.DiagnoseResponse


def fleet_dict(answer: Answer) -> dict[str, Any]:
    """Return which daemons have answered and which not, for a document; empty without a fleet request."""
    if not answer.nodes:
        return {}
    return {
        "nodes": [
            {
                "node": node.node,
                "address": node.address or None,
                "version": node.version,
                "connected_ranks": node.ranks,
            }
            for node in answer.nodes
        ],
        "unreachable": [{"address": peer.address, "reason": peer.reason} for peer in answer.unreachable],
    }
