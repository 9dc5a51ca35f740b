"""A run's trace, built step by step with the facts that advice depends on."""

from dataclasses import dataclass, field
from typing import Any, Final

from tests.support.advice_settings import unknown_names
from tests.unit.daemon import traces
from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.advice import Advice

US: Final = 1_000
MS: Final = 1_000_000


@dataclass(slots=True)
class Run:
    """The events of one run; times in ns.

    Attributes:
        category: The category of its runtime calls.
        launch: The name of its launching call.
    """

    category: str = "cuda_runtime"
    launch: str = "cudaLaunchKernel"
    events: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    number: int = 0

    def steps(self, count: int, length: int) -> "Run":
        """Mark steps of one length, one after the other."""
        for at in range(count):
            self.annotate(f"ProfilerStep#{at}", at * length, (at + 1) * length)
        return self

    def annotate(self, name: str, start: int, end: int) -> None:
        """Add an annotation of the host."""
        self.events.append(traces.event(name, start, end, cat="user_annotation"))

    def host(self, name: str, start: int, end: int, cat: str = "cpu_op", **args: Any) -> None:
        """Add an event of the host; an operator unless another category is named."""
        self.events.append(traces.event(name, start, end, cat=cat, args=args))

    def call(self, name: str, start: int, end: int) -> None:
        """Add a runtime call."""
        self.host(name, start, end, self.category)

    def launches(
        self,
        operator: str,
        start: int,
        end: int,
        kernel: tuple[str, int, int] | None,
        *,
        stream: int = 7,
        cat: str = "kernel",
        **args: Any,
    ) -> None:
        """Add an operator whose launch ends with it, and the kernel: name, start and end; None for none."""
        self.number += 1
        linked = {"correlation": self.number}
        inputs: dict[str, Any] = {"Input Dims": [[8, 8]], "Input type": ["c10::BFloat16"]}
        self.host(operator, start, end, **inputs)
        self.host(self.launch, start + US, end, self.category, **linked)
        if kernel is not None:
            name, begin, until = kernel
            arguments = {**linked, "device": 0, "stream": stream, **args}
            self.events.append(traces.event(name, begin, until, cat=cat, thread=stream, args=arguments))

    def trains(self) -> "Run":
        """Show a node of the backward pass."""
        self.host("MmBackward0", 0, US)
        return self

    def summary(self) -> analysis.Summary:
        """Return the analysis."""
        return analysis.summarise(traces.trace_of(self.events, **self.facts))

    def advice(self) -> dict[str, Advice]:
        """Return the advice by rule; every setting must exist in the installed torch."""
        found = {each.rule: each for each in self.summary().advice}
        assert [unknown_names(each.setting) for each in found.values() if unknown_names(each.setting)] == []
        return found

    def notes(self) -> list[str]:
        """Return the sentences on the quality of the recording."""
        return analysis.quality_lines(self.summary().quality)
