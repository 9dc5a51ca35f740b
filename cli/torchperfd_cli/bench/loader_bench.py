"""One comparison of a DataLoader's settings, from the search to its result and the table of it."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from torchperfd.document.blocks import Document, Facts, Sentences
from torchperfd.document.tables import Table
from torchperfd.document.terminal import render
from torchperfd.errors import TorchperfdError
from torchperfd.model.formatting import duration, size
from torchperfd.model.loader_facts import UNMEASURED_COST, LoaderAdvice, WorkerCost
from torchperfd_cli.bench.loader_process import (
    LoaderDescription,
    LoaderMeasurer,
    LoaderSetting,
    Outcome,
    RestOfStep,
    Speed,
    Unusable,
)
from torchperfd_cli.bench.search import LoaderSearch, SearchSpace, with_workers
from torchperfd_daemon.loader_workers import advise_loader, predict_step

SCHEMA: Final = "torchperfd.bench_dataloader/1"

_ONE_ROUND: Final = 0.4
"""Share of the time for a setting that one measurement takes; the best ones are measured again in two rounds
or three, in turn, because a machine's speed changes within seconds."""

_MAX_OFF: Final = 2.0
"""A prediction that is off by a larger factor is of another machine than the one that was measured."""

Progress = Callable[[int, LoaderSetting], None]
"""Called with the number of measurements so far and the setting that is measured next."""


class UnusableLoaderError(TorchperfdError):
    """No setting of the loader gave a batch."""


