"""Docstrings of all public names: examples print the output shown, and signatures name every parameter."""

from __future__ import annotations

import importlib
import inspect

import pytest

import dasksc.datasets
from tests.support import examples

pytestmark = pytest.mark.programs

MODULES = (
    *("dasksc", "dasksc.datasets", "dasksc.tokens", "dasksc.transforms", "dasksc.experimental"),
    *("dasksc.train", "dasksc.train.models", "dasksc.integrations.data_module"),
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples") / "demo"
    dasksc.datasets.demo_data(folder)
    return folder


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_an_example(module):
    things = examples.public_things(module)
    assert things
    assert [name for name, thing in things.items() if not examples.has_example(thing.__doc__)] == []


@pytest.mark.parametrize("module", MODULES)
def test_examples_print_what_they_show(module, demo, tmp_path):
    reports = ""
    for name, thing in examples.public_things(module).items():
        if module == "dasksc.experimental" or (module == "dasksc.transforms" and name in dasksc.__all__):
            continue  # same name as in dasksc
        with examples.demo_folder(demo, tmp_path / name):
            reports += examples.failures_of(thing.__doc__, f"{module}.{name}")
    assert not reports, reports


TRAINERS = {
    "lightning": ("dasksc.integrations.lightning", "scDataModule"),
    "scvi": ("dasksc.integrations.scvi", "SCVIDataModule"),
    "transformers": ("dasksc.integrations.transformers", "scTrainer"),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("library", TRAINERS)
def test_examples_of_names_that_need_a_trainer_print_what_they_show(library, demo, tmp_path):
    pytest.importorskip(library)
    module, name = TRAINERS[library]
    thing = getattr(importlib.import_module(module), name)
    assert examples.has_example(thing.__doc__)
    with examples.demo_folder(demo, tmp_path / name):
        assert not examples.failures_of(thing.__doc__, name)


def test_options_of_a_data_set_are_those_of_its_signature():
    options = set(inspect.signature(dasksc.scDataset).parameters)
    module = set(inspect.signature(examples.public_things("dasksc.integrations.data_module")["DataModule"]).parameters)
    assert options - module == {"strategy", "rank", "world_size"}
    predict = inspect.signature(dasksc.predict).parameters
    unused = {"strategy", "filter", "drop_last", "equal_ranks", "label_key", "seed", "return_index", "data_collection"}
    unused |= {"expand"}  # "auto"
    assert options - set(predict) == unused
    assert predict["batch_size"].default == 1024
