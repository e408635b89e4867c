"""The programs of docs/trainers.md run from top to bottom, those of each library where it is installed."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys

import pytest
from make_atlas import make_atlas

from tests.test_readme import BLOCK, ROOT

PAGE = ROOT / "docs" / "trainers.md"
LIBRARIES = ("torch", "torchdata", "lightning", "accelerate", "transformers", "scvi")


def programs() -> list[str]:
    return [block[2] for block in BLOCK.finditer(PAGE.read_text()) if block[1] == "python"]


def library_of(program: str) -> str:
    (library,) = {name for name in LIBRARIES if re.search(rf"^(from|import) {name}\b", program, re.MULTILINE)} - {
        "torch"
    }
    return library


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    make_atlas(folder / "atlas.h5ad", 1_000, 200)
    return folder


def test_every_library_of_the_page_has_a_program():
    _, plain, *rest = programs()
    assert "from torch.utils.data" in plain
    assert sorted(map(library_of, rest)) == sorted(LIBRARIES[1:])


def test_what_the_page_tells_lightning_instead_of_yaml_are_its_arguments():
    pl = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import FSDPStrategy

    text = PAGE.read_text()
    table = text[text.index("| YAML | `pl.Trainer` |") :].split("\n- ")[0]
    (nested,) = re.findall(r"ModelCheckpoint\((.*?)\)", table)
    (sharded,) = re.findall(r"FSDPStrategy\((.*?)\)", table)
    outer = table.replace(nested, "").replace(sharded, "").replace("ckpt_path", "")
    for kind, told in ((pl.Trainer, outer), (ModelCheckpoint, nested)):
        names = set(re.findall(r"\b([a-z_]+)=", told))
        assert names
        assert names <= set(inspect.signature(kind).parameters)
    assert {"cpu_offload", "sharding_strategy"} == set(re.findall(r"\b([a-z_]+)=", sharded))
    assert {"cpu_offload", "sharding_strategy"} <= set(inspect.signature(FSDPStrategy).parameters)
    assert "ckpt_path" in inspect.signature(pl.Trainer.fit).parameters


@pytest.mark.parametrize("library", LIBRARIES)
def test_its_program_runs(library, folder):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    common, plain, *rest = programs()
    program = plain if library == "torch" else next(one for one in rest if library_of(one) == library)
    (folder / f"{library}_program.py").write_text(common + program)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", f"{library}_program.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
