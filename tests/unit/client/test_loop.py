"""What a step is: the hook calls of real loops, in their real order, on a scripted clock."""

import pytest
from tests.unit.client.scripted import ScriptedLoop, scripted_cases

from torchperfd.model.totals import PhaseTotals
from torchperfd.steps.phases import BACKWARD, OPTIMIZER

# ScriptedLoop.play explains the calls, steps_as_text the steps.
LOOPS = """
    a plain loop has a step per batch
      d11*4 B d12*4 B d13*4 B x
      = train 393 s4: d11 f100 l20 b200 o50 z5 .7; train 394 s4: d12 f100 l20 b200 o50 z5 .7;
        train 395 s4: d13 f100 l20 b200 o50 z5 .7; micro 3

    what lies between two epochs belongs to no step (building an iterator, printing)
      2(.1e9 2(d B) x1e9 .1e9)
      = 2x train 383: d1 f100 l20 b200 o50 z5 .7; | train 383: d1 f100 l20 b200 o50 z5 .7;
        train 383: d1 f100 l20 b200 o50 z5 .7; micro 4

    zero_grad first is the same step
      2(d z5 f100 .20 b200 o50 .7) x
      = 2x train 383: d1 f100 l20 b200 o50 z5 .7; micro 2

    zero_grad after the loss splits the loss but not its call
      d f100 .20 z5 .3 b200 o50 x
      = train 379: d1 f100 l23 b200 o50 z5 .0; micro 1

    accumulated micro-batches are one step
      2(3(d*2 f10 .2 b30) d*2 f10 .2 b30 o50 z5) x
      = 2x train 227 s8: d4x4 f4x40 l4x8 b4x120 o50 z5 .0; micro 8

    a group of batches is drawn up front, as the Hugging Face Trainer does
      2(3(d*2) 3(f10 b30) o50) x
      = 2x train 173 s6: d3x3 f3x30 l3x0 b3x90 o50 .0; micro 6

    a batch is drawn ahead, as Accelerate does; the last one is trained on after its loader has ended
      d11*4 d12*4 B d13*4 B x1e9 B
      = train 405 s4: d2x23 f100 l20 b200 o50 z5 .7; train 395 s4: d13 f100 l20 b200 o50 z5 .7;
        | train 370 s4: f100 l20 b200 o50 .0; micro 3

    a validation between epochs has steps of its own
      2(2(d*4 B) x .1e9 3(d2*8 e40 .3) x .1e9)
      = 2x train 383 s4: d1 f100 l20 b200 o50 z5 .7; | validate 45 s8: d2 f40 l3 .0;
        2x validate 45 s8: d2 f40 l3 .0; | train 383 s4: d1 f100 l20 b200 o50 z5 .7;
        train 383 s4: d1 f100 l20 b200 o50 z5 .7; | validate 45 s8: d2 f40 l3 .0;
        2x validate 45 s8: d2 f40 l3 .0; micro 4

    a validation within an epoch takes no training time
      d B 2(d2 e40) x d B x
      = train 383: d1 f100 l20 b200 o50 z5 .7; 2x validate 42: d2 f40 l0 .0;
        | train 383: d1 f100 l20 b200 o50 z5 .7; micro 2

    a validation without a loader is recognised by its forwards
      d B 3(e40 .3) d B x
      = train 383: d1 f100 l20 b200 o50 z5 .7; 3x validate 43: f40 l3 .0;
        train 383: d1 f100 l20 b200 o50 z5 .7; micro 2

    a forward without gradients before the backward is training: a teacher, a rollout
      2(d e40 B) x
      = 2x train 423: d1 f2x140 l20 b200 o50 z5 .7; micro 2

    a model in evaluation mode is trained, accumulating: frozen batch norms
      2(d e10 b30) o50 x
      = train 132: d2x2 f2x20 b2x60 o50 .0; micro 2

    without a loader, a step runs between optimizer steps
      3(B)
      = train 370: f100 l20 b200 o50 .0; 2x train 382: f100 l20 b200 o50 z5 .7; micro 3 open 1

    a closure inside the optimizer keeps its own times, as in LBFGS and Lightning
      d o< 2(.3 z5 f100 .20 b200) o> x
      = train 657: d1 f2x200 b2x400 o46 z2x10 .0; micro 1

    two optimizer steps on a batch are one step
      2(d B B) x
      = 2x train 765: d1 f2x200 l2x40 b2x400 o2x100 z2x10 .14; micro 2

    an optimizer inside an optimizer is one call, as in ZeroRedundancyOptimizer
      o< .3 o50 .4 o>
      = train 57: o57 .0; micro 1 open 1

    a draw inside a draw is no edge: a data set reads from a loader itself
      2(d<@0 d30 .4 d>*4 B) d<@0 x10 x>@0
      = 2x train 416 s4: d34 f100 l20 b200 o50 z5 .7; micro 2

    a second loader ends and begins anew within a step
      d*4 x6@16 d2*4@24 B x
      = train 391 s8: d3x9 f100 l20 b200 o50 z5 .7; micro 1

    draws that lead to nothing are no step: counting a data set
      5(d10*4) x F
      = no step

    # What is known only later.

    a batch without optimizer step is a step where zero_grad comes after the next draw
      d11*4 z5 f100 .20 b200 o50 .7 d11*4 z5 f100 .20 b200 .7 d11*4 z5 f100 .20 b200 o50 .7 x
      = train 393 s4: d11 f100 l20 b200 o50 z5 .7; train 343 s4: d11 f100 l20 b200 z5 .7;
        train 393 s4: d11 f100 l20 b200 o50 z5 .7; micro 3 skipped 1

    a batch without optimizer step is a step where zero_grad comes at once
      d11 f100 b200 z5 d11 f100 b200 o50 z5 x
      = train 316: d11 f100 l0 b200 z5 .0; train 366: d11 f100 l0 b200 o50 z5 .0; micro 2 skipped 1

    a step that a scaler calls off is a step
      d11 f100 b200 o50#7!o d11 f100 b200 o50#7 x
      = 2x train 361: d11 f100 l0 b200 o50 .0; micro 2 skipped 1

    two optimizers without a loader are one step at once
      4(f100 .20 b200 o50#1 z5 f100 .20 b200 o50#2 z5)
      = train 745: f2x200 l2x40 b2x400 o2x100 z5 .0; 3x train 750: f2x200 l2x40 b2x400 o2x100 z2x10 .0;
        micro 4 open 1

    a phase around the loop is split at an edge that is known later
      d B x u< d11 z5 .3 b200 .7 d11 z5 .3 b200 o50 .7 x u>
      = train 383: d1 f100 l20 b200 o50 z5 .7; | train 226: d11 b200 z5 .0 epoch 10;
        train 276: d11 b200 o50 z5 .0 epoch 10; micro 3 skipped 1

    another optimizer takes over: the next fold, the next stage
      3(o50#1) 3(o50#2) F
      = 6x train 50: o50 .0; micro 6

    a single step without a loader is counted at the end
      f100 .20 b200 o50#1 z5 f100 .20 b200 o50#2 z5 F
      = train 745: f2x200 l2x40 b2x400 o2x100 z5 .0; micro 1

    a single step without a loader is none before the end
      f100 .20 b200 o50#1 z5 f100 .20 b200 o50#2 z5
      = open 1

    a forward without gradients between optimizers is its batch's
      d*4 B e40 B x
      = train 805 s4: d1 f3x240 l2x40 b2x400 o2x100 z2x10 .14; micro 1

    optimizers inside a backward are one step
      2(d f100 b< .10 o5#1 .10 o5#2 .10 o5#3 b> .7) x
      = 2x train 153: d1 f100 l0 b30 o3x15 .7; micro 2

    optimizers on autograd's threads are one step; outside a backward, none of ours
      2(d b< .10 w#1 w#2 b> w#3) x
      = 2x train 11: d1 b10 .0; micro 2

    a backward that raised ends its inner phases
      d b< o<#1 .5 b>
      = open 1

    micro-batches that are left over take no pause along
      2(d b30) d b30 o50 x .1e9 d2 e40 x .1e9 d b30 d b30 o50 d b30 x .1e9 d2 e40 x .1e9 F
      = train 143: d3x3 b3x90 o50 .0; | validate 42: d2 f40 l0 .0; | train 112: d2x2 b2x60 o50 .0;
        | validate 42: d2 f40 l0 .0; micro 5

    draws of a closure end nothing
      2(o< 3(c2*4 b10) c> o>)
      = 2x train 36 s12: d4x6 b3x30 o0 .0; micro 2 open 1

    # The script says where steps end.

    explicit steps end where the script says; the first begins with its own end
      3(.9 s*32) F
      = train 0 s32: .0; 2x train 9 s32: .9; micro 3

    explicit steps are not ended by draws or optimizers
      s 2(2(d*4 B) s) B B s
      = train 0: .0; 2x train 766 s8: d2x2 f2x200 l2x40 b2x400 o2x100 z2x10 .14;
        train 764: f2x200 l2x40 b2x400 o2x100 z2x10 .14; micro 6 open 1

    an unfinished explicit step is no step
      s d B F
      = train 0: .0; micro 1

    # Things that go wrong in the script.

    an optimizer that raised is over with the next draw; its batch is part of the next step
      d f100 b200 o< f10 .4 .6 d B x
      = train 704: d2x2 f3x210 l2x20 b2x400 o2x60 z5 .7; micro 2

    a loader that raised does not end the step
      d f100 x3 b200 o50 x
      = train 354: d2x4 f100 l0 b200 o50 .0; micro 1

    # The end of the loop.

    the end of the loop ends an open step at its newest boundary: a break
      d*4 B .1e9 F
      = train 376 s4: d1 f100 l20 b200 o50 z5 .0; micro 1

    the end of the loop ends a validation step too
      d2 e40 .1e9 F
      = validate 42: d2 f40 l0 .0

    the end of the loop forgets a step without an optimizer step
      d f100 b200 F
      = no step

    finishing twice is finishing once
      d B F F
      = train 376: d1 f100 l20 b200 o50 z5 .0; micro 1

    a loop begins again after its end
      2(d B F .1e9)
      = train 376: d1 f100 l20 b200 o50 z5 .0; | train 376: d1 f100 l20 b200 o50 z5 .0; micro 2

    a phase of the user around a whole loop hides no steps
      2(u< .1e9 2(d5*4 B .7) x .1e9 u>)
      = 2x train 394 s4: d5 f100 b200 o50 z5 .0 epoch 34; | train 394 s4: d5 f100 b200 o50 z5 .0 epoch 34;
        train 394 s4: d5 f100 b200 o50 z5 .0 epoch 34; micro 4

    the pause after the last batch that was drawn ahead is in no step
      2(d11*4 d12*4 B x B .1e9)
      = train 405 s4: d2x23 f100 l20 b200 o50 z5 .7; | train 370 s4: f100 l20 b200 o50 .0;
        | train 405 s4: d2x23 f100 l20 b200 o50 z5 .7; | train 370 s4: f100 l20 b200 o50 .0; micro 4

    # Drawn and not used; left early.

    batches that are skipped are no samples: resumed within an epoch
      3(d*4) 2(d*4 B) d*2 B x
      = train 386 s4: d4x4 f100 l20 b200 o50 z5 .7; train 383 s4: d1 f100 l20 b200 o50 z5 .7;
        train 383 s2: d1 f100 l20 b200 o50 z5 .7; micro 3

    every other batch that is skipped is no sample
      3(d*4 d*4 B) x
      = 3x train 384 s4: d2x2 f100 l20 b200 o50 z5 .7; micro 3

    a batch that a closure trains on is used once, as in Lightning
      d*4 2(d*4 b30 d*4 o<#1 3(b30) o>#1) x
      = train 123 s8: d3x3 b4x120 o0 .0; train 122 s8: d2x2 b4x120 o0 .0; micro 4

    a batch that is drawn before training is in no step
      d7*4@16 .1e9 g@16 p 2(d*4 B) x
      = 2x train 383 s4: d1 f100 l20 b200 o50 z5 .7; micro 2

    a batch that is drawn from an iterator which is kept is in no step
      d7*4@16 .1e9 g@16!? p d*4 B x
      = train 383 s4: d1 f100 l20 b200 o50 z5 .7; micro 1

    a second iterator that has a name is not left: semi-supervised
      d*4 g@16!? d*4@16 B d*4 g@16!? g@8!? d*4@24 B F
      = train 384 s8: d2x2 f100 l20 b200 o50 z5 .7; train 377 s8: d2x2 f100 l20 b200 o50 z5 .0; micro 2

    a pause after a break is no step
      2(d*4 B) d*4 f10 .1e9 g@8 p d*4@16 B x@16
      = 2x train 383 s4: d1 f100 l20 b200 o50 z5 .7; | train 383 s4: d1 f100 l20 b200 o50 z5 .7; micro 3

    a pause after a break is no step where the iterator lives on, as in a notebook
      2(d*4 B) d*4 f10 .1e9 p d*4@16 B x@16
      = 2x train 383 s4: d1 f100 l20 b200 o50 z5 .7; | train 383 s4: d1 f100 l20 b200 o50 z5 .7; micro 3

    a pause after a break behind a step is no step
      2(d*4 B) .1e9 g@8 p d*4@16 B x@16
      = train 383 s4: d1 f100 l20 b200 o50 z5 .7; train 376 s4: d1 f100 l20 b200 o50 z5 .0;
        | train 383 s4: d1 f100 l20 b200 o50 z5 .7; micro 3

    gradients of a loop that is left early may yet be used
      d*4 B 2(d*4 b30) .1e9 g@8 p d*4@16 B x@16
      = train 383 s4: d1 f100 l20 b200 o50 z5 .7; | train 445 s12: d3x3 f100 l20 b3x260 o50 z5 .7; micro 4

    an iterator for every batch is part of the step: next(iter(loader))
      d*4 B .500 g@8 p d*4@16 B .500 g@16 p d*4@24 B F
      = 2x train 883 s4: d1 f100 l20 b200 o50 z5 .507; train 376 s4: d1 f100 l20 b200 o50 z5 .0; micro 3

    the draws inside a draw are no batches: a prefetcher hands out the last without one
      d<@8 2(d*4@16) d>*4 B d<@8 x@16 d>*4 B x
      = train 384 s4: d2 f100 l20 b200 o50 z5 .7; train 383 s4: d1 f100 l20 b200 o50 z5 .7; micro 2

    # Validation.

    draws without gradients are validation for any model, whose forward is not seen
      d*4 B 3(d*8@16!g .40) x@16!g .1e9 d*4@24 B x@24
      = train 383 s4: d1 f100 l20 b200 o50 z5 .7; 3x validate 41 s8: d1 .40;
        | train 383 s4: d1 f100 l20 b200 o50 z5 .7; micro 2

    draws in evaluation mode are validation, as in Keras
      d*4 B 3(d*8@16!e) x@16!e
      = train 383 s4: d1 f100 l20 b200 o50 z5 .7; 3x validate 1 s8: d1 .0; micro 1

    a validation that draws ahead has a step per batch
      d*4 B d*8@16!g 2(d*8@16!g e40) x@16!g e40 g@16 d*4@24 B x@24
      = train 383 s4: d1 f100 l20 b200 o50 z5 .7; validate 42 s16: d2x2 f40 l0 .0;
        validate 41 s8: d1 f40 l0 .0; | validate 40: f40 l0 .0; train 383 s4: d1 f100 l20 b200 o50 z5 .7;
        micro 2

    a validation that draws ahead has a step per batch where its iterator lives on
      d*4 B d*8@16!g 2(d*8@16!g e40) x@16!g e40 d*4@24 B x@24
      = train 383 s4: d1 f100 l20 b200 o50 z5 .7; validate 42 s16: d2x2 f40 l0 .0;
        validate 41 s8: d1 f40 l0 .0; | validate 40: f40 l0 .0; train 383 s4: d1 f100 l20 b200 o50 z5 .7;
        micro 2

    batches that are drawn ahead without gradients are trained on
      d*4!g 2(d*4!g B) x!g B
      = train 384 s8: d2x2 f100 l20 b200 o50 z5 .7; train 383 s4: d1 f100 l20 b200 o50 z5 .7;
        | train 370: f100 l20 b200 o50 .0; micro 3

    an evaluation after each step that draws nothing
      4(z5 f100 b200 o50#1 e40 .10) F
      = train 355: f100 l0 b200 o50 z5 .0; validate 50: f40 l10 .0; train 355: f100 l0 b200 o50 z5 .0;
        validate 50: f40 l10 .0; train 355: f100 l0 b200 o50 z5 .0; validate 50: f40 l10 .0;
        train 355: f100 l0 b200 o50 z5 .0; validate 40: f40 l0 .0; micro 4

    an evaluation of several batches after each step that draws nothing
      4(z5 f100 b200 o50#1 3(e40 .10)) F
      = train 355: f100 l0 b200 o50 z5 .0; 3x validate 50: f40 l10 .0; train 355: f100 l0 b200 o50 z5 .0;
        3x validate 50: f40 l10 .0; train 355: f100 l0 b200 o50 z5 .0; 3x validate 50: f40 l10 .0;
        train 355: f100 l0 b200 o50 z5 .0; 2x validate 50: f40 l10 .0; validate 40: f40 l0 .0; micro 4

    an evaluation within an accumulation that draws nothing
      z5 f100 b200 o50#1 3(f100 b200) o0#1 f100 b200 2(e40) 2(f100 b200) o0#1 F
      = train 355: f100 l0 b200 o50 z5 .0; train 900: f3x300 l3x0 b3x600 o0 .0; | validate 40: f40 l0 .0;
        validate 40: f40 l0 .0; | train 900: f3x300 l3x0 b3x600 o0 .0; micro 7

    acting is no validation: without gradients, in training mode
      3(8(a7) 2(f100 b200 o0#1)) F
      = train 356: f9x156 l0 b200 o0 .0; train 300: f100 l0 b200 o0 .0; train 356: f9x156 l0 b200 o0 .0;
        train 300: f100 l0 b200 o0 .0; train 356: f9x156 l0 b200 o0 .0; train 300: f100 l0 b200 o0 .0;
        micro 6

    acting is no validation in evaluation mode either where training goes by other methods
      3(8(e7) 2(b200 o0#1)) F
      = train 256: f8x56 b200 o0 .0; train 200: b200 o0 .0; train 256: f8x56 b200 o0 .0;
        train 200: b200 o0 .0; train 256: f8x56 b200 o0 .0; train 200: b200 o0 .0; micro 6

    # One draw, many steps.

    one batch that is drawn once is trained on many times
      d*4 50(z5 f100 b200 o50#1) F
      = train 361 s4: d1 f100 l0 b200 o50 z2x10 .0; train 350: f100 l0 b200 o50 .0;
        48x train 355: f100 l0 b200 o50 z5 .0; micro 50

    a batch is cut up outside of its loader
      5(d*16 4(z5 f100 b200 o50#1)) x
      = train 361 s16: d1 f100 l0 b200 o50 z2x10 .0; train 350: f100 l0 b200 o50 .0;
        2x train 355: f100 l0 b200 o50 z5 .0; train 361 s16: d1 f100 l0 b200 o50 z2x10 .0;
        train 350: f100 l0 b200 o50 .0; 2x train 355: f100 l0 b200 o50 z5 .0;
        train 361 s16: d1 f100 l0 b200 o50 z2x10 .0; train 350: f100 l0 b200 o50 .0;
        2x train 355: f100 l0 b200 o50 z5 .0; train 361 s16: d1 f100 l0 b200 o50 z2x10 .0;
        train 350: f100 l0 b200 o50 .0; 2x train 355: f100 l0 b200 o50 z5 .0;
        train 361 s16: d1 f100 l0 b200 o50 z2x10 .0; train 350: f100 l0 b200 o50 .0;
        2x train 355: f100 l0 b200 o50 z5 .0; micro 20

    several critic steps on one draw are one step
      n#1 n#2 4(d*16 3(z5 f100 b200 o50#1) z5 f100 b200 o50#2) x
      = 4x train 1421 s16: d1 f4x400 l4x0 b4x800 o4x200 z4x20 .0; micro 4

    an evaluation between steps on one batch; the first may be a sample of its batch
      d*16 5(z5 f100 b200 o50#1 e40) F
      = train 356 s16: d1 f100 l0 b200 o50 z5 .0; train 395: f2x140 l0 b200 o50 z5 .0;
        validate 40: f40 l0 .0; train 355: f100 l0 b200 o50 z5 .0; validate 40: f40 l0 .0;
        train 355: f100 l0 b200 o50 z5 .0; validate 40: f40 l0 .0; train 355: f100 l0 b200 o50 z5 .0;
        validate 40: f40 l0 .0; micro 5

    a step that a failed hook abandons is not set aside
      d*4 B A .1e9 e40 d*4 B x
      = validate 40: f40 l0 .0; train 383 s4: d1 f100 l20 b200 o50 z5 .7; micro 1
"""


