"""What a step is: the hook calls of real loops, in their real order, on a scripted clock."""

from itertools import pairwise

import pytest
from tests.unit.client.scripted import NAMES, ScriptedLoop, Step

from torchperfd.steps.phases import BACKWARD, OPTIMIZER

# What ScriptedLoop.train_on_batch comes to, less the draw.
BATCH = {
    "forward": (1, 100),
    "loss": (1, 20),
    "backward": (1, 200),
    "optimizer": (1, 50),
    "zero_grad": (1, 5),
    "other": (1, 7),
}
BATCH_NS = 382


@pytest.fixture
def scripted() -> ScriptedLoop:
    return ScriptedLoop()


def test_a_plain_loop_has_a_step_per_batch(scripted: ScriptedLoop) -> None:
    for wait in (11, 12, 13):
        scripted.draw(wait, samples=4)
        scripted.train_on_batch()
    scripted.exhausted()
    assert scripted.steps() == [
        Step("train", index, BATCH_NS + wait, {**BATCH, "data": (1, wait)}, samples=4)
        for index, wait in enumerate((11, 12, 13))
    ]


def test_steps_follow_each_other_without_a_gap(scripted: ScriptedLoop) -> None:
    for _ in range(4):
        scripted.draw(1)
        scripted.train_on_batch()
    scripted.exhausted()
    steps = scripted.steps()
    for before, after in pairwise(steps):
        assert after.start == before.start + before.duration


def test_what_lies_between_two_epochs_belongs_to_no_step(scripted: ScriptedLoop) -> None:
    for _ in range(2):
        scripted.other(10**9)  # building an iterator
        for _ in range(2):
            scripted.draw(1)
            scripted.train_on_batch()
        scripted.exhausted(10**9)
        scripted.other(10**9)  # printing, saving
    assert [step.duration for step in scripted.steps()] == [BATCH_NS + 1] * 4


def test_zero_grad_first_is_the_same_step(scripted: ScriptedLoop) -> None:
    for _ in range(2):
        scripted.draw(1)
        scripted.zero_grad(5)
        scripted.forward(100)
        scripted.other(20)
        scripted.backward(200)
        scripted.optimizer_step(50)
        scripted.other(7)  # loss.item()
    scripted.exhausted()
    assert scripted.steps() == [
        Step("train", index, BATCH_NS + 1, {**BATCH, "data": (1, 1)}) for index in range(2)
    ]


def test_zero_grad_after_loss_splits_the_loss_but_not_its_call(scripted: ScriptedLoop) -> None:
    scripted.draw(1)
    scripted.forward(100)
    scripted.other(20)
    scripted.zero_grad(5)
    scripted.other(3)
    scripted.backward(200)
    scripted.optimizer_step(50)
    scripted.exhausted()
    assert scripted.steps() == [
        Step("train", 0, 379, {**BATCH, "data": (1, 1), "loss": (1, 23), "other": (1, 0)})
    ]


def test_accumulated_micro_batches_are_one_step(scripted: ScriptedLoop) -> None:
    for micro in range(8):
        scripted.draw(1, samples=2)
        scripted.forward(10)
        scripted.other(2)
        scripted.backward(30)
        if micro % 4 == 3:
            scripted.optimizer_step(50)
            scripted.zero_grad(5)
    scripted.exhausted()
    phases = {
        "data": (4, 4),
        "forward": (4, 40),
        "loss": (4, 8),
        "backward": (4, 120),
        "optimizer": (1, 50),
        "zero_grad": (1, 5),
        "other": (1, 0),
    }
    assert scripted.steps() == [Step("train", index, 227, phases, samples=8) for index in range(2)]


def test_a_group_of_batches_may_be_drawn_up_front(scripted: ScriptedLoop) -> None:
    """As the Hugging Face Trainer does when it accumulates."""
    for _ in range(2):
        for _ in range(3):
            scripted.draw(1, samples=2)
        for _ in range(3):
            scripted.forward(10)
            scripted.backward(30)
        scripted.optimizer_step(50)
    scripted.exhausted()
    steps = scripted.steps()
    assert [(step.kind, step.samples, step.duration) for step in steps] == [("train", 6, 173)] * 2
    assert steps[0].phases["data"] == (3, 3)


def test_batch_drawn_ahead_keeps_one_step_per_optimizer_step(scripted: ScriptedLoop) -> None:
    """As Accelerate does; the last batch is trained on after its loader has ended."""
    scripted.draw(11, samples=4)
    for wait in (12, 13):
        scripted.draw(wait, samples=4)
        scripted.train_on_batch()
    scripted.exhausted(10**9)
    scripted.train_on_batch()
    steps = scripted.steps()
    assert [(step.index, step.samples) for step in steps] == [(0, 4), (1, 4), (2, 4)]
    assert [step.phases.get("data") for step in steps] == [(2, 23), (1, 13), None]
    # The step of the last batch ends with its optimizer's: there is no other sign.
    assert [step.phases["backward"] for step in steps] == [(1, 200)] * 3
    assert steps[2].duration == 370


