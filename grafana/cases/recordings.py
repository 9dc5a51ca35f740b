"""Scenarios of recording rules."""

from typing import Final

from grafana.alerting import Recorded

# Two ranks make 30 and 60 steps a minute, each busy all the time, a quarter of it in data.
_RUN: Final = {
    'torchperfd_train_steps_total{run="bert",rank="0"}': "0+30x20",
    'torchperfd_train_steps_total{run="bert",rank="1"}': "0+60x20",
    'torchperfd_train_step_seconds_total{run="bert",rank="0"}': "0+60x20",
    'torchperfd_train_step_seconds_total{run="bert",rank="1"}': "0+60x20",
    'torchperfd_train_phase_seconds_total{run="bert",rank="0",phase="data"}': "0+15x20",
    'torchperfd_train_phase_seconds_total{run="bert",rank="1",phase="data"}': "0+15x20",
    'torchperfd_train_phase_seconds_total{run="bert",rank="0",phase="forward"}': "0+45x20",
    'torchperfd_train_phase_seconds_total{run="bert",rank="1",phase="forward"}': "0+45x20",
    'torchperfd_train_phase_seconds_total{run="bert",rank="0",phase="validate"}': "0+9x20",
}
_PHASES: Final = "run_phase:torchperfd_train_phase:ratio5m"

RECORDED: Final = (
    Recorded(
        "run:torchperfd_train_steps:rate5m", _RUN, "15m", {'run:torchperfd_train_steps:rate5m{run="bert"}': 1}
    ),
    Recorded(
        "run:torchperfd_train_step_seconds:mean5m",
        _RUN,
        "15m",
        {'run:torchperfd_train_step_seconds:mean5m{run="bert"}': 2 / 1.5},
    ),
    Recorded(
        _PHASES,
        _RUN,
        "15m",
        {f'{_PHASES}{{run="bert",phase="data"}}': 0.25, f'{_PHASES}{{run="bert",phase="forward"}}': 0.75},
    ),
    Recorded(
        "run:torchperfd_train_goodput:ratio1h",
        {
            'torchperfd_train_goodput_seconds_total{run="bert",bucket="productive"}': "0+45x90",
            'torchperfd_train_goodput_seconds_total{run="bert",bucket="stall"}': "0+15x90",
        },
        "80m",
        {'run:torchperfd_train_goodput:ratio1h{run="bert"}': 0.75},
    ),
    # Half of the time is lost on a node with two ranks, a tenth on one with one rank.
    Recorded(
        "cause:torchperfd_train_lost_gpus:rate5m",
        {
            'torchperfd_train_lost_seconds_total{run="bert",cause="hang",job="t",instance="a"}': "0+30x20",
            'torchperfd_train_lost_seconds_total{run="bert",cause="hang",job="t",instance="b"}': "0+6x20",
            'torchperfd_train_rank_info{run="bert",rank="0",job="t",instance="a"}': "1x20",
            'torchperfd_train_rank_info{run="bert",rank="1",job="t",instance="a"}': "1x20",
            'torchperfd_train_rank_info{run="bert",rank="2",job="t",instance="b"}': "1x20",
        },
        "15m",
        {'cause:torchperfd_train_lost_gpus:rate5m{cause="hang"}': 1.1},
    ),
)
