"""The text of families, in Prometheus's format or OpenMetrics.

prometheus_client's encoders take several times as long. A page has thousands of series, and a scraper asks
for it every few seconds.
"""

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

from torchperfd_daemon.collectors.base import Family

PREFIX = "torchperfd_"
_OPENMETRICS = "application/openmetrics-text"
_END = "# EOF\n"
# Python writes numbers of this range as Go does.
_LEAST_SAME, _MOST_SAME = -1e6, 1e6


class _One:
    """One metric, as prometheus_client's encoders take it."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


def render(families: Iterable[Family | Metric], accept: str) -> tuple[bytes, str]:
    """Return the text of families and its content type, for the ``Accept`` header of a scraper."""
    encode, content_type = choose_encoder(accept)
    is_openmetrics = content_type.startswith(_OPENMETRICS)
    parts: list[str] = []
    for family in families:
        if isinstance(family, Metric):
            parts.append(encode(_One(family)).decode().removesuffix(_END))
        else:
            parts += _lines(family, is_openmetrics=is_openmetrics)
    if is_openmetrics:
        parts.append(_END)
    return "".join(parts).encode(), content_type


def _lines(family: Family, *, is_openmetrics: bool) -> Iterator[str]:
    name = PREFIX + family.name
    series = f"{name}_total" if family.kind == "counter" else name
    # In OpenMetrics a counter is named without the suffix of its series.
    named = name if is_openmetrics else series
    text = family.help.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {named} {_quoted(family.help) if is_openmetrics else text}\n# TYPE {named} {family.kind}\n"
    order = sorted(range(len(family.labels)), key=family.labels.__getitem__)
    labels = ",".join([f'{family.labels[place]}="%s"' for place in order])
    line = f"{series}{{{labels}}} %s\n" if order else f"{series} %s\n"
    for values, value in family.samples:
        together = "".join(values)
        shown = values if _quoted(together) is together else [_quoted(each) for each in values]
        yield line % (*[shown[place] for place in order], _text(value))


def _text(value: float) -> str:
    if _LEAST_SAME < value < _MOST_SAME:
        return repr(float(value))
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _quoted(text: str) -> str:
    if '"' in text or "\\" in text or "\n" in text:
        return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return text