def test_a_validation_between_epochs_has_steps_of_its_own(scripted: ScriptedLoop) -> None:
    for _ in range(2):
        for _ in range(2):
            scripted.draw(1, samples=4)
            scripted.train_on_batch()
        scripted.exhausted()
        scripted.other(10**9)
        for _ in range(3):
            scripted.draw(2, samples=8)
            scripted.evaluate(40)
            scripted.other(3)  # the metric
        scripted.exhausted()
        scripted.other(10**9)
    steps = scripted.steps()
    assert [(step.kind, step.index) for step in steps] == [
        *(("train", index) for index in (0, 1)),
        *(("validate", index) for index in (0, 1, 2)),
        *(("train", index) for index in (2, 3)),
        *(("validate", index) for index in (3, 4, 5)),
    ]
    evaluated = {"data": (1, 2), "forward": (1, 40), "loss": (1, 3), "other": (1, 0)}
    assert [step for step in steps if step.kind == "validate"] == [
        Step("validate", index, 45, evaluated, samples=8) for index in range(6)
    ]
    assert [step.duration for step in steps if step.kind == "train"] == [BATCH_NS + 1] * 4


def test_validation_within_an_epoch_takes_no_training_time(scripted: ScriptedLoop) -> None:
    scripted.draw(1)
    scripted.train_on_batch()
    for _ in range(2):
        scripted.draw(2)
        scripted.evaluate(40)
    scripted.exhausted()
    scripted.draw(1)
    scripted.train_on_batch()
    scripted.exhausted()
    steps = scripted.steps()
    assert [(step.kind, step.index, step.duration) for step in steps] == [
        ("train", 0, BATCH_NS + 1),
        ("validate", 0, 42),
        ("validate", 1, 42),
        ("train", 1, BATCH_NS + 1),
    ]


def test_validation_without_loader_is_recognised_by_forwards(scripted: ScriptedLoop) -> None:
    scripted.draw(1)
    scripted.train_on_batch()
    for _ in range(3):
        scripted.evaluate(40)
        scripted.other(3)
    scripted.draw(1)
    scripted.train_on_batch()
    scripted.exhausted()
    assert [(step.kind, step.index, step.duration) for step in scripted.steps()] == [
        ("train", 0, BATCH_NS + 1),
        *(("validate", index, 43) for index in range(3)),
        ("train", 1, BATCH_NS + 1),
    ]


def test_forward_without_gradients_before_backward_is_training(scripted: ScriptedLoop) -> None:
    """A teacher, a target network, a rollout."""
    for _ in range(2):
        scripted.draw(1)
        scripted.evaluate(40)
        scripted.train_on_batch()
    scripted.exhausted()
    steps = scripted.steps()
    assert [(step.kind, step.duration) for step in steps] == [("train", BATCH_NS + 41)] * 2
    assert steps[0].phases["forward"] == (2, 140)


def test_a_model_in_evaluation_mode_that_is_trained_is_training(scripted: ScriptedLoop) -> None:
    """Frozen batch norms, accumulating: the forward looks like evaluation, the backward does not."""
    for _ in range(2):
        scripted.draw(1)
        scripted.evaluate(10)
        scripted.backward(30)
    scripted.optimizer_step(50)
    scripted.exhausted()
    assert [(step.kind, step.duration) for step in scripted.steps()] == [("train", 132)]


def test_step_without_loader_runs_between_optimizer_steps(scripted: ScriptedLoop) -> None:
    for _ in range(3):
        scripted.train_on_batch()
    first, second, third = scripted.steps()
    assert first == Step("train", 0, 370, {**without(BATCH, "zero_grad"), "other": (1, 0)})
    assert second == Step("train", 1, BATCH_NS, BATCH)
    assert third == Step("train", 2, BATCH_NS, BATCH)


def test_closure_inside_the_optimizer_keeps_its_own_times(scripted: ScriptedLoop) -> None:
    """As LBFGS and Lightning do."""
    scripted.draw(1)
    scripted.loop.optimizer_begin()
    for _ in range(2):
        scripted.other(3)
        scripted.zero_grad(5)
        scripted.forward(100)
        scripted.other(20)
        scripted.backward(200)
    scripted.loop.optimizer_end()
    scripted.exhausted()
    assert scripted.steps() == [
        Step(
            "train",
            0,
            657,
            {
                "data": (1, 1),
                "optimizer": (1, 46),
                "zero_grad": (2, 10),
                "forward": (2, 200),
                "backward": (2, 400),
                "other": (1, 0),
            },
        )
    ]


def test_two_optimizers_in_a_step_are_one_step(scripted: ScriptedLoop) -> None:
    for _ in range(2):
        scripted.draw(1)
        scripted.train_on_batch()
        scripted.train_on_batch()
    scripted.exhausted()
    steps = scripted.steps()
    assert [(step.index, step.duration) for step in steps] == [(0, 765), (1, 765)]
    assert steps[0].phases["optimizer"] == (2, 100)


def test_an_optimizer_inside_an_optimizer_is_one_call(scripted: ScriptedLoop) -> None:
    """As ZeroRedundancyOptimizer does."""
    scripted.loop.optimizer_begin()
    scripted.other(3)
    scripted.optimizer_step(50)
    scripted.other(4)
    scripted.loop.optimizer_end()
    assert scripted.steps() == [Step("train", 0, 57, {"optimizer": (1, 57), "other": (1, 0)})]


def test_a_draw_inside_a_draw_is_not_an_edge(scripted: ScriptedLoop) -> None:
    """A data set that itself reads from a loader, in this process."""
    for _ in range(2):
        scripted.loop.draw_begin()
        scripted.draw(30)
        scripted.other(4)
        scripted.loop.draw_end(4)
        scripted.train_on_batch()
    scripted.loop.draw_begin()
    scripted.exhausted(10)
    scripted.loop.draw_stop()
    steps = scripted.steps()
    assert [(step.index, step.duration) for step in steps] == [(0, BATCH_NS + 34), (1, BATCH_NS + 34)]
    assert steps[0].phases["data"] == (1, 34)


