"""Every private name of torch that a hook uses, missing: it costs that hook's phase and no other."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.torches import COUNTS_FLOPS, VERSION
from tests.unit.client.private_names import PACKAGE, private_names, torchs_names

# The programs train some forty times, one after the other.
pytestmark = pytest.mark.timeout(900)

FORWARD = {"train forward", "train loss", "validate forward", "validate loss"}
# Without draws nothing shows where a loop ends: what lies between two loops counts in the step before it.
DRAWS = {
    *("train data", "validate data", "train samples", "validate samples", "ready"),
    *("train collective_wait", "train checkpoint", "saves"),
}

# By name: the hooks that go off without it, and what is not counted then. A dotted name is deleted from
# torch, as ``module:owner.name``; of others, which torch itself cannot do without, our code finds none.
COMPILER_NAMES: dict[str, tuple[set[str], set[str]]] = {
    # Compiled code: nothing here is compiled.
    "_C": ({"compiler"}, set()),
    "_dynamo": ({"compiler"}, set()),
    "_FrameAction": ({"compiler"}, set()),
    "_FrameExecStrategy": ({"compiler"}, set()),
    "_torchdynamo_disable": (set(), set()),
}
NAMES: dict[str, tuple[set[str], set[str]]] = {
    **COMPILER_NAMES,
    # Models.
    "_call_impl": ({"forward"}, FORWARD),
    "_compiled_call_impl": ({"forward"}, FORWARD),
    "_wrapped_call_impl": ({"forward"}, FORWARD),
    "_replicate_for_data_parallel": ({"replicas"}, set()),
    "torch.nn:Module._replicate_for_data_parallel": ({"replicas"}, set()),
    # Loaders.
    "_BaseDataLoaderIter": ({"loader", "index_lists", "loader_use"}, DRAWS),
    "torch.utils.data.dataloader._BaseDataLoaderIter": ({"loader", "index_lists", "loader_use"}, DRAWS),
    "_SingleProcessDataLoaderIter": (set(), set()),
    "_num_workers": ({"index_lists", "worker_queue", "loader_use"}, {"ready"}),
    # Samples are guessed then.
    **dict.fromkeys(("_next_index", "_DatasetKind", "_dataset_kind"), ({"index_lists"}, set())),
    **dict.fromkeys(("_auto_collation", "_task_info", "_send_idx"), ({"index_lists"}, set())),
    "_MultiProcessingDataLoaderIter": (set(), set()),
    "_tasks_outstanding": (set(), set()),
    "_prefetch_factor": (set(), set()),
    "_worker_result_queue": ({"worker_queue", "loader_use"}, {"ready"}),
    "_num_yielded": ({"loader_use"}, set()),
    "_next_data": ({"loader_use"}, set()),
    "_index_sampler": ({"loader_use"}, set()),
    "_collate_fn": ({"loader_use"}, set()),
    "_dataset": ({"loader_use"}, set()),
    "_workers": ({"loader_use"}, set()),
    "_rcvd_idx": ({"loader_use"}, set()),
    "_dataset_fetcher": (set(), set()),
    "_pin_memory": (set(), set()),
    "_pin_memory_thread": (set(), set()),
    "_utils": ({"worker_entry"}, set()),
    "_worker_loop": ({"worker_entry"}, set()),
    # Optimizers.
    "profile_hook_step": ({"closures"}, set()),
    # Collectives.
    "_allgather_base": (set(), set()),
    "_reduce_scatter_base": (set(), set()),
    "torch.distributed:ProcessGroup._allgather_base": (set(), set()),
    "_functional_collectives": (set(), set()),
    "torch.distributed._functional_collectives.wait_tensor": ({"functional_collectives"}, set()),
    "_broadcast_coalesced": ({"ddp_buffers"}, {"train collective_wait"}),
    "prepare_for_backward": ({"reductions"}, {"train collective_wait"}),
    "_execution_engine": (set(), set()),
    "_PipelineStageBase": (set(), set()),
    "_apply": ({"tensor_parallel"}, set()),
    # Operations.
    "_subclasses": ({"flops"}, {"flops"}),
    "_python_dispatch": ({"flops"}, {"flops"}),
    "_get_current_dispatch_mode": ({"flops"}, {"flops"}),
    "_overloadpacket": ({"flops"}, {"flops"}),
    "_scaled_dot_product_flash_attention": ({"flops"}, {"flops"}),
    "_scaled_dot_product_flash_attention_backward": ({"flops"}, {"flops"}),
    "_scaled_dot_product_flash_attention_for_cpu": ({"flops"}, {"flops"}),
    "_scaled_dot_product_flash_attention_for_cpu_backward": ({"flops"}, {"flops"}),
}
# Only while a capture runs, while a rank stands still, at the job's start, or on CUDA: their tests have them.
ELSEWHERE = {
    *("_cuda_isHistoryEnabled", "_record_memory_history", "_snapshot"),
    *("_prepare_profiler", "_enable_profiler", "_run_on_profiler_start", "_is_profiler_enabled"),
    *("_add_metadata_json", "_step_dict", "_ExperimentalConfig", "_inductor"),
    *("_distributed_c10d", "_dump_fr_trace_json", "_dump_nccl_trace_json", "_get_default_store"),
    *("_autograd", "_get_sequence_nr", "_parse_kineto_results", "_world"),
    *("_cuda_getDevice", "_cuda_getCurrentRawStream", "_lazy_call"),
    "_cuda_attach_out_of_memory_observer",
}

OFF: set[str] = set() if COUNTS_FLOPS else {"flops"}
"""The hooks that this torch is too old for."""

NEWER = {"_FrameAction", "_FrameExecStrategy"} - {*dir(torch._C._dynamo.eval_frame)}
"""The names that this torch is too old for; their hook does without them there."""
if VERSION <= (2, 4):
    NEWER.add("_apply")  # Its module is not imported there unless the script does that.

OURS = {"_fields", "_children", "_thread", "_Counter", "_original"}
"""Private names that are not torch's: of named tuples and Python's modules, and our own."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What was counted without each name; under the empty name, with all of them."""
    program = Path(__file__).with_name("private_names.py")
    # With the compiler, the first optimizer would import it in each of the others, for most of their time.
    others = [name for name in NAMES if name not in COMPILER_NAMES]
    directory = tmp_path_factory.mktemp("no daemon")
    done = subprocess.run(
        [sys.executable, str(program)],
        input="\n".join(["", *COMPILER_NAMES, "+torch._dynamo", *others]),
        env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(directory), "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    # Gloo of torch 2.7 to 2.10 writes there, too.
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    return {answer["name"]: answer for answer in map(json.loads, lines)}


def everything(answer: dict[str, Any]) -> dict[str, Any]:
    return {**answer["counted"], **{name: answer[name] for name in ("saves", "ready", "flops")}}


def test_hooks_on_a_whole_torch_count_every_phase(answers: dict[str, dict[str, Any]]) -> None:
    assert set(answers[""]["off"]) == OFF
    assert everything(answers[""]) == {
        **dict.fromkeys(("train data", "train forward", "train loss", "train backward"), 16),
        **dict.fromkeys(("train optimizer", "train zero_grad", "train other", "train steps"), 16),
        **dict.fromkeys(("validate data", "validate forward", "validate loss", "validate other"), 4),
        "train collective_wait": 8,
        "train samples": 32,
        "validate steps": 4,
        "validate samples": 8,
        "saves": 1,
        "ready": True,
        "flops": 64 if COUNTS_FLOPS else None,
    }


@pytest.mark.parametrize("name", NAMES)
def test_hooks_without_a_name_lose_its_phase_only(name: str, answers: dict[str, dict[str, Any]]) -> None:
    answer, (off, lost) = answers[name], NAMES[name] if name not in NEWER else (set(), set())
    assert answer.get("raised") is None
    assert set(answer["off"]) == off | OFF
    for hook, reason in answer["off"].items():
        assert f"hook {hook} is off: {reason}; what it measures is missing" in answer["text"]
    expected = {key: value for key, value in everything(answers[""]).items() if key not in lost}
    assert {key: value for key, value in everything(answer).items() if key not in lost} == expected


def test_private_names_of_hooks_are_all_in_the_table() -> None:
    used = {name for path in (PACKAGE / "hooks").glob("*.py") for name in private_names(path)}
    assert used - OURS == {name.rpartition(".")[2] for name in NAMES if name.startswith("_")} | ELSEWHERE


def test_private_names_of_torch_are_in_hooks_only() -> None:
    hooks = {name for path in (PACKAGE / "hooks").glob("*.py") for name in private_names(path)} - OURS
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name not in ("hooks", "v1"):
            assert {*(hooks & set(private_names(path))), *torchs_names(path)} == set(), path
    for path in sorted((*PACKAGE.rglob("*.c"), *PACKAGE.rglob("*.h"))):
        assert hooks & set(re.findall(r"\b_\w+", path.read_text())) == set(), path