@pytest.fixture
def scripted() -> ScriptedLoop:
    return ScriptedLoop()


@pytest.mark.parametrize(("script", "outcome"), scripted_cases(LOOPS))
def test_loop_makes_these_steps(scripted: ScriptedLoop, script: str, outcome: list[str]) -> None:
    scripted.play(script)
    assert scripted.outcome() == outcome


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_batches_drawn_ahead_are_samples_and_micro_batches(scripted: ScriptedLoop, ahead: int) -> None:
    scripted.play(f"{ahead}(d*4)")
    draws = ["d*4"] * (8 - ahead) + ["x"] + [""] * (ahead - 1)
    for number, draw in enumerate(draws):
        scripted.play(f"{draw} f10 b30 {'o0#1' if number % 2 else ''}")
    scripted.play("F")
    assert sum(step.samples for step in scripted.steps()) == 32
    assert (scripted.loop.train_steps, scripted.loop.micro_batches) == (4, 8)


def test_a_save_between_steps_and_one_within(scripted: ScriptedLoop) -> None:
    def save(ns: int) -> None:
        depth = scripted.recorder.depth
        scripted.loop.save_begin()
        scripted.loop.save_begin()  # as a distributed one calls the plain one
        scripted.clock.advance(ns)
        scripted.loop.save_end(depth + 1)
        scripted.loop.save_end(depth)

    scripted.play("d B")
    save(70)
    scripted.play("x")
    save(10**9)
    (step,) = scripted.steps()
    assert step.phases["checkpoint"] == (1, 70)
    loop = scripted.loop
    assert (loop.saves, loop.saving) == (PhaseTotals(1, 10**9, 1e18), 0)