def test_second_loader_restarted_mid_step_keeps_the_step(scripted: ScriptedLoop) -> None:
    scripted.draw(1, samples=4)
    scripted.exhausted(6, iterator=16)  # the other loader has ended…
    scripted.draw(2, samples=4, iterator=24)  # …and begins anew
    scripted.train_on_batch()
    scripted.exhausted()
    assert scripted.steps() == [
        Step("train", 0, BATCH_NS + 9, {**BATCH, "data": (3, 9)}, samples=8),
    ]


def test_draws_that_lead_to_nothing_are_no_step(scripted: ScriptedLoop) -> None:
    """Counting a data set, computing its mean."""
    for _ in range(5):
        scripted.draw(10, samples=4)
    scripted.exhausted()
    scripted.loop.finish()
    assert scripted.steps() == []


# What is known only later.


def test_batch_with_zero_grad_after_next_draw_is_a_step(scripted: ScriptedLoop) -> None:
    for stepping in (True, False, True):
        scripted.draw(11, samples=4)
        scripted.zero_grad(5)
        scripted.forward(100)
        scripted.other(20)
        scripted.backward(200)
        if stepping:
            scripted.optimizer_step(50)
        scripted.other(7)
    scripted.exhausted()
    steps = scripted.steps()
    whole = {**BATCH, "data": (1, 11)}
    assert steps == [
        Step("train", 0, BATCH_NS + 11, whole, samples=4),
        Step("train", 1, BATCH_NS + 11 - 50, without(whole, "optimizer"), samples=4),
        Step("train", 2, BATCH_NS + 11, whole, samples=4),
    ]
    for before, after in pairwise(steps):
        assert after.start == before.start + before.duration
    assert (scripted.loop.skipped, scripted.loop.micro_batches) == (1, 3)


def test_batch_with_zero_grad_at_once_is_a_step(scripted: ScriptedLoop) -> None:
    for stepping in (False, True):
        scripted.draw(11)
        scripted.forward(100)
        scripted.backward(200)
        if stepping:
            scripted.optimizer_step(50)
        scripted.zero_grad(5)
    scripted.exhausted()
    assert [(step.index, step.duration) for step in scripted.steps()] == [(0, 316), (1, 366)]
    assert scripted.loop.skipped == 1


def test_a_step_that_a_scaler_calls_off_is_a_step(scripted: ScriptedLoop) -> None:
    for called_off in (True, False):
        scripted.draw(11)
        scripted.forward(100)
        scripted.backward(200)
        scripted.loop.optimizer_begin(7)
        scripted.clock.advance(50)
        scripted.loop.optimizer_end(7, called_off=called_off)
    scripted.exhausted()
    assert [step.duration for step in scripted.steps()] == [361, 361]
    assert (scripted.loop.skipped, scripted.loop.micro_batches) == (1, 2)


def play_two(scripted: ScriptedLoop) -> None:
    """A round of two optimizers, without a draw."""
    for optimizer in (1, 2):
        scripted.forward(100)
        scripted.other(20)
        scripted.backward(200)
        scripted.loop.optimizer_begin(optimizer)
        scripted.clock.advance(50)
        scripted.loop.optimizer_end(optimizer)
        scripted.zero_grad(5)


def test_two_optimizers_without_loader_are_one_step_at_once(scripted: ScriptedLoop) -> None:
    for _ in range(4):
        play_two(scripted)
    steps = scripted.steps()
    assert [(step.index, step.duration) for step in steps] == [(0, 745), (1, 750), (2, 750), (3, 750)]
    for before, after in pairwise(steps):
        assert after.start == before.start + before.duration
    for step in steps:
        assert step.phases["optimizer"] == (2, 100)
        assert sum(ns for _, ns in step.phases.values()) == step.duration
    assert scripted.loop.micro_batches == 4


def test_late_step_edge_precedes_next_step_of_its_optimizer(scripted: ScriptedLoop) -> None:
    watcher = scripted.loop.watcher = Watcher(scripted)
    play_two(scripted)
    assert watcher.edges == []
    play_two(scripted)
    assert watcher.edges == ["train 1", "train 2"]


def test_phase_around_the_loop_is_split_at_a_late_edge(scripted: ScriptedLoop) -> None:
    own = NAMES.slot("epoch")
    scripted.draw(1)
    scripted.train_on_batch()
    scripted.exhausted()
    scripted.steps()
    scripted.loop.enter(own)
    for stepping in (False, True):
        scripted.draw(11)
        scripted.zero_grad(5)
        scripted.other(3)
        scripted.backward(200)
        if stepping:
            scripted.optimizer_step(50)
        scripted.other(7)
    scripted.exhausted()
    scripted.loop.exit()
    steps = scripted.steps()
    assert [step.duration for step in steps] == [226, 276]
    for step in steps:
        assert sum(ns for _, ns in step.phases.values()) == step.duration
        assert (step.phases["epoch"], step.phases["backward"]) == ((1, 10), (1, 200))


def test_another_optimizer_may_take_over(scripted: ScriptedLoop) -> None:
    """The next fold, the next stage."""
    for optimizer in (1, 1, 1, 2, 2, 2):
        scripted.loop.optimizer_begin(optimizer)
        scripted.clock.advance(50)
        scripted.loop.optimizer_end(optimizer)
    scripted.loop.finish()
    assert [step.duration for step in scripted.steps()] == [50] * 6


def test_single_step_without_loader_is_counted_at_the_end(scripted: ScriptedLoop) -> None:
    play_two(scripted)
    assert scripted.steps() == []
    scripted.loop.finish()
    assert [step.duration for step in scripted.steps()] == [745]


