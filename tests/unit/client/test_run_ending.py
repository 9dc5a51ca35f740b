"""How a script has ended, in words: also where it has not trained, and where another rank failed first."""

import pytest

from torchperfd.launch.script import cause_elsewhere, exit_document
from torchperfd.report.ending import Ending, RankFailure, explain_error, failure_remedy, first_failure
from torchperfd.v1 import control_pb2, session_pb2

ELSEWHERE = "rank 1 failed before its first step: ValueError: bad"
BUS_ERROR = (
    "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that"
    " dataloader's workers are out of shared memory. Please try to raise your shared memory limit."
)
MIB = 2**20


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        (Ending(), ""),
        (Ending("finished"), "finished"),
        (Ending("failed", "exit code 2"), "failed: exit code 2"),
        (Ending("interrupted"), "interrupted by Ctrl-C"),
        (Ending("terminated"), "terminated by SIGTERM"),
        (Ending("terminated", "", ELSEWHERE), f"terminated by SIGTERM, after {ELSEWHERE}"),
    ],
)
def test_ending_has_its_cause(ending: Ending, words: str) -> None:
    assert ending.words == words


@pytest.mark.parametrize(
    ("ending", "advice", "why"),
    [
        (
            Ending("failed", "KeyError: 'x'"),
            "",
            "the script failed before its first training step: KeyError: 'x'",
        ),
        # A failure explains missing steps better than how training could be seen.
        (Ending("failed", "no"), "call step()", "the script failed before its first training step: no"),
        (Ending("failed"), "", "the script failed before its first training step"),
        (Ending("terminated"), "", "SIGTERM ended the script before its first training step"),
        (
            Ending("terminated"),
            "call step()",
            "SIGTERM ended the script before its first training step; call step()",
        ),
        (Ending("terminated", "", ELSEWHERE), "call step()", ELSEWHERE),
        (Ending("failed", "RuntimeError: Connection closed by peer", ELSEWHERE), "", ELSEWHERE),
        (Ending("interrupted"), "call step()", "call step()"),
        (Ending("finished"), "", "no training step was seen: the script has not trained with torch"),
    ],
)
def test_untrained_run_says_why(ending: Ending, advice: str, why: str) -> None:
    assert ending.why_untrained(advice) == why


@pytest.mark.parametrize(
    ("ending", "failure"),
    [
        (Ending("finished"), ""),
        (Ending("interrupted"), ""),
        (Ending("terminated"), ""),
        (Ending("failed"), "the script failed"),
        (Ending("failed", "KeyError: 'x'"), "KeyError: 'x'"),
        (Ending("failed", "RuntimeError: reset by peer", ELSEWHERE), ELSEWHERE),
        (Ending("terminated", "", ELSEWHERE), ELSEWHERE),
    ],
)
def test_failure_is_that_of_the_first_rank(ending: Ending, failure: str) -> None:
    assert ending.failure == failure


def test_first_failure_is_the_earliest_of_another_rank() -> None:
    late, early = RankFailure(2, "OSError: gone", 40, 9.0), RankFailure(1, "ValueError: bad", 1, 7.0)
    assert first_failure([late, early], 0) == "rank 1 failed after 1 step: ValueError: bad"
    assert first_failure([late], 0) == "rank 2 failed after 40 steps: OSError: gone"
    assert first_failure([late, early], 1) == ""
    assert first_failure([], 0) == ""


def test_cause_elsewhere_reads_the_daemons_answer() -> None:
    validated = session_pb2.KindAccount(kind=session_pb2.STEP_KIND_VALIDATE, steps=5)
    failed = control_pb2.RankAccount(
        identity=session_pb2.RankIdentity(rank=1),
        account=session_pb2.Account(kinds=[validated]),
        failure="ValueError: bad",
        failed_unix_seconds=3.0,
    )
    fine = control_pb2.RankAccount(identity=session_pb2.RankIdentity(rank=0))
    assert cause_elsewhere(control_pb2.GetRunResponse(ranks=[fine, failed]), 0) == ELSEWHERE
    assert cause_elsewhere(control_pb2.GetRunResponse(ranks=[fine]), 0) == ""
    assert cause_elsewhere(None, 0) == ""


@pytest.mark.parametrize(
    ("shm", "words"),
    [
        (None, "a DataLoader worker died of SIGBUS: /dev/shm is full or too small ("),
        ((64 * MIB, 63 * MIB), "/dev/shm is full: it holds 64 MiB, 63 MiB in use at the end ("),
        ((64 * MIB, MIB), "/dev/shm was full or is too small: it holds 64 MiB, 1 MiB in use at the end ("),
    ],
)
def test_bus_error_of_a_worker_names_shared_memory(shm: tuple[int, int] | None, words: str) -> None:
    explained = explain_error(BUS_ERROR, shm)
    assert words in explained
    assert explained.endswith(f"({BUS_ERROR})")
    assert "--shm-size" in failure_remedy(explained)


def test_killed_worker_names_memory() -> None:
    explained = explain_error("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ", None)
    assert explained.startswith("a DataLoader worker died of SIGKILL, which the kernel sends when memory is")
    assert "oom" in failure_remedy(explained)


@pytest.mark.parametrize(
    "error",
    [
        "ValueError: bad",
        "RuntimeError: DataLoader worker (pid(s) 7, 8) exited unexpectedly",
        "exit code 3",
        "",
    ],
)
def test_other_error_is_left_as_it_is(error: str) -> None:
    assert explain_error(error, (MIB, 0)) == error
    assert failure_remedy(error) == ""


def test_cause_of_an_exception_explains_it() -> None:
    """Frameworks raise exceptions of their own from that of the loader."""
    try:
        try:
            raise RuntimeError(BUS_ERROR.removeprefix("RuntimeError: "))
        except RuntimeError as error:
            raise ValueError("fit has failed") from error
    except ValueError as error:
        words = exit_document(error)["error"]
    assert words.startswith("a DataLoader worker died of SIGBUS: /dev/shm ")


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("\x1b[1mdo those steps\x1b[0m first", "KeyError: do those steps first"),
        ("\x1b[31m\n\x1b[0;1mreason", "KeyError: reason"),
        ("\x1b]0;title\x07plain", "KeyError: plain"),
        ("\x1b[38;5;196mred\x1b[", "KeyError: red"),
    ],
)
def test_exception_has_no_terminal_codes(message: str, error: str) -> None:
    ended = type("KeyError", (Exception,), {"__str__": lambda _: message})()
    assert exit_document(ended)["error"] == error
