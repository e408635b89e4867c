"""Examples and signatures of names that need a trainer: Lightning, scvi-tools and transformers."""

from __future__ import annotations

import importlib

import pytest

import dasksc.datasets
from tests.support import examples

pytestmark = pytest.mark.programs

CLASSES = {
    "lightning": ("dasksc.integrations.lightning", "scDataModule"),
    "scvi": ("dasksc.integrations.scvi", "SCVIDataModule"),
    "transformers": ("dasksc.integrations.transformers", "scTrainer"),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("library", CLASSES)
def test_examples_print_what_they_show(library, tmp_path):
    pytest.importorskip(library)
    module, name = CLASSES[library]
    dasksc.datasets.demo_data(tmp_path / "demo")
    thing = getattr(importlib.import_module(module), name)
    assert examples.has_example(thing.__doc__)
    with examples.demo_folder(tmp_path / "demo", tmp_path / "work"):
        report = examples.failures_of(thing.__doc__, name)
    assert not report, report