@dataclass(slots=True)
class LoaderBench:
    """What a DataLoader gave under each setting.

    Attributes:
        outcomes: By setting, in the order of measuring.
        recommended: The setting to use; None where none was usable.
        rest: A step without its input; None where it is unknown.
        is_complete: Whether the search came to its end.
    """

    target: str
    facts: LoaderDescription
    outcomes: dict[LoaderSetting, Outcome]
    recommended: LoaderSetting | None
    rest: RestOfStep | None
    took_seconds: float
    is_complete: bool
    cost: WorkerCost = UNMEASURED_COST

    def speed(self, setting: LoaderSetting | None) -> Speed | None:
        """Return what a setting gave; None where it gave nothing."""
        found = self.outcomes.get(setting) if setting is not None else None
        return found if isinstance(found, Speed) else None

    @property
    def gain(self) -> float | None:
        """How many times as fast the recommended setting is as the loader's own; None where unknown."""
        own, best = self.speed(self.facts.current), self.speed(self.recommended)
        return best.samples_per_second / own.samples_per_second if own and best else None

    @property
    def is_certain(self) -> bool:
        """Whether the recommended setting gains more than the measurements of both settings spread."""
        own, best = self.speed(self.facts.current), self.speed(self.recommended)
        if own is None or best is None or self.recommended == self.facts.current:
            return True
        return best.samples_per_second / own.samples_per_second - 1 > max(own.spread, best.spread)

    @property
    def credible_prediction(self) -> float | None:
        """The predicted time of the recommended setting; None if it is off by more than a factor of two."""
        predicted, measured = self.predicted_seconds(self.recommended), self.speed(self.recommended)
        if predicted is None or measured is None:
            return None
        return predicted if 1 / _MAX_OFF <= predicted / measured.batch_seconds <= _MAX_OFF else None

    @property
    def advice(self) -> LoaderAdvice | None:
        """What the rule of the live verdict advises for a training step, from the loader without workers.

        Of a loader by itself, the rest of a step is counted where it is known. None without advice.
        """
        base = self._without_workers
        if base is None or base.loader is None:
            return None
        rest = self.rest.seconds if self.rest is not None and not self.facts.has_step else 0.0
        return advise_loader(
            base.loader,
            base.batch_seconds + rest,
            base.wait_seconds,
            self.cost,
            on_device=self.facts.has_device,
        )

    def predicted_seconds(self, setting: LoaderSetting | None) -> float | None:
        """Return the time from one batch to the next that the rule predicts, from that without workers.

        None of a setting without workers, and of one that differs from the loader's own in more than workers.
        """
        base = self._without_workers
        if setting is None or base is None or base.loader is None or not setting.workers:
            return None
        if with_workers(setting, 0) != with_workers(self.facts.current, 0):
            return None
        return predict_step(base.loader, base.batch_seconds, base.wait_seconds, setting.workers, self.cost)

    @property
    def _without_workers(self) -> Speed | None:
        return self.speed(with_workers(self.facts.current, 0))

    def __str__(self) -> str:
        return render(loader_document(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the document of schema ``torchperfd.bench_dataloader/1``."""
        recommended = self.recommended if self.is_certain else None
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
            "recommended": asdict(recommended) if recommended else None,
            "recommended_code": recommended.code() if recommended else None,
            "fastest": asdict(self.recommended) if self.recommended else None,
            "predicted_batch_seconds": self.credible_prediction,
            "advice": asdict(advice) if (advice := self.advice) else None,
            "gain_ratio": self.gain,
            "rest_seconds": self.rest.seconds if self.rest else None,
            "predicted_rest_seconds": self.rest.predicted_seconds if self.rest else None,
            "took_seconds": self.took_seconds,
            "is_complete": self.is_complete,
        }


def bench_loader(
    target: str,
    measurer: LoaderMeasurer,
    space: Callable[[LoaderDescription], SearchSpace],
    progress: Progress,
    cost: WorkerCost = UNMEASURED_COST,
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
            outcome = measurer.measure(setting, _ONE_ROUND)
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
    return LoaderBench(target, facts, search.outcomes, search.recommended(), rest, took, is_complete, cost)


_NOTABLE: Final = 0.05
_MARK: Final = " ◀"
_NAMES: Final = len("recommended  ")
_SETTINGS: Final = ("batch", "pinned", "start", "threads")
"""Columns that move above their rows where they do not fit, those first that change least."""


def loader_document(bench: LoaderBench) -> Document:
    """Return the result for people: a table of the settings, and what follows from it."""
    facts = bench.facts
    counted = f"{len(bench.outcomes)} settings in {duration(bench.took_seconds)}"
    title = f"── {bench.target} · {facts.cpus:g} CPUs · {counted} ──"
    interrupted = [] if bench.is_complete else ["interrupted: not all settings were measured"]
    words = (Facts(_results(bench), column=_NAMES), Sentences(interrupted, margin=_NAMES))
    return Document([[Sentences([title])], [_table(bench)], words])


def _results(bench: LoaderBench) -> list[tuple[str, str]]:
    """Return the facts below the table; one without a name continues the one before."""
    facts, best = bench.facts, bench.speed(bench.recommended)
    lines = []
    if bench.recommended is None or best is None:
        lines.append(("recommended", "unknown: no setting gave a batch"))
    elif not bench.is_certain:
        own = bench.speed(facts.current)
        spread = max(best.spread, own.spread if own else 0.0)
        code = bench.recommended.code(facts.current)
        lines.append(("recommended", f"nothing: {code} was {bench.gain:.2f} times as fast,"))
        lines.append(
            ("", f"but measurements spread by {spread:.0%}; measure on a quieter machine, or longer")
        )
    elif bench.recommended == facts.current:
        lines.append(("recommended", "the loader's own setting: no other was faster by more than 2 %"))
    else:
        lines.append(("recommended", bench.recommended.code(facts.current)))
        if bench.gain is not None:
            lines.append(("", f"{bench.gain:.2f} times as fast as the loader's own setting"))
    lines += _predictions(bench)
    if best is not None and bench.rest is not None:
        lines += _ceiling(bench, best, bench.rest.seconds)
    return lines


def _predictions(bench: LoaderBench) -> list[tuple[str, str]]:
    lines = []
    predicted, measured = bench.credible_prediction, bench.speed(bench.recommended)
    if predicted is not None and measured is not None:
        off = predicted / measured.batch_seconds - 1
        words = f"{duration(predicted)} a batch, from the loader without workers: {off:+.0%} beside"
        lines.append(("predicted", f"{words} the measurement"))
    if (advice := bench.advice) is not None:
        lines.append(("advised", f"{advice.setting}, for {duration(advice.step_seconds)} a step,"))
        lines.append(("", "by the rule of diagnose"))
    return lines


def _ceiling(bench: LoaderBench, best: Speed, rest: float) -> list[tuple[str, str]]:
    per_batch = best.samples_per_second * best.batch_seconds
    if bench.facts.has_step:
        said = f"{duration(best.batch_seconds)} with this loader"
        share = max(0.0, 1 - rest / best.batch_seconds)
    else:
        said = f"the loader makes a batch in {duration(best.batch_seconds)}"
        share = max(0.0, 1 - rest / max(rest, best.batch_seconds))
    ceiling = f"{per_batch / rest:,.0f} samples/s"
    waits = f"{share:.0%} of a step is waiting for input"
    return [
        ("ceiling", f"{ceiling}: a step takes {duration(rest)} without input, {said}"),
        ("", waits if share >= _NOTABLE else "faster input would gain nothing"),
    ]


def _table(bench: LoaderBench) -> Table:
    shown = sorted(
        bench.outcomes, key=lambda each: (each.batch_size or 0, each.workers, each.prefetch, each.threads)
    )
    varied = {
        "batch": any(each.batch_size is not None for each in shown),
        "threads": any(each.threads for each in shown),
        "pinned": any(each.pin_memory for each in shown),
        "start": any(each.start_method for each in shown),
    }
    arguments: dict[str, Callable[[LoaderSetting], str]] = {
        "workers": lambda each: str(each.workers),
        "prefetch": lambda each: str(each.prefetch) if each.workers else "-",
        "batch": lambda each: str(each.batch_size),
        "threads": lambda each: str(each.threads or "-"),
        "pinned": lambda each: "yes" if each.pin_memory else "no",
        "start": lambda each: each.start_method or "-",
    }
    arguments = {name: cell for name, cell in arguments.items() if varied.get(name, True)}
    figures: dict[str, Callable[[Speed], str]] = {
        "samples/s": lambda each: f"{each.samples_per_second:,.0f}",
        "± spread": lambda each: f"{each.spread:.0%}",
        "a batch": lambda each: duration(each.batch_seconds),
        "waits": lambda each: f"{each.wait_seconds / each.batch_seconds:.0%}",
        "first batch": lambda each: duration(each.start_seconds),
        "bytes": lambda each: size(each.batch_bytes),
    }
    if not bench.facts.has_step:
        del figures["waits"]
    rows: list[list[str]] = []
    notes: list[str] = []
    for setting in shown:
        outcome = bench.outcomes[setting]
        cells = [cell(outcome) if isinstance(outcome, Speed) else "-" for cell in figures.values()]
        rows.append([*(cell(setting) for cell in arguments.values()), *cells])
        words = [
            "the loader's own" if setting == bench.facts.current else "",
            outcome.reason if isinstance(outcome, Unusable) else "",
        ]
        mark = _MARK if setting == bench.recommended else ""
        notes.append(f"{mark}  {'  '.join(filter(None, words))}".rstrip())
    return Table([*arguments, *figures], rows, lift=_SETTINGS, folds_heads=True, notes=notes)
