"""What marks the steps of a trace, and whose times they are: the host's, or the device's where it lags."""

from typing import Any

import pytest
from tests.unit.daemon import traces

from torchperfd.document.terminal import render
from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.comparison_report import headline

US, MS = 1_000, 1_000_000


def annotation(name: str, start: int, end: int, **more: Any) -> str:
    return traces.event(name, start, end, cat="user_annotation", **more)


def launched(
    number: int, at: int, start: int, end: int, *, name: str = "bake_mm", stream: int = 7, **args: Any
) -> list[str]:
    """One operator, its launch, and the kernel that this started."""
    linked = {"correlation": number, "External id": number}
    return [
        traces.event("aten::mm", at, at + 100 * US, args={"External id": number, **args}),
        traces.event("cudaLaunchKernel", at + 20 * US, at + 30 * US, cat="cuda_runtime", args=linked),
        traces.event(name, start, end, cat="kernel", thread=stream, args=linked),
    ]


def ahead(count: int, host: int, device: int, name: str = "bake_mm", **args: Any) -> list[str]:
    """Steps that the host launches every ``host`` ns, and that keep the device busy for ``device`` ns."""
    events = []
    for step in range(count):
        at, start = step * host, 500 * US + step * device
        events.append(annotation(f"ProfilerStep#{step + 3}", at, at + host))
        events += launched(step + 50, at + 100 * US, start, start + device, name=name, **args)
    return events


def summary(events: list[str], *, samples: bool = False) -> analysis.Summary:
    return analysis.summarise(traces.trace_of(events), samples=samples)


def text_of(found: analysis.Summary) -> str:
    return render(analysis.summary_document(found, None))


FLOATS = {"Input Dims": [[8, 8], [8, 8]], "Input type": ["float", "float"]}


def test_steps_host_runs_ahead_are_timed_on_device() -> None:
    found = summary(ahead(4, MS, 10 * MS, "ampere_sgemm_128x64_tn", **FLOATS))
    assert [step.duration_ns for step in found.steps] == [10 * MS] * 4
    assert [step.start_ns for step in found.steps] == [500 * US + k * 10 * MS for k in range(4)]
    assert [step.host_duration_ns for step in found.steps] == [MS] * 4
    assert [each.busy_ns for each in found.step_breakdowns] == [10 * MS] * 4
    assert found.steps_timed_by == "device"
    assert [sum(each.values()) for each in found.step_phases] == [MS] * 4
    text = text_of(found)
    assert "4 steps, 3 to 6: median 10.000 ms" in text
    assert "timed on the device, since the host runs ahead of it with 1.000 ms a step" in text
    (advice,) = found.advice
    assert (advice.rule, advice.saves_ns_per_step, advice.share_of_step) == ("mixed-precision", 5 * MS, 0.5)


def test_steps_device_keeps_up_are_timed_on_host() -> None:
    # The last kernel outlasts the last step by 40 µs of 4 ms: no more than any device does.
    found = summary(ahead(4, MS, 890 * US))
    assert found.steps_timed_by == "host"
    assert [step.duration_ns for step in found.steps] == [MS] * 4
    document = analysis.to_dict(found, None)
    assert document["steps_from"] == {"source": "profiler", "mark": "ProfilerStep#", "timed_by": "host"}
    assert document["steps"][0]["host_duration_us"] == 1000


def test_steps_host_waits_in_the_last_one_are_the_devices() -> None:
    # Nine steps of 6 ms; in the tenth the host reads the loss and has waited for the device by its end.
    events = ahead(10, 6 * MS, 10 * MS)[:-4]
    events.append(annotation("ProfilerStep#12", 54 * MS, 101 * MS))
    events += launched(70, 54 * MS, 90_500 * US, 100_500 * US)
    found = summary(events)
    assert [step.duration_ns for step in found.steps] == [10 * MS] * 10
    assert [step.host_duration_ns for step in found.steps] == [*[6 * MS] * 9, 47 * MS]


def test_steps_uneven_without_a_queue_are_the_hosts() -> None:
    # The first kernel of a step comes at its begin or at its end, so that the device's steps would be others.
    events, at = [], 0
    for number, length in enumerate((2, 3, 2, 3, 2, 3)):
        events.append(annotation(f"ProfilerStep#{number}", at, at + length * MS))
        first = at + (100 * US if number % 2 else 1500 * US)
        events += launched(number + 1, first, first + 30 * US, first + 300 * US)
        at += length * MS
    found = summary(events)
    assert found.steps_timed_by == "host"


