"""The table of a rank's fields: metrics, report and docs follow from it."""

from typing import Any

import pytest
from tests.support.node import ROOT

from torchperfd.model.fields import FIELDS, Field
from torchperfd.report.rank import rank_document
from torchperfd.steps.phases import PhaseNames
from torchperfd.steps.totals import CudaMemory as ClientCudaMemory
from torchperfd.steps.totals import Totals
from torchperfd_daemon.metrics.training import TrainingMetrics
from torchperfd_daemon.store import RankIdentity, Store

DOC = (ROOT / "docs" / "metrics.md").read_text()


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.metric)
def test_field_is_in_docs_with_its_help(field: Field) -> None:
    words = field.help[0].lower() + field.help[1:].removesuffix(".")
    assert f"| `{field.series}` | {words} |" in DOC.splitlines()


def test_fields_are_the_families_of_a_rank_in_order() -> None:
    store = Store()
    store.join(RankIdentity("bert", 0))
    families = [family.name for family in TrainingMetrics(store).families()]
    assert [name for name in families if name in {field.metric for field in FIELDS}] == [
        field.metric for field in FIELDS
    ]


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.metric)
def test_field_is_in_the_report_document(field: Field) -> None:
    totals = Totals(cuda=ClientCudaMemory(1, 2, 3))
    *groups, key = field.report.split(".")
    document: dict[str, Any] = rank_document(0, totals, PhaseNames())
    for group in groups:
        document = document[group]
    assert key in document


def test_field_names_end_in_their_unit() -> None:
    for field in FIELDS:
        if field.unit in ("seconds", "bytes", "ratio"):
            assert field.metric.endswith(f"_{field.unit}"), field