def test_forward_without_gradients_between_optimizers_is_batchs(scripted: ScriptedLoop) -> None:
    scripted.draw(1, samples=4)
    scripted.train_on_batch()
    scripted.evaluate(40)
    scripted.train_on_batch()
    scripted.exhausted()
    (step,) = scripted.steps()
    assert (step.duration, step.samples) == (1 + 2 * BATCH_NS + 40, 4)
    assert step.phases["forward"] == (3, 240)


def test_optimizers_inside_a_backward_are_one_step(scripted: ScriptedLoop) -> None:
    for _ in range(2):
        scripted.draw(1)
        scripted.forward(100)
        depth = scripted.recorder.depth
        scripted.loop.backward_begin()
        for optimizer in (1, 2, 3):
            scripted.other(10)
            scripted.loop.optimizer_begin(optimizer)
            scripted.clock.advance(5)
            scripted.loop.optimizer_end(optimizer)
        scripted.loop.backward_end(depth)
        scripted.other(7)
    scripted.exhausted()
    phases = {
        "data": (1, 1),
        "forward": (1, 100),
        "loss": (1, 0),
        "backward": (1, 30),
        "optimizer": (3, 15),
        "other": (1, 7),
    }
    assert scripted.steps() == [Step("train", index, 153, phases) for index in range(2)]


def test_optimizers_on_autograds_threads_are_one_step(scripted: ScriptedLoop) -> None:
    """As for parameters on a GPU: their hooks run on the thread of the device."""
    for _ in range(2):
        scripted.draw(1)
        scripted.loop.backward_begin()
        scripted.other(10)
        scripted.loop.stepped_elsewhere(1)
        scripted.loop.stepped_elsewhere(2)
        scripted.loop.backward_end(0)
        scripted.loop.stepped_elsewhere(3)  # not in a backward: none of ours
    scripted.exhausted()
    assert [step.duration for step in scripted.steps()] == [11, 11]


def test_backward_that_raised_ends_its_inner_phases(scripted: ScriptedLoop) -> None:
    scripted.draw(1)
    scripted.loop.backward_begin()
    scripted.loop.optimizer_begin(1)
    scripted.other(5)  # it raises
    scripted.loop.backward_end(0)
    assert scripted.recorder.depth == 0


def test_micro_batches_that_are_left_over_take_no_pause_along(scripted: ScriptedLoop) -> None:
    for _ in range(2):
        for number in range(3):
            scripted.draw(1)
            scripted.backward(30)
            if scripted.loop.train_steps + number == 2:
                scripted.optimizer_step(50)
        scripted.exhausted()
        scripted.other(10**9)
        scripted.draw(2)
        scripted.evaluate(40)
        scripted.exhausted()
        scripted.other(10**9)
    scripted.loop.finish()
    assert max(step.duration for step in scripted.steps()) < 1000


def test_draws_of_a_closure_end_nothing(scripted: ScriptedLoop) -> None:
    for _ in range(2):
        scripted.loop.optimizer_begin()
        for _ in range(3):
            scripted.loop.closure_draw_begin()
            scripted.clock.advance(2)
            scripted.loop.draw_end(4)
            scripted.backward(10)
        scripted.loop.closure_draw_begin()
        scripted.loop.draw_stop()
        scripted.loop.optimizer_end()
    assert [(step.duration, step.samples) for step in scripted.steps()] == [(36, 12), (36, 12)]
    assert scripted.loop.micro_batches == 2


def test_a_save_between_steps_and_one_within(scripted: ScriptedLoop) -> None:
    def save(ns: int) -> None:
        depth = scripted.recorder.depth
        scripted.loop.save_begin()
        scripted.loop.save_begin()  # as a distributed one calls the plain one
        scripted.clock.advance(ns)
        scripted.loop.save_end(depth + 1)
        scripted.loop.save_end(depth)

    scripted.draw(1)
    scripted.train_on_batch()
    save(70)
    scripted.exhausted()
    save(10**9)
    (step,) = scripted.steps()
    assert step.phases["checkpoint"] == (1, 70)
    loop = scripted.loop
    assert (loop.saves, loop.save_ns, loop.save_squares, loop.saving) == (1, 10**9, 1e18, 0)


# The script says where steps end.


def test_explicit_steps_end_where_the_script_says(scripted: ScriptedLoop) -> None:
    for _ in range(3):
        scripted.other(9)
        scripted.loop.client_step(samples=32)
    scripted.loop.finish()
    # Nothing was open before the first call: a step starts where the one before has ended.
    assert [(step.index, step.duration, step.samples) for step in scripted.steps()] == [
        (0, 0, 32),
        (1, 9, 32),
        (2, 9, 32),
    ]


def test_explicit_steps_are_not_ended_by_draws_or_optimizers(scripted: ScriptedLoop) -> None:
    scripted.loop.client_step(0)
    scripted.steps()
    for _ in range(2):
        for _ in range(2):
            scripted.draw(1, samples=4)
            scripted.train_on_batch()
        scripted.loop.client_step(0)
    scripted.train_on_batch()
    scripted.train_on_batch()
    scripted.loop.client_step(0)
    steps = scripted.steps()
    assert [(step.kind, step.index, step.samples) for step in steps] == [
        ("train", 1, 8),
        ("train", 2, 8),
        ("train", 3, 0),
    ]
    assert [step.phases["optimizer"][0] for step in steps] == [2, 2, 2]


def test_explicit_step_within_user_phase_splits_the_phase(scripted: ScriptedLoop) -> None:
    scripted.loop.enter(BACKWARD)
    scripted.other(5)
    scripted.loop.client_step(0)
    scripted.other(70)
    scripted.loop.exit()
    scripted.loop.client_step(0)
    assert [step.phases["backward"] for step in scripted.steps()] == [(1, 5), (1, 70)]


