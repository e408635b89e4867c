"""Examples and signatures of names that need a trainer: Lightning, scvi-tools and transformers."""

from __future__ import annotations

import importlib
import inspect

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


@pytest.mark.parametrize("library", CLASSES)
def test_signatures_name_every_parameter(library):
    pytest.importorskip(library)
    for name, thing in examples.public_things(CLASSES[library][0]).items():
        for method in (thing, *(value for key, value in vars(thing).items() if key == "train")):
            parameters = inspect.signature(method).parameters
            assert not [one for one in parameters.values() if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)], name
            assert len(parameters) > 2
