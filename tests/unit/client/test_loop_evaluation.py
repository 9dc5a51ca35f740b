"""What is no training: evaluations that look like training, acting, and optimizers of their own pace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.client.scripted import ScriptedLoop, Step

TRAINS, TESTS, OTHER_TESTS = 8, 16, 24
"""Iterators."""


@pytest.fixture
def scripted() -> ScriptedLoop:
    return ScriptedLoop()


def kinds(steps: list[Step]) -> tuple[int, int]:
    """Return how many steps were for training and for validation; check that phases sum to them."""
    for step in steps:
        assert sum(ns for _, ns in step.phases.values()) == step.duration
    names = [step.kind for step in steps]
    return names.count("train"), names.count("validate")


def samples(steps: list[Step], kind: str) -> int:
    return sum(step.samples for step in steps if step.kind == kind)


def step_on(scripted: ScriptedLoop, optimizer: int = 1, *, forward: bool = True) -> None:
    if forward:
        scripted.forward(100)
    scripted.backward(200)
    scripted.loop.optimizer_begin(optimizer)
    scripted.clock.advance(50)
    scripted.loop.optimizer_end(optimizer)


def act(scripted: ScriptedLoop, ns: int = 10) -> None:
    """A forward without gradients, in training mode."""
    scripted.loop.forward_begin(False, evaluation_mode=False)
    scripted.clock.advance(ns)
    scripted.loop.forward_end()


def evaluate_with_gradients(scripted: ScriptedLoop, batches: int, iterator: int = TESTS) -> None:
    """Evaluate in training mode, with gradients."""
    for _ in range(batches):
        scripted.draw(5, samples=4, iterator=iterator)
        scripted.forward(30)
        scripted.other(1000)
    scripted.exhausted(iterator=iterator)


# An evaluation with gradients, in training mode.


@pytest.mark.parametrize("place", ["after the step", "before the step", "after the epoch"])
@pytest.mark.parametrize("batches", [1, 2, 7])
def test_evaluation_with_gradients_is_validation(scripted: ScriptedLoop, place: str, batches: int) -> None:
    for epoch in range(3):
        trains = TRAINS + 64 * epoch
        for number in range(6):
            scripted.draw(1, samples=16, iterator=trains)
            if place == "before the step" and number == 3:
                evaluate_with_gradients(scripted, batches)
            step_on(scripted)
            if place == "after the step" and number == 2:
                evaluate_with_gradients(scripted, batches)
        scripted.exhausted(iterator=trains)
        if place == "after the epoch":
            evaluate_with_gradients(scripted, batches)
    scripted.loop.finish()
    steps = scripted.steps()
    assert kinds(steps) == (18, 3 * batches)
    assert samples(steps, "train") == 18 * 16
    assert samples(steps, "validate") == 3 * batches * 4
    assert {step.phases["forward"] for step in steps if step.kind == "train"} == {(1, 100)}
    assert all(step.duration < 1000 for step in steps if step.kind == "train")


def test_evaluation_with_gradients_that_is_left_early(scripted: ScriptedLoop) -> None:
    """The next draw is that of the loop that trains; nothing says before that the test is over."""
    for number in range(6):
        scripted.draw(1, samples=16, iterator=TRAINS)
        step_on(scripted)
        if number == 2:
            for _ in range(2):
                scripted.draw(5, samples=4, iterator=TESTS)
                scripted.forward(30)
    scripted.exhausted(iterator=TRAINS)
    steps = scripted.steps()
    assert kinds(steps) == (6, 2)
    assert (samples(steps, "train"), samples(steps, "validate")) == (96, 8)


def test_evaluation_with_gradients_by_two_loaders(scripted: ScriptedLoop) -> None:
    for _ in range(3):
        for _ in range(2):
            scripted.draw(1, samples=16, iterator=TRAINS)
            step_on(scripted)
        evaluate_with_gradients(scripted, 2)
        evaluate_with_gradients(scripted, 3, OTHER_TESTS)
    steps = scripted.steps()
    assert kinds(steps) == (6, 15)


@pytest.mark.parametrize("again", [1, 3])
def test_second_loader_that_trains_is_no_evaluation(scripted: ScriptedLoop, again: int) -> None:
    """Every third step has a batch of another loader as well, which is drawn after the first."""
    for number in range(12):
        scripted.draw(1, samples=16, iterator=TRAINS)
        if number % 3 == 2:
            for _ in range(again):
                scripted.draw(1, samples=2, iterator=TESTS)
                scripted.forward(10)
                scripted.backward(10)
        step_on(scripted)
    scripted.exhausted(iterator=TRAINS)
    steps = scripted.steps()
    assert kinds(steps) == (12, 0)
    assert samples(steps, "train") == 12 * 16 + 4 * 2 * again


def test_one_loader_after_another_trains(scripted: ScriptedLoop) -> None:
    """Clients of federated learning, for example."""
    for iterator in (8, 16, 24, 32):
        for _ in range(3):
            scripted.draw(1, samples=4, iterator=iterator)
            step_on(scripted)
        scripted.exhausted(iterator=iterator)
    assert kinds(scripted.steps()) == (12, 0)


# A batch that is drawn ahead while an evaluation runs.


def test_batch_ahead_of_a_short_evaluation_is_trained_on(scripted: ScriptedLoop) -> None:
    """Both loops draw one batch ahead, and the evaluation has only one."""
    scripted.draw(1, samples=16, iterator=TRAINS)
    for number in range(1, 21):
        if number < 20:
            scripted.draw(1, samples=16, iterator=TRAINS)
        else:
            scripted.exhausted(iterator=TRAINS)
        step_on(scripted)
        if number % 10 == 0:
            scripted.draw(1, samples=8, iterator=TESTS, evaluation_mode=True)
            scripted.exhausted(iterator=TESTS, evaluation_mode=True)
            scripted.evaluate(40)
    scripted.loop.finish()
    steps = scripted.steps()
    assert kinds(steps) == (20, 2)
    assert (samples(steps, "train"), samples(steps, "validate")) == (320, 16)
    assert scripted.loop.micro_batches == 20


@pytest.mark.parametrize("epochs", [1, 4])
def test_last_evaluation_by_an_endless_loader_counts(scripted: ScriptedLoop, epochs: int) -> None:
    """No draw finds its end, and its forward is another model's: one batch an epoch, and once at the end."""
    for _ in range(epochs):
        for _ in range(3):
            scripted.draw(1, samples=4, iterator=TRAINS)
            step_on(scripted)
        scripted.draw(1, gradients=False, samples=8, iterator=TESTS)
        scripted.other(40)
    scripted.draw(1, gradients=False, samples=8, iterator=TESTS)
    scripted.other(40)
    scripted.loop.finish()
    steps = scripted.steps()
    assert kinds(steps) == (3 * epochs, epochs + 1)
    assert (samples(steps, "train"), samples(steps, "validate")) == (12 * epochs, 8 * (epochs + 1))