def test_an_unfinished_explicit_step_is_no_step(scripted: ScriptedLoop) -> None:
    scripted.loop.client_step(0)
    scripted.draw(1)
    scripted.train_on_batch()
    scripted.loop.finish()
    assert [step.index for step in scripted.steps()] == [0]


# Things that go wrong in the script.


def test_an_optimizer_that_raised_is_over_with_the_next_draw(scripted: ScriptedLoop) -> None:
    scripted.draw(1)
    scripted.forward(100)
    scripted.backward(200)
    scripted.loop.optimizer_begin()
    scripted.forward(10)
    scripted.other(4)  # step() raises: no optimizer_end
    scripted.other(6)  # the script has caught it
    scripted.draw(1)
    scripted.train_on_batch()
    scripted.exhausted()
    (step,) = scripted.steps()
    # The batch that failed is part of the step that succeeded, as with accumulation.
    assert step.duration == 1 + 100 + 200 + 10 + 10 + 1 + BATCH_NS
    assert step.phases["optimizer"] == (2, 60)
    assert step.phases["data"] == (2, 2)
    assert scripted.recorder.depth == 0


def test_a_loader_that_raised_does_not_end_the_step(scripted: ScriptedLoop) -> None:
    scripted.draw(1)
    scripted.forward(100)
    scripted.exhausted(3)  # the hook reports an error like an end
    scripted.backward(200)
    scripted.optimizer_step(50)
    scripted.exhausted()
    assert [step.phases["data"] for step in scripted.steps()] == [(2, 4)]


def test_end_of_an_abandoned_optimizer_step_is_no_step(scripted: ScriptedLoop) -> None:
    scripted.loop.optimizer_begin()
    scripted.other(50)
    scripted.recorder.abandon()  # a hook has failed
    scripted.other(10**9)
    scripted.loop.optimizer_end()
    assert scripted.steps() == []
    assert scripted.loop.train_steps == 0
    scripted.train_on_batch()
    (step,) = scripted.steps()
    assert (step.index, step.duration) == (0, 370)


# The end of the loop.


def test_finish_ends_an_open_step_at_its_newest_boundary(scripted: ScriptedLoop) -> None:
    """A loop that breaks out of its loader."""
    scripted.draw(1, samples=4)
    scripted.train_on_batch()
    scripted.other(10**9)
    scripted.loop.finish()
    assert scripted.steps() == [
        Step("train", 0, 376, {**BATCH, "data": (1, 1), "other": (1, 0)}, samples=4),
    ]
    assert not scripted.recorder.is_open


def test_finish_ends_a_validation_step_too(scripted: ScriptedLoop) -> None:
    scripted.draw(2)
    scripted.evaluate(40)
    scripted.other(10**9)
    scripted.loop.finish()
    assert scripted.steps() == [
        Step("validate", 0, 42, {"data": (1, 2), "forward": (1, 40), "loss": (1, 0), "other": (1, 0)}),
    ]


def test_finish_forgets_a_step_without_an_optimizer_step(scripted: ScriptedLoop) -> None:
    scripted.draw(1)
    scripted.forward(100)
    scripted.backward(200)
    scripted.loop.finish()
    assert scripted.steps() == []


def test_finish_leaves_phases_that_are_still_open(scripted: ScriptedLoop) -> None:
    """The script has ended with an exception in the middle of a step."""
    scripted.draw(1)
    scripted.train_on_batch()
    scripted.loop.enter(OPTIMIZER)
    scripted.other(6)
    scripted.loop.finish()
    (step,) = scripted.steps()
    assert step.duration == BATCH_NS + 7
    assert step.phases["optimizer"] == (2, 56)


def test_finishing_twice_is_finishing_once(scripted: ScriptedLoop) -> None:
    scripted.draw(1)
    scripted.train_on_batch()
    scripted.loop.finish()
    scripted.loop.finish()
    assert len(scripted.steps()) == 1


def test_a_loop_may_begin_again_after_finish(scripted: ScriptedLoop) -> None:
    for _ in range(2):
        scripted.draw(1)
        scripted.train_on_batch()
        scripted.loop.finish()
        scripted.other(10**9)
    assert [(step.index, step.duration) for step in scripted.steps()] == [(0, 376), (1, 376)]


# The watcher.


class Watcher:
    """Notes the edges, and takes its time over each."""

    def __init__(self, scripted: ScriptedLoop) -> None:
        self.edges: list[str] = []
        self._scripted = scripted

    def train_edge(self, next_index: int) -> None:
        assert self._scripted.loop.train_steps == next_index
        self.edges.append(f"train {next_index}")
        self._scripted.other(10**9)

    def validate_edge(self) -> None:
        self.edges.append("validate")
        self._scripted.other(10**9)


def test_watcher_gets_every_edge_with_the_next_step_index(scripted: ScriptedLoop) -> None:
    watcher = scripted.loop.watcher = Watcher(scripted)
    for _ in range(2):
        scripted.draw(1)
        scripted.train_on_batch()
    for _ in range(2):
        scripted.draw(2)
        scripted.evaluate(40)
    scripted.draw(1)
    scripted.train_on_batch()
    scripted.loop.finish()
    assert watcher.edges == ["train 1", "train 2", "validate", "validate", "train 3"]
    # An edge comes before the draw of the step that it begins, and its time is no step's.
    assert [step.duration for step in scripted.steps()] == [BATCH_NS + 1] * 2 + [42] * 2 + [376]