def test_steps_side_stream_runs_early_does_not_begin_a_step() -> None:
    events = ahead(4, MS, 10 * MS)
    for step in range(4):
        # A copy ahead of time on a stream of its own, as soon as the host asks for it.
        at = step * MS + 300 * US
        events += launched(step + 80, at, at + 50 * US, at + 60 * US, name="prefetch", stream=20)
    assert [step.duration_ns for step in summary(events).steps] == [10 * MS] * 4


def test_steps_kernels_from_before_the_recording_are_in_none() -> None:
    events = ahead(4, MS, 10 * MS)
    events.append(traces.event("old", 0, 500 * US, cat="kernel", thread=7, args={"correlation": 7}))
    assert [step.duration_ns for step in summary(events).steps] == [10 * MS] * 4


def test_steps_step_without_kernels_keeps_the_host_time() -> None:
    events = [*ahead(4, MS, 10 * MS), annotation("ProfilerStep#7", 4 * MS, 5 * MS)]
    assert [step.duration_ns for step in summary(events).steps] == [*[10 * MS] * 4, MS]


def test_advice_host_work_beside_busy_device_saves_nothing() -> None:
    events = ahead(4, MS, 10 * MS)
    draws = [
        annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, at + 90 * US)
        for at in range(0, 4 * MS, MS)
    ]
    assert summary(events + draws).advice == ()


def test_compare_kernels_doubled_while_host_runs_ahead() -> None:
    before, after = (summary(ahead(6, MS, each * MS), samples=True) for each in (10, 20))
    found = analysis.compare([before], [after])
    assert (found.step.before, found.step.after, found.step.status) == (10 * MS, 20 * MS, "changed")
    assert headline(found) == "B's steps take 20 ms, A's 10 ms (+100 %): +10 ms in bake_mm"


def test_compare_kernels_doubled_beside_the_host_are_named() -> None:
    # 0.2 of 1 ms, then 0.4: the step stays as long, but not everything is as before.
    before, after = (summary(ahead(6, MS, each * US), samples=True) for each in (200, 400))
    found = analysis.compare([before], [after])
    assert (found.step.before, found.step.after) == (MS, MS)
    line = headline(found)
    assert "no change" not in line
    assert "kernels changed: +200 µs (+100 %) in bake_mm" in line


def iteration(number: int, at: int, *, update: str = "Optimizer.step#SGD.step") -> list[str]:
    """10 ms that end with an update."""
    return [
        traces.event("aten::linear", at + MS, at + 6 * MS),
        annotation("Optimizer.zero_grad#SGD.zero_grad", at + 6 * MS, at + 7 * MS),
        annotation(update, at + 9 * MS, at + 10 * MS),
        traces.event("aten::_fused_sgd_", at + 9 * MS, at + 10 * MS - number),
    ]


def draw(start: int, end: int, iterator: str = "_SingleProcessDataLoaderIter") -> str:
    return annotation(f"enumerate(DataLoader)#{iterator}.__next__", start, end)


