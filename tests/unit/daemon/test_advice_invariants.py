"""What holds for all advice: invariants on random traces, settings that torch has, promises that are kept."""

import inspect
import json
from pathlib import Path

import pytest
import torch
from benchmarks.simulated_device import slow_loops
from benchmarks.simulated_device.recorded import step_ns, write_trace
from benchmarks.simulated_device.slow_loops import TWINS, Twin
from tests.support.advice_invariants import violations, violations_of
from tests.support.advice_settings import unknown_names
from tests.support.random_traces import random_trace
from tests.unit.daemon import traces
from torch.utils import _foreach_utils

from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.advice import Advice, gather
from torchperfd_daemon.analysis.advice.updating import TORCH_OPTIMIZERS

_TRACES = 2000
_PARTS = 8


@pytest.mark.parametrize("part", range(_PARTS))
def test_advice_on_random_traces_keeps_the_invariants(part: int) -> None:
    """Idle within the recording, savings within the step, no tool's name, and only settings that exist."""
    settings: dict[str, int] = {}
    ranks: list[tuple[int | None, tuple[Advice, ...]]] = []
    for seed in range(part, _TRACES, _PARTS):
        events, facts = random_trace(seed)
        summary = analysis.summarise(traces.trace_of(events, **facts))
        assert list(violations(summary)) == [], seed
        settings |= {advice.setting: seed for advice in summary.advice}
        ranks = [*ranks[-3:], (seed, summary.advice)]
        steps = [
            each.saves_ns_per_step / each.share_of_step
            for _, advice in ranks
            for each in advice
            if each.share_of_step
        ]
        assert list(violations_of(gather(ranks), max(steps, default=0.0))) == [], seed
    assert {setting: seed for setting, seed in settings.items() if unknown_names(setting)} == {}


def test_random_traces_reach_every_kind_of_answer() -> None:
    """The traces are worth little unless rules fire on some and conditions stop them on others."""
    rules = set()
    for seed in range(200):
        events, facts = random_trace(seed)
        rules |= {each.rule for each in analysis.summarise(traces.trace_of(events, **facts)).advice}
    assert {"float64", "mixed-precision", "needless-synchronisation", "compiled-optimizer"} <= rules
    assert {"loader-workers", "exposed-communication", "fused-optimizer"} <= rules


def test_violations_of_a_false_promise_are_found() -> None:
    def advice(evidence: str, saves: float, share: float) -> Advice:
        return Advice("host-bound", evidence, saves, share, "change", "setting")

    assert list(violations_of([advice("the device idles 56.1 ms of the 25.2 ms recorded", 1, 0.1)], 10))
    assert list(violations_of([advice("fine", 11, 1.1)], 10))
    assert list(violations_of([advice("fine", 6, 0.6), advice("fine", 6, 0.6)], 10))
    assert list(violations_of([advice("most in torch::unwind::unwind()", 1, 0.1)], 10))
    assert not list(violations_of([advice("the device idles 5 ms of the 25.2 ms recorded", 5, 0.5)], 10))


@pytest.mark.parametrize(
    "setting",
    [
        "torch.optim.NorMuon(..., foreach=True)",
        "torch.optim.LBFGS(..., foreach=True)",
        "DataLoader(..., workers=4)",
        "TORCH_ALLOC_CONFIG=expandable_segments:True",
        "model.register_hook_of_communication(None)",
        "torch.distributed.fsdp.fully_shard(layer, reshard=False)",
    ],
)
def test_unknown_names_of_a_setting_are_found(setting: str) -> None:
    assert unknown_names(setting)


def test_optimizer_table_is_that_of_the_installed_torch() -> None:
    classes = {
        name: set(inspect.signature(kind).parameters)
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and kind is not torch.optim.Optimizer
    }
    assert set(TORCH_OPTIMIZERS) == set(classes)
    for name, arguments in classes.items():
        assert TORCH_OPTIMIZERS[name].foreach == ("foreach" in arguments), name
        assert bool(TORCH_OPTIMIZERS[name].fused_on) == ("fused" in arguments), name


def test_optimizer_options_are_for_devices_that_torch_supports() -> None:
    fused = set(_foreach_utils._get_fused_kernels_supported_devices())
    foreach = set(_foreach_utils._get_foreach_kernels_supported_devices())
    for name, kind in TORCH_OPTIMIZERS.items():
        assert kind.fused_on <= fused, name
        for device in ("cuda", "xpu", "mtia", "mps", "cpu"):
            if kind.option_for(device) == "foreach=True":
                assert device in foreach, name


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
