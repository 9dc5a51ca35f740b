"""What is no training: evaluations that look like training, acting, and optimizers of their own pace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.client.scripted import ScriptedLoop, Step, scripted_cases

STEP = "f100 b200 o50#1"
# ScriptedLoop.play explains the calls, steps_as_text the steps.
LOOPS = """
    # An evaluation with gradients, in training mode.

    an evaluation with gradients that is left early: the next draw is that of the training loop
      2(d*16 f100 b200 o50#1) d*16 f100 b200 o50#1 2(d5*4@16 f30) 3(d*16 f100 b200 o50#1) x
      = 3x train 351 s16: d1 f100 l0 b200 o50 .0; 2x validate 35 s4: d5 f30 l0 .0;
        3x train 351 s16: d1 f100 l0 b200 o50 .0; micro 6

    an evaluation with gradients by two loaders
      3(2(d*16 f100 b200 o50#1) 2(d5*4@16 f30 .1000) x@16 3(d5*4@24 f30 .1000) x@24)
      = 2x train 351 s16: d1 f100 l0 b200 o50 .0; 2x validate 1035 s4: d5 f30 l1000 .0;
        | validate 1035 s4: d5 f30 l1000 .0; 2x validate 1035 s4: d5 f30 l1000 .0;
        | train 351 s16: d1 f100 l0 b200 o50 .0; train 351 s16: d1 f100 l0 b200 o50 .0;
        2x validate 1035 s4: d5 f30 l1000 .0; | validate 1035 s4: d5 f30 l1000 .0;
        2x validate 1035 s4: d5 f30 l1000 .0; | train 351 s16: d1 f100 l0 b200 o50 .0;
        train 351 s16: d1 f100 l0 b200 o50 .0; 2x validate 1035 s4: d5 f30 l1000 .0;
        | validate 1035 s4: d5 f30 l1000 .0; 2x validate 1035 s4: d5 f30 l1000 .0; micro 6

    a second loader that trains in every third step is no evaluation
      4(2(d*16 f100 b200 o50#1) d*16 d*2@16 f10 b10 f100 b200 o50#1) x
      = 2x train 351 s16: d1 f100 l0 b200 o50 .0; train 372 s18: d2x2 f2x110 l2x0 b2x210 o50 .0;
        2x train 351 s16: d1 f100 l0 b200 o50 .0; train 372 s18: d2x2 f2x110 l2x0 b2x210 o50 .0;
        2x train 351 s16: d1 f100 l0 b200 o50 .0; train 372 s18: d2x2 f2x110 l2x0 b2x210 o50 .0;
        2x train 351 s16: d1 f100 l0 b200 o50 .0; train 372 s18: d2x2 f2x110 l2x0 b2x210 o50 .0; micro 12

    a second loader that trains on three batches in every third step is no evaluation
      4(2(d*16 f100 b200 o50#1) d*16 3(d*2@16 f10 b10) f100 b200 o50#1) x
      = 2x train 351 s16: d1 f100 l0 b200 o50 .0; train 414 s22: d4x4 f4x130 l4x0 b4x230 o50 .0;
        2x train 351 s16: d1 f100 l0 b200 o50 .0; train 414 s22: d4x4 f4x130 l4x0 b4x230 o50 .0;
        2x train 351 s16: d1 f100 l0 b200 o50 .0; train 414 s22: d4x4 f4x130 l4x0 b4x230 o50 .0;
        2x train 351 s16: d1 f100 l0 b200 o50 .0; train 414 s22: d4x4 f4x130 l4x0 b4x230 o50 .0; micro 20

    one loader after another trains, as in federated learning
      3(d*4 f100 b200 o50#1) x 3(d*4@16 f100 b200 o50#1) x@16 3(d*4@24 f100 b200 o50#1) x@24 3(d*4@32 f100
      b200 o50#1) x@32
      = 3x train 351 s4: d1 f100 l0 b200 o50 .0; | train 351 s4: d1 f100 l0 b200 o50 .0;
        2x train 351 s4: d1 f100 l0 b200 o50 .0; | train 351 s4: d1 f100 l0 b200 o50 .0;
        2x train 351 s4: d1 f100 l0 b200 o50 .0; | train 351 s4: d1 f100 l0 b200 o50 .0;
        2x train 351 s4: d1 f100 l0 b200 o50 .0; micro 12

    # A batch that is drawn ahead while an evaluation runs.

    both loops draw a batch ahead, and the evaluation has only one
      d*16 10(d*16 f100 b200 o50#1) d*8@16!e x@16!e e40 9(d*16 f100 b200 o50#1) x f100 b200 o50#1 d*8@16!e
      x@16!e e40 F
      = train 352 s16: d2x2 f100 l0 b200 o50 .0; 9x train 351 s16: d1 f100 l0 b200 o50 .0;
        | validate 40 s8: f40 l0 .0; 9x train 351 s16: d1 f100 l0 b200 o50 .0;
        | train 350 s16: f100 l0 b200 o50 .0; | validate 40 s8: f40 l0 .0; micro 20

    an evaluation by an endless loader: no draw finds its end, its forward is not seen
      3(d*4 f100 b200 o50#1) d*8@16!g .40 d*8@16!g .40 F
      = 3x train 351 s4: d1 f100 l0 b200 o50 .0; validate 41 s8: d1 .40; validate 1 s8: d1 .0; micro 3

    an evaluation by an endless loader after each epoch and once at the end
      4(3(d*4 f100 b200 o50#1) d*8@16!g .40) d*8@16!g .40 F
      = 3x train 351 s4: d1 f100 l0 b200 o50 .0; validate 41 s8: d1 .40;
        3x train 351 s4: d1 f100 l0 b200 o50 .0; validate 41 s8: d1 .40;
        3x train 351 s4: d1 f100 l0 b200 o50 .0; validate 41 s8: d1 .40;
        3x train 351 s4: d1 f100 l0 b200 o50 .0; validate 41 s8: d1 .40; validate 1 s8: d1 .0; micro 12

    # Acting.

    the time after acting is no loss
      4(d*4 8(a10 .500) f100 .20 b200 o0#1) F
      = 4x train 4401 s4: d1 f9x180 l20 b200 o0 .4000; micro 4

    the time after acting is no loss where nothing is drawn
      4(8(a10 .500) f100 .20 b200 o0#1) F
      = 4x train 4400: f9x180 l20 b200 o0 .4000; micro 4

    a teacher within a loss leaves it whole
      3(d*4 f100 .20 a10 .30 b200 o50) x
      = 3x train 411 s4: d1 f2x110 l50 b200 o50 .0; micro 3

    the time after a forward of a validation is its loss
      3(d*4!g e40 .9) x!g
      = 3x validate 50 s4: d1 f40 l9 .0

    # Evaluation mode without a loader.

    sampling in evaluation mode by methods that no hook sees is no training
      4(4(d*4 f100 b200 o50#1 .7 .3) d*4 f100 b200 o50#1 .7 E .10000 M .3) F
      = 4x train 361 s4: d1 f100 l0 b200 o50 .10; | train 361 s4: d1 f100 l0 b200 o50 .10;
        4x train 361 s4: d1 f100 l0 b200 o50 .10; | train 361 s4: d1 f100 l0 b200 o50 .10;
        4x train 361 s4: d1 f100 l0 b200 o50 .10; | train 361 s4: d1 f100 l0 b200 o50 .10;
        4x train 361 s4: d1 f100 l0 b200 o50 .10; | train 358 s4: d1 f100 l0 b200 o50 .7; micro 20

    sampling in evaluation mode is no training where nothing is drawn
      4(4(f100 b200 o50#1 .7 .3) f100 b200 o50#1 .7 E .10000 M .3) F
      = train 350: f100 l0 b200 o50 .0; 4x train 360: f100 l0 b200 o50 .10;
        | train 360: f100 l0 b200 o50 .10; 4x train 360: f100 l0 b200 o50 .10;
        | train 360: f100 l0 b200 o50 .10; 4x train 360: f100 l0 b200 o50 .10;
        | train 360: f100 l0 b200 o50 .10; 4x train 360: f100 l0 b200 o50 .10; micro 20

    an evaluation before the first step is validation
      2(E 4(e40 .1000) M E .10000 M 10(.3 f100 b200 o50#1)) F
      = 4x validate 1040: f40 l1000 .0; | train 353: f100 l0 b200 o50 .3; 9x train 353: f100 l0 b200 o50 .3;
        4x validate 1040: f40 l1000 .0; | train 353: f100 l0 b200 o50 .3; 9x train 353: f100 l0 b200 o50 .3;
        micro 20

    a model that trains in evaluation mode loses no time; the first could be an evaluation
      5(E .30 m100 b200 o50#1) F
      = 2x train 350: f100 l0 b200 o50 .0; 3x train 380: f100 l0 b200 o50 .30; micro 5

    a model that trains in evaluation mode by methods loses no time
      5(E .30 .100 b200 o50#1) F
      = train 250: b200 o50 .0; 4x train 380: b200 o50 .130; micro 5

    evaluation mode at the end adds nothing
      3(f100 b200 o50#1) .5 E .10000 F
      = 3x train 350: f100 l0 b200 o50 .0; micro 3

    explicit steps have their evaluation mode in them
      3(.10 E .10000 M s*4)
      = train 0 s4: .0; 2x train 10010 s4: .10010; micro 3 open 1

    # Optimizers of their own pace.

    the second of two optimizers never steps: what the first batch held back comes with the next draw
      n#1 n#2 4(d*16 5(f100 b200 o50#1)) x
      = train 350 s16: f100 l0 b200 o50 .0; 3x train 350: f100 l0 b200 o50 .0;
        train 351: d1 f100 l0 b200 o50 .0; train 351 s16: d1 f100 l0 b200 o50 .0;
        4x train 350: f100 l0 b200 o50 .0; train 351 s16: d1 f100 l0 b200 o50 .0;
        4x train 350: f100 l0 b200 o50 .0; train 351 s16: d1 f100 l0 b200 o50 .0;
        4x train 350: f100 l0 b200 o50 .0; micro 20
"""


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


@pytest.mark.parametrize(("script", "outcome"), scripted_cases(LOOPS))
def test_loop_tells_evaluation_from_training(scripted: ScriptedLoop, script: str, outcome: list[str]) -> None:
    scripted.play(script)
    assert scripted.outcome() == outcome


@pytest.mark.parametrize("place", ["after the step", "before the step", "after the epoch"])
@pytest.mark.parametrize("batches", [1, 2, 7])
def test_evaluation_with_gradients_is_validation(scripted: ScriptedLoop, place: str, batches: int) -> None:
    test = f"{batches}(d5*4@16 f30 .1000) x@16"
    for trains in (8, 72, 136):
        draw = f"d*16@{trains}"
        epoch = {
            "after the step": f"3({draw} {STEP}) {test} 3({draw} {STEP}) x@{trains}",
            "before the step": f"3({draw} {STEP}) {draw} {test} {STEP} 2({draw} {STEP}) x@{trains}",
            "after the epoch": f"6({draw} {STEP}) x@{trains} {test}",
        }
        scripted.play(epoch[place])
    scripted.play("F")
    steps = scripted.steps()
    assert kinds(steps) == (18, 3 * batches)
    assert samples(steps, "train") == 18 * 16
    assert samples(steps, "validate") == 3 * batches * 4
    assert {step.phases["forward"] for step in steps if step.kind == "train"} == {(1, 100)}
    assert all(step.duration < 1000 for step in steps if step.kind == "train")


def test_saving_while_a_model_evaluates_counts_alone(scripted: ScriptedLoop) -> None:
    scripted.play(f"3({STEP}) E .10000")
    depth = scripted.recorder.depth
    scripted.loop.save_begin()
    scripted.other(70)
    scripted.loop.save_end(depth)
    scripted.play(f".10000 M 3({STEP}) F")
    steps = scripted.steps()
    assert kinds(steps) == (6, 0)
    assert [step.duration for step in steps] == [350, 350, 350, 420, 350, 350]


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("times", [3, 7, 8, 100])
def test_optimizer_per_layer_on_one_batch(scripted: ScriptedLoop, layers: int, times: int) -> None:
    """Each layer trains for itself, one after the other, on the one batch that is drawn."""
    numbers = range(1, layers + 1)
    scripted.play(" ".join(f"n#{layer}" for layer in numbers) + " d*64")
    steps: list[Step] = []
    for layer in numbers:
        for _ in range(times):
            scripted.play(f"f100 b200 o50#{layer}")
            steps += scripted.steps()
    scripted.play("F")
    steps += scripted.steps()
    assert kinds(steps) == (layers * times, 0)
    assert [step.index for step in steps] == [*range(layers * times)]
    assert samples(steps, "train") == 64
    assert scripted.loop.micro_batches == layers * times
    assert sum(step.phases["optimizer"][0] for step in steps) == layers * times
    ends = [step.start + step.duration for step in steps]
    assert ends == [*[step.start for step in steps[1:]], scripted.recorder.last]


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
            scripted.play(f"f100 b200 o50#{optimizer}")
        scripted.other(30)
    scripted.loop.finish()
    steps = scripted.steps()
    train, validate = kinds(steps)
    assert validate == 0
    # The policy's last step ends nothing where it comes first, but may begin what is never ended.
    assert iterations <= train <= iterations + policy_first
    assert sum(step.phases["optimizer"][0] for step in steps) == scripted.loop.optimizer_calls
