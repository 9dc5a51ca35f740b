"""The table of ``torchperfd bench dataloader``."""

from typing import Final

from torchperfd.bench.loader_bench import LoaderBench
from torchperfd.bench.settings import LoaderSetting, Speed, Unusable
from torchperfd.model.formatting import duration, size
from torchperfd.model.terminal_text import TextTable, fold_text, text_width

_NOTABLE: Final = 0.05
_MARK: Final = " ◀"
_NAMES: Final = len("recommended  ")
_SETTINGS: Final = ("batch", "pinned", "start", "threads")
"""Columns that move above their rows where they do not fit, those first that change least."""


def loader_text(bench: LoaderBench, width: int | None = None) -> str:
    """Return the result as lines for people, without a newline at the end.

    Args:
        width: Columns of the terminal; None if the text is not for one.
    """
    facts = bench.facts
    counted = f"{len(bench.outcomes)} settings in {duration(bench.took_seconds)}"
    title = f"── {bench.target} · {facts.cpus:g} CPUs · {counted} ──"
    words = [fold_text(line, width, margin=_NAMES) for line in _results(bench)]
    return "\n".join([fold_text(title, width), "", *_table(bench, width), "", *words])


def _results(bench: LoaderBench) -> list[str]:
    """Return the lines below the table."""
    facts, best = bench.facts, bench.speed(bench.recommended)
    lines = []
    if bench.recommended is None or best is None:
        lines.append("recommended  unknown: no setting gave a batch")
    elif not bench.is_certain:
        own = bench.speed(facts.current)
        spread = max(best.spread, own.spread if own else 0.0)
        code = bench.recommended.code(facts.current)
        lines.append(f"recommended  nothing: {code} was {bench.gain:.2f} times as fast,")
        lines.append(
            f"             but measurements spread by {spread:.0%}; measure on a quieter machine, or longer"
        )
    elif bench.recommended == facts.current:
        lines.append("recommended  the loader's own setting: no other was faster by more than 2 %")
    else:
        lines.append(f"recommended  {bench.recommended.code(facts.current)}")
        if bench.gain is not None:
            lines.append(f"             {bench.gain:.2f} times as fast as the loader's own setting")
    lines += _predictions(bench)
    if best is not None and bench.rest is not None:
        lines += _ceiling(bench, best, bench.rest.seconds)
    if not bench.is_complete:
        lines.append("interrupted: not all settings were measured")
    return lines


def _predictions(bench: LoaderBench) -> list[str]:
    """Return what the rule of the live verdict predicts for the recommendation, and what it advises."""
    lines = []
    predicted, measured = bench.credible_prediction, bench.speed(bench.recommended)
    if predicted is not None and measured is not None:
        off = predicted / measured.batch_seconds - 1
        lines.append(
            f"predicted    {duration(predicted)} a batch, from the loader without workers: {off:+.0%} beside"
            " the measurement"
        )
    if (advice := bench.advice) is not None:
        lines.append(f"advised      {advice.setting}, for {duration(advice.step_seconds)} a step,")
        lines.append("             by the rule of diagnose")
    return lines


def _ceiling(bench: LoaderBench, best: Speed, rest: float) -> list[str]:
    """Return how fast training could be, and what of that the loader takes."""
    per_batch = best.samples_per_second * best.batch_seconds
    if bench.facts.has_step:
        said = f"{duration(best.batch_seconds)} with this loader"
        share = max(0.0, 1 - rest / best.batch_seconds)
    else:
        said = f"the loader makes a batch in {duration(best.batch_seconds)}"
        share = max(0.0, 1 - rest / max(rest, best.batch_seconds))
    ceiling = f"{per_batch / rest:,.0f} samples/s"
    return [
        f"ceiling      {ceiling}: a step takes {duration(rest)} without input, {said}",
        f"             {share:.0%} of a step is waiting for input"
        if share >= _NOTABLE
        else "             faster input would gain nothing",
    ]


def _table(bench: LoaderBench, width: int | None) -> list[str]:
    shown = list(bench.outcomes)
    has_step = bench.facts.has_step
    has_size = any(setting.batch_size is not None for setting in shown)
    varied = {
        "threads": any(setting.threads for setting in shown),
        "pinned": any(setting.pin_memory for setting in shown),
        "start": any(setting.start_method for setting in shown),
    }
    heads = [
        "workers",
        "prefetch",
        *(["batch"] if has_size else []),
        *(name for name, is_on in varied.items() if is_on),
    ]
    heads += ["samples/s", "± spread", "a batch", *(["waits"] if has_step else []), "first batch", "bytes"]
    rows: list[list[str]] = []
    notes: list[tuple[str, str]] = []
    shown.sort(key=lambda each: (each.batch_size or 0, each.workers, each.prefetch, each.threads))
    for setting in shown:
        outcome = bench.outcomes[setting]
        mark = _MARK if setting == bench.recommended else ""
        words = "the loader's own" if setting == bench.facts.current else ""
        cells = [str(setting.workers), str(setting.prefetch) if setting.workers else "-"]
        cells += [str(setting.batch_size)] if has_size else []
        cells += _varied_cells(setting, varied)
        if isinstance(outcome, Unusable):
            rows.append([*cells, *["-"] * (len(heads) - len(cells))])
            notes.append((mark, "  ".join(part for part in (words, outcome.reason) if part)))
            continue
        rows.append(
            [
                *cells,
                f"{outcome.samples_per_second:,.0f}",
                f"{outcome.spread:.0%}",
                duration(outcome.batch_seconds),
                *([f"{outcome.wait_seconds / outcome.batch_seconds:.0%}"] if has_step else []),
                duration(outcome.start_seconds),
                size(outcome.batch_bytes),
            ]
        )
        notes.append((mark, words))
    room = None if width is None else width - len(_MARK)
    drawn = TextTable(heads, rows, lift=_SETTINGS, folds_heads=True).draw(room)
    lines = list(drawn.head)
    for (*above, last), (mark, words) in zip(drawn.rows, notes, strict=True):
        noted = f"{last}{mark}  {words}".rstrip()
        if width is None or text_width(noted) <= width:
            lines += [*above, noted]
        else:
            lines += [*above, f"{last}{mark}", fold_text(f"    {words}", width, margin=4)]
    return lines


def _varied_cells(setting: LoaderSetting, varied: dict[str, bool]) -> list[str]:
    cells = {
        "threads": str(setting.threads or "-"),
        "pinned": "yes" if setting.pin_memory else "no",
        "start": setting.start_method or "-",
    }
    return [cells[name] for name, is_on in varied.items() if is_on]
