"""The fix for a wait for data follows from what the loader's workers were seen to do."""

from dataclasses import replace

from torchperfd.model.loader_facts import InputStages
from torchperfd.model.loader_workers import LoaderFacts, advise_loader
from torchperfd.model.process import CpuBinding
from torchperfd_daemon.diagnosis.remedies import contention_remedy, loader_remedy, without_fewer_workers

WORKERS = LoaderFacts(workers=2, cpus=4.0, batch_tensors=2, worker_cpu_seconds=0.001, batches_per_step=1.0)


def test_workers_that_start_anew_are_to_be_kept() -> None:
    facts = replace(WORKERS, starts=22, start_seconds=0.55, starts_per_step=1 / 8)
    advice = advise_loader(facts, 0.095, 0.070)
    assert advice is not None
    assert (advice.rule, advice.workers) == ("persistent-workers", 2)
    assert advice.setting == "DataLoader(..., num_workers=2, persistent_workers=True)"
    assert 0.06 < advice.saves_seconds <= 0.070
    assert "workers start anew every 8 steps" in advice.assumes
    few = advise_loader(replace(facts, starts=2), 0.095, 0.070)
    assert few is None or few.rule != "persistent-workers"


def test_idle_workers_are_too_many_or_none_needed() -> None:
    stages = InputStages(2, 20, fetch_seconds=0.0002, collate_seconds=0.0001, idle=0.96)
    advice = advise_loader(replace(WORKERS, stages=stages, receive_seconds=0.0005), 0.0035, 0.0016)
    assert advice is not None
    assert advice.setting == "DataLoader(..., num_workers=0)"


def test_workers_for_tiny_items_cost_more_than_they_save() -> None:
    stages = InputStages(4, 20, fetch_seconds=0.0002, collate_seconds=0.0001, send_seconds=0.0003, idle=0.96)
    tiny = replace(WORKERS, stages=stages, receive_seconds=0.0008)
    assert tiny.handover_seconds == 0.0011
    assert tiny.costs_more_to_hand_over
    assert not replace(tiny, stages=replace(stages, idle=0.1)).costs_more_to_hand_over
    assert not replace(tiny, stages=replace(stages, fetch_seconds=0.002)).costs_more_to_hand_over
    assert not replace(tiny, stages=None).costs_more_to_hand_over
    assert LoaderFacts(stages=stages, receive_seconds=0.0008).handover_seconds == 0.0


def test_workers_that_compete_for_cpus_are_not_to_be_more() -> None:
    """Without the time in line for a CPU they seem to wait for storage."""
    facts = LoaderFacts(workers=8, cpus=2.0, worker_cpu_seconds=0.01, worker_queued=0.7)
    advice = advise_loader(facts, 1.0, 0.9)
    assert advice is None or advice.workers <= 8


def test_slow_worker_is_named_and_no_number_advised() -> None:
    fix = loader_remedy(replace(WORKERS, slow_worker=3), 0.1, 0.08).fix
    assert fix.startswith("worker 3 is slow")
    assert "in_order=False" in fix
    assert "num_workers" not in fix


def test_binding_comes_before_other_fixes() -> None:
    crowded = replace(WORKERS, worker_queued=0.5)
    fix = loader_remedy(crowded, 0.1, 0.08, binding=CpuBinding(1, 2)).fix
    assert fix.startswith("undo the CPU affinity: this process and its workers may use 1 CPU of 2; `taskset")
    assert contention_remedy(crowded, 1, binding=CpuBinding(1, 2)).fix.startswith("undo the CPU affinity")
    waiting = replace(WORKERS, worker_queued=0.01)
    assert "affinity" not in loader_remedy(waiting, 0.1, 0.08, binding=CpuBinding(1, 2)).fix


def test_threads_beyond_the_cpus_need_no_loader() -> None:
    assert contention_remedy(None, 24, cpus=2.0).fix.startswith("torch.set_num_threads(2) (now 24); or ")
    assert "threads" not in contention_remedy(None, 1, cpus=2.0).fix


def test_fewer_workers_only_help_those_that_compete() -> None:
    more = "end or move the other programs"
    for facts in (
        LoaderFacts(workers=1, cpus=2.0),
        LoaderFacts(workers=2, cpus=8.0),
        LoaderFacts(workers=4, cpus=2.0, worker_queued=0.01),
    ):
        assert contention_remedy(facts, 1).fix.startswith(more)
    crowd = contention_remedy(LoaderFacts(workers=4, cpus=2.0, worker_queued=0.5), 1).fix
    assert crowd.startswith("use fewer loader workers")
    assert without_fewer_workers(crowd).startswith(more)