def test_watcher_gets_edges_without_loader_and_explicit_edges(scripted: ScriptedLoop) -> None:
    watcher = scripted.loop.watcher = Watcher(scripted)
    scripted.train_on_batch()
    scripted.train_on_batch()
    scripted.loop.client_step(0)
    scripted.other(9)
    scripted.loop.client_step(0)
    assert watcher.edges == ["train 1", "train 2", "train 3", "train 4"]
    assert [step.duration for step in scripted.steps()] == [370, BATCH_NS, 12, 9]


def test_watcher_set_mid_step_gets_the_next_edge_first(scripted: ScriptedLoop) -> None:
    scripted.draw(1)
    scripted.train_on_batch()
    scripted.draw(1)
    watcher = scripted.loop.watcher = Watcher(scripted)
    scripted.train_on_batch()
    scripted.draw(1)
    assert watcher.edges == ["train 2"]


def without(phases: dict[str, tuple[int, int]], name: str) -> dict[str, tuple[int, int]]:
    return {phase: value for phase, value in phases.items() if phase != name}


def test_user_phase_around_a_whole_loop_hides_no_steps(scripted: ScriptedLoop) -> None:
    """`with client.phase("epoch"): for batch in loader: …`, twice."""
    own = NAMES.slot("epoch")
    for _ in range(2):
        scripted.loop.enter(own)
        scripted.other(10**9)  # set-up before the first draw belongs to no step
        for _ in range(2):
            scripted.draw(5, samples=4)
            scripted.train_on_batch()
            scripted.other(7)
        scripted.exhausted()
        scripted.other(10**9)
        scripted.loop.exit()
    steps = scripted.steps()
    assert [(step.index, step.samples) for step in steps] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert len({step.duration for step in steps}) == 1
    for step in steps:
        assert step.phases["data"] == (1, 5)
        assert step.phases["epoch"][1] >= 7
        assert sum(ns for _, ns in step.phases.values()) == step.duration


def test_pause_after_last_batch_drawn_ahead_is_in_no_step(scripted: ScriptedLoop) -> None:
    for _ in range(2):
        scripted.draw(11, samples=4)
        scripted.draw(12, samples=4)
        scripted.train_on_batch()
        scripted.exhausted()
        scripted.train_on_batch()
        scripted.other(10**9)
    steps = scripted.steps()
    assert len(steps) == 4
    assert max(step.duration for step in steps) < 10**6


# Drawn and not used; left early.


def train_drawn(scripted: ScriptedLoop, samples: int = 4, iterator: int = 8) -> None:
    scripted.draw(1, samples, iterator)
    scripted.train_on_batch()


def begin_another(scripted: ScriptedLoop, *, gone: int = 0, pause: int = 10**9) -> None:
    """Another loop begins, a while after; the iterator of the one before is gone, unless it is 0."""
    scripted.other(pause)
    if gone:
        scripted.loop.left(gone, for_sure=True)
    scripted.loop.pass_begins()


def test_batches_that_are_skipped_are_no_samples(scripted: ScriptedLoop) -> None:
    """Resumed in the middle of an epoch; the last batch is smaller than the others."""
    for _ in range(3):
        scripted.draw(1, samples=4)
    for samples in (4, 4, 2):
        train_drawn(scripted, samples)
    scripted.exhausted()
    assert [step.samples for step in scripted.steps()] == [4, 4, 2]
    assert scripted.loop.micro_batches == 3


def test_every_other_batch_that_is_skipped_is_no_sample(scripted: ScriptedLoop) -> None:
    for _ in range(3):
        scripted.draw(1, samples=4)
        train_drawn(scripted)
    scripted.exhausted()
    assert [step.samples for step in scripted.steps()] == [4] * 3


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_batches_drawn_ahead_are_samples_and_micro_batches(scripted: ScriptedLoop, ahead: int) -> None:
    left = 8
    for _ in range(ahead):
        scripted.draw(1, samples=4)
    for number in range(8):
        if left > ahead:
            scripted.draw(1, samples=4)
        elif left == ahead:
            scripted.exhausted()
        left -= 1
        scripted.forward(10)
        scripted.backward(30)
        if number % 2:
            scripted.loop.optimizer_begin(1)
            scripted.loop.optimizer_end(1)
    scripted.loop.finish()
    assert sum(step.samples for step in scripted.steps()) == 32
    assert (scripted.loop.train_steps, scripted.loop.micro_batches) == (4, 8)


def test_a_batch_that_a_closure_trains_on_is_used_once(scripted: ScriptedLoop) -> None:
    """As Lightning does, accumulating; LBFGS calls its closure many times."""
    scripted.draw(1, samples=4)
    for micro in range(4):
        scripted.draw(1, samples=4)
        if micro % 2:
            scripted.loop.optimizer_begin(1)
            for _ in range(3):
                scripted.backward(30)
            scripted.loop.optimizer_end(1)
        else:
            scripted.backward(30)
    scripted.exhausted()
    assert [step.samples for step in scripted.steps()] == [8, 8]
    assert scripted.loop.micro_batches == 4


def test_batch_drawn_before_training_is_in_no_step(scripted: ScriptedLoop) -> None:
    scripted.draw(7, samples=4, iterator=16)
    begin_another(scripted, gone=16)
    for _ in range(2):
        train_drawn(scripted)
    scripted.exhausted()
    assert [(step.samples, step.duration) for step in scripted.steps()] == [(4, BATCH_NS + 1)] * 2