def test_explicit_step_within_user_phase_splits_the_phase(scripted: ScriptedLoop) -> None:
    scripted.loop.enter(BACKWARD)
    scripted.play(".5 s .70")
    scripted.loop.exit()
    scripted.play("s")
    assert [step.phases["backward"] for step in scripted.steps()] == [(1, 5), (1, 70)]


def test_end_of_an_abandoned_optimizer_step_is_no_step(scripted: ScriptedLoop) -> None:
    scripted.play("o< .50")
    scripted.recorder.abandon()  # a hook has failed
    scripted.play(".1e9 o>")
    assert scripted.steps() == []
    assert scripted.loop.train_steps == 0
    scripted.play("B")
    (step,) = scripted.steps()
    assert (step.index, step.duration) == (0, 370)


def test_finish_leaves_phases_that_are_still_open(scripted: ScriptedLoop) -> None:
    """The script has ended with an exception in the middle of a step."""
    scripted.play("d B")
    scripted.loop.enter(OPTIMIZER)
    scripted.play(".6 F")
    assert scripted.outcome() == ["train 389: d1 f100 l20 b200 o2x56 z5 .7", "micro 1"]


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
    scripted.play("2(d B) 2(d2 e40) d B F")
    assert watcher.edges == ["train 1", "train 2", "validate", "validate", "train 3"]
    # An edge comes before the draw of the step that it begins, and its time is no step's.
    assert [step.duration for step in scripted.steps()] == [383, 383, 42, 42, 376]


def test_watcher_gets_edges_without_loader_and_explicit_edges(scripted: ScriptedLoop) -> None:
    watcher = scripted.loop.watcher = Watcher(scripted)
    scripted.play("2(B) s .9 s")
    assert watcher.edges == ["train 1", "train 2", "train 3", "train 4"]
    assert [step.duration for step in scripted.steps()] == [370, 382, 12, 9]


def test_watcher_set_mid_step_gets_the_next_edge_first(scripted: ScriptedLoop) -> None:
    scripted.play("d B d")
    watcher = scripted.loop.watcher = Watcher(scripted)
    scripted.play("B d")
    assert watcher.edges == ["train 2"]


def test_late_step_edge_precedes_next_step_of_its_optimizer(scripted: ScriptedLoop) -> None:
    watcher = scripted.loop.watcher = Watcher(scripted)
    two_optimizers = "f100 .20 b200 o50#1 z5 f100 .20 b200 o50#2 z5"
    scripted.play(two_optimizers)
    assert watcher.edges == []
    scripted.play(two_optimizers)
    assert watcher.edges == ["train 1", "train 2"]
