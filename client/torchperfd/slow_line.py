"""Where a process that is slow to load spends its time, by samples of its stack."""

from dataclasses import dataclass
from pathlib import PurePath


@dataclass(frozen=True, slots=True)
class SlowLine:
    """The stage of loading that takes longest, and the line in it that does.

    Attributes:
        stage: ``fetch``, ``collate``, ``pin``, ``sampler`` or ``other``.
        stage_share: The part of the samples in this stage, 0 to 1.
        file: Of the line; empty where no line stands out.
        line: Its number.
        function: That the line is in.
        call: What the line calls; empty if unknown.
        share: The part of the samples at this line, 0 to 1.
        samples: Of processes that were loading.
        in_workers: The samples are of DataLoader workers, not of the training thread.
    """

    stage: str
    stage_share: float
    file: str = ""
    line: int = 0
    function: str = ""
    call: str = ""
    share: float = 0.0
    samples: int = 0
    in_workers: bool = False

    @property
    def words(self) -> str:
        """It in one line, such as ``train.py:37 in __getitem__, calls sleep: 93% of loading (fetch 98%)``."""
        loading = "the workers' loading" if self.in_workers else "loading"
        if not self.file:
            return f"{self.stage} is {self.stage_share:.0%} of {loading}; no line of it stands out"
        calls = f", calls {self.call}" if self.call else ""
        return (
            f"{PurePath(self.file).name}:{self.line} in {self.function}{calls}:"
            f" {self.share:.0%} of {loading} ({self.stage} {self.stage_share:.0%})"
        )