def test_batch_drawn_by_a_kept_iterator_is_in_no_step(scripted: ScriptedLoop) -> None:
    scripted.draw(7, samples=4, iterator=16)
    scripted.other(10**9)
    scripted.loop.left(16, for_sure=False)
    scripted.loop.pass_begins()
    train_drawn(scripted)
    scripted.exhausted()
    assert [(step.samples, step.duration) for step in scripted.steps()] == [(4, BATCH_NS + 1)]


def test_a_second_iterator_by_name_is_not_left(scripted: ScriptedLoop) -> None:
    """Semi-supervised: both loaders are drawn from by hand, and one of them starts over."""
    for iterator in (16, 24):
        scripted.draw(1, samples=4, iterator=8)
        scripted.loop.left(16, for_sure=False)
        scripted.loop.left(8, for_sure=False) if iterator == 24 else None
        scripted.draw(1, samples=4, iterator=iterator)
        scripted.train_on_batch()
    scripted.loop.finish()
    assert [step.samples for step in scripted.steps()] == [8, 8]


@pytest.mark.parametrize("gone", [8, 0])
def test_a_pause_after_a_break_is_no_step(scripted: ScriptedLoop, gone: int) -> None:
    """The iterator may outlive its loop: a notebook keeps the frames of the newest exception."""
    for _ in range(2):
        train_drawn(scripted)
    scripted.draw(1, samples=4)
    scripted.forward(10)
    begin_another(scripted, gone=gone)
    train_drawn(scripted, iterator=16)
    scripted.exhausted(iterator=16)
    assert [(step.samples, step.duration) for step in scripted.steps()] == [(4, BATCH_NS + 1)] * 3


def test_a_pause_after_a_break_behind_a_step_is_no_step(scripted: ScriptedLoop) -> None:
    for _ in range(2):
        train_drawn(scripted)
    begin_another(scripted, gone=8)
    train_drawn(scripted, iterator=16)
    scripted.exhausted(iterator=16)
    assert [step.duration for step in scripted.steps()] == [BATCH_NS + 1, BATCH_NS - 6, BATCH_NS + 1]


def test_gradients_of_a_loop_left_early_may_yet_be_used(scripted: ScriptedLoop) -> None:
    train_drawn(scripted)
    for _ in range(2):
        scripted.draw(1, samples=4)
        scripted.backward(30)
    begin_another(scripted, gone=8)
    train_drawn(scripted, iterator=16)
    scripted.exhausted(iterator=16)
    assert [(step.samples, step.duration) for step in scripted.steps()] == [
        (4, BATCH_NS + 1),
        (12, 62 + BATCH_NS + 1),
    ]
    assert scripted.loop.micro_batches == 1 + 3


def test_an_iterator_for_every_batch_is_part_of_the_step(scripted: ScriptedLoop) -> None:
    """``next(iter(loader))`` in every step: what starting the workers takes must show."""
    for iterator in (8, 16, 24):
        if iterator > 8:
            begin_another(scripted, gone=iterator - 8, pause=500)
        train_drawn(scripted, iterator=iterator)
    scripted.loop.finish()
    assert [step.duration for step in scripted.steps()] == [BATCH_NS + 501] * 2 + [BATCH_NS - 6]


def test_the_draws_inside_a_draw_are_no_batches(scripted: ScriptedLoop) -> None:
    """A prefetcher around a loader: it draws two batches first, and hands out the last without a draw."""
    scripted.loop.draw_begin(8)
    scripted.draw(1, samples=4, iterator=16)
    scripted.draw(1, samples=4, iterator=16)
    scripted.loop.draw_end(4)
    scripted.train_on_batch()
    scripted.loop.draw_begin(8)
    scripted.exhausted(1, iterator=16)
    scripted.loop.draw_end(4)
    scripted.train_on_batch()
    scripted.exhausted()
    assert [step.samples for step in scripted.steps()] == [4, 4]


# Validation.


def test_draws_without_gradients_are_validation_for_any_model(scripted: ScriptedLoop) -> None:
    """The model inside of the one that trains is called: its forward is not seen."""
    train_drawn(scripted)
    for _ in range(3):
        scripted.draw(1, samples=8, iterator=16, gradients=False)
        scripted.other(40)
    scripted.exhausted(iterator=16, gradients=False)
    scripted.other(10**9)
    train_drawn(scripted, iterator=24)
    scripted.exhausted(iterator=24)
    assert [(step.kind, step.duration, step.samples) for step in scripted.steps()] == [
        ("train", BATCH_NS + 1, 4),
        *([("validate", 41, 8)] * 3),
        ("train", BATCH_NS + 1, 4),
    ]


def test_draws_in_evaluation_mode_are_validation(scripted: ScriptedLoop) -> None:
    """Gradients are on at the draw and off in the forward, as in Keras."""
    train_drawn(scripted)
    for _ in range(3):
        scripted.draw(1, samples=8, iterator=16, evaluation_mode=True)
    scripted.exhausted(iterator=16, evaluation_mode=True)
    assert [step.kind for step in scripted.steps()] == ["train", *["validate"] * 3]


@pytest.mark.parametrize("gone", [True, False])
def test_a_validation_that_draws_ahead_has_a_step_per_batch(scripted: ScriptedLoop, gone: bool) -> None:
    train_drawn(scripted)
    scripted.draw(1, samples=8, iterator=16, gradients=False)
    for _ in range(2):
        scripted.draw(1, samples=8, iterator=16, gradients=False)
        scripted.evaluate(40)
    scripted.exhausted(iterator=16, gradients=False)
    scripted.evaluate(40)
    if gone:
        scripted.loop.left(16, for_sure=True)
    train_drawn(scripted, iterator=24)
    scripted.exhausted(iterator=24)
    steps = scripted.steps()
    assert [step.kind for step in steps] == ["train", *["validate"] * 3, "train"]
    assert sum(step.samples for step in steps if step.kind == "validate") == 24