# Acting.


@pytest.mark.parametrize("drawn", [True, False])
def test_time_after_acting_is_no_loss(scripted: ScriptedLoop, drawn: bool) -> None:
    for _ in range(4):
        if drawn:
            scripted.draw(1, samples=4)
        for _ in range(8):
            act(scripted)
            scripted.other(500)
        scripted.forward(100)
        scripted.other(20)
        scripted.backward(200)
        scripted.loop.optimizer_begin(1)
        scripted.loop.optimizer_end(1)
    scripted.loop.finish()
    steps = scripted.steps()
    assert kinds(steps) == (4, 0)
    assert {step.phases["loss"] for step in steps} == {(1, 20)}
    assert all(step.phases["other"] == (1, 4000) for step in steps)


def test_teacher_within_a_loss_leaves_it_whole(scripted: ScriptedLoop) -> None:
    """A forward without gradients between that of the model and the backward."""
    for _ in range(3):
        scripted.draw(1, samples=4)
        scripted.forward(100)
        scripted.other(20)
        act(scripted)
        scripted.other(30)
        scripted.backward(200)
        scripted.optimizer_step(50)
    scripted.exhausted()
    assert {step.phases["loss"] for step in scripted.steps()} == {(1, 50)}


def test_time_after_a_forward_of_a_validation_is_its_loss(scripted: ScriptedLoop) -> None:
    for _ in range(3):
        scripted.draw(1, gradients=False, samples=4)
        scripted.evaluate(40)
        scripted.other(9)
    scripted.exhausted(gradients=False)
    steps = scripted.steps()
    assert kinds(steps) == (0, 3)
    assert {step.phases["loss"] for step in steps} == {(1, 9)}


# Evaluation mode without a loader.


def sample(scripted: ScriptedLoop) -> None:
    """Sample from the model by methods, which no hook sees."""
    scripted.loop.evaluation_mode()
    scripted.other(10_000)
    scripted.loop.training_mode()


@pytest.mark.parametrize("drawn", [True, False])
def test_sampling_in_evaluation_mode_is_no_training(scripted: ScriptedLoop, drawn: bool) -> None:
    for number in range(20):
        if drawn:
            scripted.draw(1, samples=4)
        step_on(scripted)
        scripted.other(7)
        if number % 5 == 4:
            sample(scripted)
        scripted.other(3)
    scripted.loop.finish()
    steps = scripted.steps()
    assert kinds(steps) == (20, 0)
    assert max(step.duration for step in steps) < 400
    # Of the step in which it was sampled, the rest counts.
    assert all(step.phases["other"] == (1, 10) for step in steps[1:-1])


