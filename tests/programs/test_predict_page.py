"""The page on predictions, and its example: train, embed, UMAP."""

from __future__ import annotations

import re
import shlex
import sys

import pytest
import yaml
from make_atlas import make_atlas

from dasksc.train import Config
from tests.support.programs import ROOT, blocks, run, run_page
from tests.support.training import small, train

pytestmark = pytest.mark.programs

PAGE = ROOT / "docs" / "guides" / "predict.md"


def test_the_page_runs(tmp_path):
    atlas = make_atlas(tmp_path / "made.h5ad", 2_000, 100, n_types=5)
    done = run_page(PAGE, tmp_path, atlas)
    assert "'obsm/X_emb': '(2000, 64) float32'" in done.stdout
    assert "(1000, 64)" in done.stdout


def test_the_commands_of_the_page_run(tmp_path):
    make_atlas(tmp_path / "atlas.h5ad", 500, 50, n_types=5)
    make_atlas(tmp_path / "atlas.zarr", 500, 50, n_types=5)
    raw = small(tmp_path / "atlas.h5ad", tmp_path / "run", training__max_steps=2)
    (section,) = (block[2] for block in blocks(PAGE, "yaml"))
    assert Config.of(raw | yaml.safe_load(section)).predict.key == "X_emb"
    train(raw)
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "models.py").write_text("def embed(batch):\n    return batch[:, :3]\n")
    commands = re.search(r"^```\n(dasksc embed.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1].splitlines()
    assert len(commands) == 4
    for command in commands[:3]:
        printed = run([sys.executable, "-m", *shlex.split(command)], cwd=tmp_path)
        assert "500 of 500 cells predicted" in printed


def test_the_example_trains_embeds_and_draws(tmp_path):
    program = ROOT / "examples" / "embed_umap.py"
    sizes = ["--cells", "8000", "--genes", "2000", "--drawn", "600", "--epochs", "5"]
    printed = run([sys.executable, program, *sizes, "--figure", "umap.png"], cwd=tmp_path, TMPDIR=str(tmp_path))
    assert "embedded 8,000 cells" in printed
    shared, chance = map(int, re.search(r"share cell_type: (\d+)%, by chance (\d+)%", printed).groups())
    assert shared > 2 * chance
    assert (tmp_path / "umap.png").read_bytes().startswith(b"\x89PNG")