def test_batches_drawn_ahead_without_gradients_are_trained_on(scripted: ScriptedLoop) -> None:
    scripted.draw(1, samples=4, gradients=False)
    for _ in range(2):
        scripted.draw(1, samples=4, gradients=False)
        scripted.train_on_batch()
    scripted.exhausted(gradients=False)
    scripted.train_on_batch()
    steps = scripted.steps()
    assert [step.kind for step in steps] == ["train"] * 3
    assert (sum(step.samples for step in steps), scripted.loop.micro_batches) == (12, 3)


def train_without_drawing(scripted: ScriptedLoop, optimizer: int = 1) -> None:
    scripted.zero_grad(5)
    scripted.forward(100)
    scripted.backward(200)
    scripted.loop.optimizer_begin(optimizer)
    scripted.clock.advance(50)
    scripted.loop.optimizer_end(optimizer)


@pytest.mark.parametrize("evaluations", [1, 3])
def test_evaluation_between_steps_that_draw_nothing(scripted: ScriptedLoop, evaluations: int) -> None:
    """Full-batch training with a test after each step, or several batches of one now and then."""
    for _ in range(4):
        train_without_drawing(scripted)
        for _ in range(evaluations):
            scripted.evaluate(40)
            scripted.other(10)
    scripted.loop.finish()
    steps = scripted.steps()
    assert [step.duration for step in steps if step.kind == "train"] == [355] * 4
    validated = [step.duration for step in steps if step.kind == "validate"]
    assert len(validated) == 4 * evaluations
    assert set(validated[:-1]) == {50}


def test_evaluation_within_an_accumulation_that_draws_nothing(scripted: ScriptedLoop) -> None:
    train_without_drawing(scripted)
    for micro in range(6):
        scripted.forward(100)
        scripted.backward(200)
        if micro % 3 == 2:
            scripted.loop.optimizer_begin(1)
            scripted.loop.optimizer_end(1)
        elif micro == 3:
            scripted.evaluate(40)
            scripted.evaluate(40)
    scripted.loop.finish()
    steps = scripted.steps()
    assert [step.kind for step in steps].count("validate") == 2
    assert [step.duration for step in steps if step.kind == "train"] == [355, 900, 900]
    assert scripted.loop.micro_batches == 1 + 3 + 3


def act(scripted: ScriptedLoop, *, evaluation_mode: bool) -> None:
    scripted.loop.forward_begin(False, evaluation_mode=evaluation_mode)
    scripted.clock.advance(7)
    scripted.loop.forward_end()


@pytest.mark.parametrize("seen", [True, False])
def test_acting_is_no_validation(scripted: ScriptedLoop, seen: bool) -> None:
    """An agent acts without gradients; in evaluation mode, its training goes by methods of its own."""
    for _ in range(3):
        for _ in range(8):
            act(scripted, evaluation_mode=not seen)
        for _ in range(2):
            if seen:
                scripted.forward(100)
            scripted.backward(200)
            scripted.loop.optimizer_begin(1)
            scripted.loop.optimizer_end(1)
    scripted.loop.finish()
    assert [step.kind for step in scripted.steps()] == ["train"] * 6


# One draw, many steps.


def test_one_batch_drawn_once_is_trained_on_many_times(scripted: ScriptedLoop) -> None:
    scripted.draw(1, samples=4)
    for _ in range(50):
        train_without_drawing(scripted)
    scripted.loop.finish()
    steps = scripted.steps()
    assert [step.samples for step in steps] == [4, *[0] * 49]
    assert scripted.loop.micro_batches == 50
    assert all(step.phases["optimizer"] == (1, 50) for step in steps)


def test_a_batch_that_is_cut_up_outside_of_its_loader(scripted: ScriptedLoop) -> None:
    for _ in range(5):
        scripted.draw(1, samples=16)
        for _ in range(4):
            train_without_drawing(scripted)
    scripted.exhausted()
    steps = scripted.steps()
    assert (len(steps), sum(step.samples for step in steps)) == (20, 80)


def test_several_critic_steps_on_one_draw_are_one_step(scripted: ScriptedLoop) -> None:
    for optimizer in (1, 2):
        scripted.loop.optimizer_made(optimizer)
    for _ in range(4):
        scripted.draw(1, samples=16)
        for optimizer in (1, 1, 1, 2):
            train_without_drawing(scripted, optimizer)
    scripted.exhausted()
    steps = scripted.steps()
    assert [(step.samples, step.phases["optimizer"]) for step in steps] == [(16, (4, 200))] * 4


def test_evaluation_between_steps_on_one_batch(scripted: ScriptedLoop) -> None:
    scripted.draw(1, samples=16)
    for _ in range(5):
        train_without_drawing(scripted)
        scripted.evaluate(40)
    scripted.loop.finish()
    kinds = [step.kind for step in scripted.steps()]
    assert (kinds.count("train"), kinds.count("validate")) == (5, 4), "the first may be a sample of its batch"


# What a failed hook leaves behind.


def test_an_abandoned_step_is_not_set_aside(scripted: ScriptedLoop) -> None:
    """Of what had begun before, nothing is known; no later step may start there."""
    train_drawn(scripted)
    scripted.loop.abandon()
    scripted.other(10**9)
    scripted.evaluate(40)
    train_drawn(scripted)
    scripted.exhausted()
    for step in scripted.steps():
        assert sum(ns for _, ns in step.phases.values()) == step.duration < 10**9