def starts_and_lengths(found: analysis.Summary) -> list[tuple[int, int]]:
    return [(step.start_ns // MS, step.duration_ns // MS) for step in found.steps]


def test_steps_unmarked_end_with_the_optimizer() -> None:
    found = summary([each for number in range(5) for each in iteration(number, number * 10 * MS)])
    # Times count from the first event, 1 ms after the first iteration's begin.
    assert starts_and_lengths(found) == [(0, 9), (9, 10), (19, 10), (29, 10), (39, 10)]
    assert [step.index for step in found.steps] == [1, 2, 3, 4, 5]
    assert analysis.to_dict(found, None)["steps_from"] == {
        "source": "optimizer",
        "mark": "Optimizer.step#SGD.step",
        "timed_by": "host",
    }
    assert "steps end with Optimizer.step#SGD.step" in text_of(found)
    assert found.step_phases[1]["optimizer"] == MS


def test_steps_unmarked_first_does_not_hold_the_setup() -> None:
    setup = traces.event("aten::empty", 0, 500 * MS)
    events = [each for number in range(5) for each in iteration(number, (60 + number) * 10 * MS)]
    assert starts_and_lengths(summary([setup, *events])) == [(600 + 10 * k, 10) for k in range(5)]


def test_steps_unmarked_two_optimizers_are_one_step() -> None:
    events = []
    for number in range(4):
        at = number * 20 * MS
        events += iteration(number, at, update="Optimizer.step#Adam.step")
        events += iteration(number, at + 10 * MS, update="Optimizer.step#SGD.step")
    assert [step.duration_ns // MS for step in summary(events).steps] == [19, 20, 20, 20]


def test_steps_unmarked_wrapped_optimizer_counts_once() -> None:
    events = [each for number in range(4) for each in iteration(number, number * 10 * MS)]
    events += [
        annotation("Optimizer.step#AcceleratedOptimizer.step", at + 9 * MS - 1, at + 10 * MS + 1)
        for at in range(0, 40 * MS, 10 * MS)
    ]
    assert len(summary(events).steps) == 4


def test_steps_unmarked_begin_with_draws_of_several_updates() -> None:
    events = []
    for batch in range(4):
        at = batch * 20 * MS
        events.append(draw(at, at + MS))
        events += iteration(0, at) + iteration(1, at + 10 * MS)
    found = summary(events)
    assert starts_and_lengths(found) == [(0, 20), (20, 20), (40, 20), (60, 20)]
    assert found.step_source == "loader"


def test_steps_unmarked_draws_alone_mark_inference() -> None:
    events = []
    for batch in range(3):
        events += [
            draw(batch * MS, batch * MS + 10),
            traces.event("aten::mm", batch * MS + 20, batch * MS + 50),
        ]
    events.append(draw(3 * MS, 3 * MS + 5))  # found nothing any more
    found = summary(events)
    assert [(step.start_ns, step.duration_ns) for step in found.steps] == [(k * MS, MS) for k in range(3)]


@pytest.mark.parametrize("numbered", [False, True])
def test_steps_unmarked_repeated_annotations(numbered: bool) -> None:
    events = [annotation("load", 0, 5 * MS)]
    for number in range(4):
        at, suffix = (10 + number * 3) * MS, f" {number}" if numbered else ""
        events.append(annotation(f"forward{suffix}", at, at + MS))
        events.append(annotation("inner", at, at + 10 * US))
        events.append(annotation(f"backward{suffix}", at + MS, at + 2 * MS))
    found = summary(events)
    assert starts_and_lengths(found) == [(10, 3), (13, 3), (16, 3), (19, 2)]
    assert (found.step_source, found.step_mark) == ("annotation", "forward 0" if numbered else "forward")


def test_steps_annotations_out_of_order_mark_none() -> None:
    order = ["a", "b", "b", "a", "a", "b"]
    events = [annotation(name, at * MS, (at + 1) * MS) for at, name in enumerate(order)]
    assert summary(events).steps == ()


def test_advice_without_steps_is_on_the_recording() -> None:
    events = []
    for number in range(200):
        at = number * 50 * US
        linked = {"correlation": number + 1, "External id": number + 1}
        events.append(traces.event("aten::glue", at, at + 40 * US, args={"External id": number + 1}))
        events.append(
            traces.event("cudaLaunchKernel", at + 20 * US, at + 30 * US, cat="cuda_runtime", args=linked)
        )
        events.append(traces.event("k", at + 32 * US, at + 37 * US, cat="kernel", thread=7, args=linked))
    found = summary(events)
    assert found.steps == ()
    assert found.breakdown.window_ns == 9955 * US
    (advice,) = found.advice
    assert (advice.rule, advice.per) == ("tiny-kernels", "recording")
    # 199 gaps of 45 µs, of which a graph leaves one each; recording 200 operators costs 0.7 µs each.
    assert advice.saves_ns_per_step == pytest.approx(199 * 44 * US, rel=0.02)
    text = render(analysis.advice_document(found.advice))
    assert "ms of the recording (" in text
    assert "200 kernels in the" in text


def test_advice_without_steps_knows_no_loops() -> None:
    dims = {"Input Dims": [[64]], "Input type": ["float"]}
    events = [traces.event("aten::mul", at * 4 * US, at * 4 * US + 2 * US, args=dims) for at in range(256)]
    assert summary(events).advice == ()


def test_advice_one_long_step_does_not_spoil_it() -> None:
    def steps(*lengths: int) -> list[str]:
        events, at = [], 0
        for number, length in enumerate(lengths):
            events.append(annotation(f"ProfilerStep#{number}", at, at + length))
            # What is longer is a collective that waits for another rank.
            events.append(traces.event("gemm", at, at + MS, cat="kernel", thread=7))
            events.append(
                traces.event("ncclDevKernel_AllReduce", at + MS, at + length, cat="kernel", thread=8)
            )
            at += length
        return events

    usual = [MS + 100 * US] * 9
    (expected,) = summary(steps(*usual)).advice
    (found,) = summary(steps(*usual, 500 * MS)).advice
    assert found.rule == expected.rule == "exposed-communication"
    assert found.saves_ns_per_step == pytest.approx(expected.saves_ns_per_step)
    assert found.evidence == expected.evidence


def test_advice_waits_that_come_around_are_kept() -> None:
    events = []
    for number in range(8):
        at = number * 40 * MS
        events.append(annotation(f"ProfilerStep#{number}", at, at + 40 * MS))
        if number % 4 == 3:
            events.append(draw(at, at + 30 * MS, "_MultiProcessingDataLoaderIter"))
    assert [each.rule for each in summary(events).advice] == ["loader-workers"]
