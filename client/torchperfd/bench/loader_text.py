"""The table of ``torchperfd bench dataloader``."""

from typing import Final

from torchperfd.bench.loader_bench import LoaderBench
from torchperfd.bench.settings import LoaderSetting, Speed, Unusable
from torchperfd.durations import duration
from torchperfd.sizes import size

_NOTABLE: Final = 0.05


def loader_text(bench: LoaderBench) -> str:
    """Return the result as lines for people, without a newline at the end."""
    facts = bench.facts
    counted = f"{len(bench.outcomes)} settings in {duration(bench.took_seconds)}"
    lines = [f"── {bench.target} · {facts.cpus:g} CPUs · {counted} ──", ""]
    lines += _table(bench)
    best = bench.speed(bench.recommended)
    lines.append("")
    if bench.recommended is None or best is None:
        lines.append("recommended  unknown: no setting gave a batch")
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
    return "\n".join(lines)


def _predictions(bench: LoaderBench) -> list[str]:
    """Return what the rule of the live verdict predicts for the recommendation, and what it advises."""
    lines = []
    predicted, measured = bench.predicted_seconds(bench.recommended), bench.speed(bench.recommended)
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


def _table(bench: LoaderBench) -> list[str]:
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
    notes: list[str] = []
    shown.sort(key=lambda each: (each.batch_size or 0, each.workers, each.prefetch, each.threads))
    for setting in shown:
        outcome = bench.outcomes[setting]
        mark = " ◀" if setting == bench.recommended else ""
        mark += "  the loader's own" if setting == bench.facts.current else ""
        cells = [str(setting.workers), str(setting.prefetch) if setting.workers else "-"]
        cells += [str(setting.batch_size)] if has_size else []
        cells += _varied_cells(setting, varied)
        if isinstance(outcome, Unusable):
            rows.append([*cells, *["-"] * (len(heads) - len(cells))])
            notes.append(f"{mark}  {outcome.reason}")
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
        notes.append(mark)
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    lines = ["  ".join(head.rjust(width) for head, width in zip(heads, widths, strict=True))]
    for row, note in zip(rows, notes, strict=True):
        lines.append("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + note)
    return lines


def _varied_cells(setting: LoaderSetting, varied: dict[str, bool]) -> list[str]:
    cells = {
        "threads": str(setting.threads or "-"),
        "pinned": "yes" if setting.pin_memory else "no",
        "start": setting.start_method or "-",
    }
    return [cells[name] for name, is_on in varied.items() if is_on]