def test_evaluation_before_the_first_step_is_validation(scripted: ScriptedLoop) -> None:
    for number in range(20):
        if number % 10 == 0:
            scripted.loop.evaluation_mode()
            for _ in range(4):
                scripted.evaluate(40)
                scripted.other(1000)
            scripted.loop.training_mode()
            sample(scripted)
        scripted.other(3)
        step_on(scripted)
    scripted.loop.finish()
    steps = scripted.steps()
    assert kinds(steps) == (20, 8)
    assert max(step.duration for step in steps if step.kind == "train") < 400


def test_saving_while_a_model_evaluates_counts_alone(scripted: ScriptedLoop) -> None:
    for number in range(6):
        step_on(scripted)
        if number == 2:
            scripted.loop.evaluation_mode()
            scripted.other(10_000)
            depth = scripted.recorder.depth
            scripted.loop.save_begin()
            scripted.other(70)
            scripted.loop.save_end(depth)
            scripted.other(10_000)
            scripted.loop.training_mode()
    scripted.loop.finish()
    steps = scripted.steps()
    assert kinds(steps) == (6, 0)
    assert [step.duration for step in steps] == [350, 350, 350, 420, 350, 350]


@pytest.mark.parametrize("seen", [True, False])
def test_model_that_trains_in_evaluation_mode_loses_no_time(scripted: ScriptedLoop, seen: bool) -> None:
    """As with frozen statistics; the script says ``eval()`` ahead of every batch."""
    for _ in range(5):
        scripted.loop.evaluation_mode()
        scripted.other(30)
        if seen:
            scripted.loop.forward_begin(False, backward_may_follow=True)
            scripted.clock.advance(100)
            scripted.loop.forward_end()
        else:
            scripted.other(100)
        step_on(scripted, forward=False)
    scripted.loop.finish()
    steps = scripted.steps()
    assert kinds(steps) == (5, 0)
    assert [step.duration for step in steps][2:] == [380] * 3, "at first, it could have been an evaluation"


def test_evaluation_mode_at_the_end_adds_nothing(scripted: ScriptedLoop) -> None:
    for _ in range(3):
        step_on(scripted)
    scripted.other(5)
    scripted.loop.evaluation_mode()
    scripted.other(10_000)
    scripted.loop.finish()
    assert sum(step.duration for step in scripted.steps()) < 3 * 360


def test_explicit_steps_have_their_evaluation_mode_in_them(scripted: ScriptedLoop) -> None:
    for _ in range(3):
        scripted.other(10)
        sample(scripted)
        scripted.loop.client_step(4)
    assert [step.duration for step in scripted.steps()][1:] == [10_010] * 2


# Optimizers of their own pace.


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("times", [3, 7, 8, 100])
def test_optimizer_per_layer_on_one_batch(scripted: ScriptedLoop, layers: int, times: int) -> None:
    """Each layer trains for itself, one after the other, on the one batch that is drawn."""
    for layer in range(1, layers + 1):
        scripted.loop.optimizer_made(layer)
    scripted.draw(1, samples=64)
    steps: list[Step] = []
    for layer in range(1, layers + 1):
        for _ in range(times):
            step_on(scripted, layer)
            steps += scripted.steps()
    scripted.loop.finish()
    steps += scripted.steps()
    assert kinds(steps) == (layers * times, 0)
    assert [step.index for step in steps] == [*range(layers * times)]
    assert samples(steps, "train") == 64
    assert scripted.loop.micro_batches == layers * times
    assert sum(step.phases["optimizer"][0] for step in steps) == layers * times
    ends = [step.start + step.duration for step in steps]
    assert ends == [*[step.start for step in steps[1:]], scripted.recorder.last]


def test_batches_with_steps_of_one_optimizer_of_two(scripted: ScriptedLoop) -> None:
    """The second never steps: what the first batch held back is counted when the next is drawn."""
    for optimizer in (1, 2):
        scripted.loop.optimizer_made(optimizer)
    for _ in range(4):
        scripted.draw(1, samples=16)
        for _ in range(5):
            step_on(scripted)
    scripted.exhausted()
    steps = scripted.steps()
    assert kinds(steps) == (20, 0)
    assert samples(steps, "train") == 64


@given(
    delay=st.integers(1, 4),
    first=st.integers(0, 3),
    iterations=st.integers(8, 40),
    policy_first=st.booleans(),
)
def test_delayed_policy_has_a_step_per_iteration(
    delay: int, first: int, iterations: int, policy_first: bool
) -> None:
    """The second optimizer steps in every so many iterations, the first one in each."""
    scripted = ScriptedLoop()
    for number in range(iterations):
        order = [1, 2] if number % delay == first % delay else [1]
        for optimizer in reversed(order) if policy_first else order:
            step_on(scripted, optimizer)
        scripted.other(30)
    scripted.loop.finish()
    steps = scripted.steps()
    train, validate = kinds(steps)
    assert validate == 0
    # The policy's last step ends nothing where it comes first, but may begin what is never ended.
    assert iterations <= train <= iterations + policy_first
    assert sum(step.phases["optimizer"][0] for step in steps) == scripted.loop.optimizer_calls
