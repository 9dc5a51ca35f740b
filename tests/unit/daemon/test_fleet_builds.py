"""The line that `ps --fleet` has if nodes run different builds of torchperfd."""

from torchperfd.v1 import control_pb2
from torchperfd_daemon.views.fleet import builds_text


def node(name: str, version: str = "0.2.0", revision: str = "6ba749a4c0de") -> control_pb2.FleetNode:
    return control_pb2.FleetNode(node=name, version=version, revision=revision)


def test_builds_text_one_build_is_empty() -> None:
    assert builds_text([node("n1"), node("n2")]) == ""
    assert builds_text([]) == ""


def test_builds_text_names_nodes_of_each_build() -> None:
    nodes = [node("n1"), node("n2", revision="1111aaaa2222"), node("n3", "0.1.0", ""), node("n4")]
    assert builds_text(nodes) == (
        "the nodes run different builds of torchperfd: 0.2.0 (6ba749a4c0de) on n1, n4;"
        " 0.2.0 (1111aaaa2222) on n2; 0.1.0 on n3"
    )


def test_builds_text_many_nodes_are_counted() -> None:
    nodes = [*(node(f"n{index}") for index in range(198)), node("old-1", "0.1.0"), node("old-2", "0.1.0")]
    assert builds_text(nodes).endswith(
        ": 0.2.0 (6ba749a4c0de) on 198 nodes; 0.1.0 (6ba749a4c0de) on old-1, old-2"
    )
