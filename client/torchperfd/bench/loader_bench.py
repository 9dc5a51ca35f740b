"""One comparison of a DataLoader's settings, from the search to its result."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from torchperfd.bench.loader_measurer import LoaderMeasurer
from torchperfd.bench.search import LoaderSearch, SearchSpace
from torchperfd.bench.settings import LoaderFacts, LoaderSetting, Outcome, RestOfStep, Speed, Unusable
from torchperfd.errors import TorchperfdError

SCHEMA: Final = "torchperfd.bench_dataloader/1"

_EXPLORING: Final = 0.5
"""Share of the time for a setting of which only its order among the others is of interest."""

Progress = Callable[[int, LoaderSetting], None]
"""Called with the number of measurements so far and the setting that is measured next."""


class UnusableLoaderError(TorchperfdError):
    """No setting of the loader gave a batch."""


@dataclass(slots=True)
class LoaderBench:
    """What a DataLoader gave under each setting.

    Attributes:
        target: What was measured, for the title.
        facts: Of the loader.
        outcomes: By setting, in the order of measuring.
        recommended: The setting to use; None where none was usable.
        rest: A step without its input; None where it is unknown.
        took_seconds: All of it.
        is_complete: Whether the search came to its end.
    """

    target: str
    facts: LoaderFacts
    outcomes: dict[LoaderSetting, Outcome]
    recommended: LoaderSetting | None
    rest: RestOfStep | None
    took_seconds: float
    is_complete: bool

    def speed(self, setting: LoaderSetting | None) -> Speed | None:
        """Return what a setting gave; None where it gave nothing."""
        found = self.outcomes.get(setting) if setting is not None else None
        return found if isinstance(found, Speed) else None

    @property
    def gain(self) -> float | None:
        """How many times as fast the recommended setting is as the loader's own; None where unknown."""
        own, best = self.speed(self.facts.current), self.speed(self.recommended)
        return best.samples_per_second / own.samples_per_second if own and best else None

    def __str__(self) -> str:
        from torchperfd.bench.loader_text import loader_text

        return loader_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the document of schema ``torchperfd.bench_dataloader/1``."""
        settings = []
        for setting, outcome in self.outcomes.items():
            speed = asdict(outcome) if isinstance(outcome, Speed) else None
            reason = outcome.reason if isinstance(outcome, Unusable) else None
            settings.append({**asdict(setting), "speed": speed, "unusable": reason})
        return {
            "schema": SCHEMA,
            "target": self.target,
            "cpus": self.facts.cpus,
            "current": asdict(self.facts.current),
            "settings": settings,
            "recommended": asdict(self.recommended) if self.recommended else None,
            "recommended_code": self.recommended.code() if self.recommended else None,
            "gain_ratio": self.gain,
            "rest_seconds": self.rest.seconds if self.rest else None,
            "predicted_rest_seconds": self.rest.predicted_seconds if self.rest else None,
            "took_seconds": self.took_seconds,
            "is_complete": self.is_complete,
        }


def bench_loader(
    target: str, measurer: LoaderMeasurer, space: Callable[[LoaderFacts], SearchSpace], progress: Progress
) -> LoaderBench:
    """Measure a loader under the settings that a search chooses. Ctrl-C ends it with what there is by then.

    Raises:
        TorchperfdError: The loader could not be made, or no setting gave a batch.
    """
    began = time.monotonic()
    facts = measurer.facts()
    search = LoaderSearch(facts, space(facts))
    rest, is_complete = None, True
    try:
        settings = search.settings()
        setting = next(settings, None)
        count = 0
        while setting is not None:
            progress(count, setting)
            outcome = measurer.measure(setting, 1.0 if search.is_confirming else _EXPLORING)
            count += 1
            if isinstance(outcome, Unusable) and search.best() is None and not setting.workers:
                # Without workers there is nothing left that a setting could change.
                raise UnusableLoaderError(f"{target} gave no batch: {outcome.reason}")
            try:
                setting = settings.send(outcome)
            except StopIteration:
                setting = None
        recommended = search.recommended()
        if recommended is not None:
            rest = measurer.rest_of_step(recommended)
    except KeyboardInterrupt:
        is_complete = False
    took = time.monotonic() - began
    return LoaderBench(target, facts, search.outcomes, search.recommended(), rest, took, is_complete)
