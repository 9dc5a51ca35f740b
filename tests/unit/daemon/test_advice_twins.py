"""Twins of the loops of docs/gpu-results.md in virtual time: what advice promises, and what it then gives."""

import json
from pathlib import Path

import pytest
from benchmarks.simulated_device import slow_loops
from benchmarks.simulated_device.recorded import step_ns, write_trace
from benchmarks.simulated_device.slow_loops import TWINS, Twin

from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.advice import Advice

# Recording makes the host of an H200 take 2.1 times as long.
_SLOWDOWNS = (1.0, 2.1)


def advice_on(twin: Twin, directory: Path, slowdown: float) -> dict[str, Advice]:
    path = directory / "rank0.json"
    write_trace(twin.slow, path, slowdown=slowdown, facts=dict(twin.facts), **twin.more)
    if twin.reserved:
        document = json.loads(path.read_text())
        properties = [{"computeMajor": 9, "totalGlobalMem": 100}]
        args = {"Bytes": 1, "Device Type": 1, "Total Reserved": twin.reserved}
        first = document["traceEvents"][0]["ts"]
        memory = {"ph": "i", "name": "[memory]", "cat": "cpu_instant_event", "pid": 1, "tid": 1, "s": "t"}
        document["traceEvents"].append(memory | {"ts": first, "args": args})
        path.write_text(json.dumps(document | {"deviceProperties": properties}))
    return {each.rule: each for each in analysis.summarise(analysis.load(path)).advice}


@pytest.mark.parametrize("slowdown", _SLOWDOWNS)
@pytest.mark.parametrize("scale", [0.7, 1.0, 1.4])
@pytest.mark.parametrize("rule", TWINS)
def test_promise_is_within_a_quarter_of_what_the_change_gives(
    rule: str, scale: float, slowdown: float, tmp_path: Path
) -> None:
    twin = TWINS[rule](scale)
    gained = step_ns(twin.slow) - step_ns(twin.fixed) / twin.batches
    found = advice_on(twin, tmp_path, slowdown)
    assert rule in found, found
    assert found[rule].saves_ns_per_step == pytest.approx(gained, rel=0.25)


def test_loader_hidden_behind_the_device_is_not_advised_on(tmp_path: Path) -> None:
    assert "loader-workers" not in advice_on(slow_loops.hidden_loader(), tmp_path, 1.0)


def test_host_bound_loop_is_told_so(tmp_path: Path) -> None:
    found = advice_on(slow_loops.small_images(), tmp_path, 2.1)
    assert next(iter(found)) == "tiny-kernels"


@pytest.mark.parametrize("rule", [rule for rule in TWINS if rule != "batch-size"])
def test_fixed_loop_is_not_told_the_same_again(rule: str, tmp_path: Path) -> None:
    """A batch may be doubled again while memory is free; every other change is made once."""
    twin = TWINS[rule](1.0)
    facts = {"unrecorded_phase_ns": {}, "loader": twin.facts.get("loader", {}) | {"workers": 8}}
    fixed = Twin(twin.rule, twin.fixed, twin.fixed, facts=facts)
    assert rule not in advice_on(fixed, tmp_path, 1.0)
