"""Page on predictions, and its example of training, embedding and UMAP."""

from __future__ import annotations

import re
import shlex
import sys

import pytest
import yaml

import dasksc
from dasksc.datasets import demo_data
from dasksc.train import Config
from tests.support.programs import ROOT, blocks, run, run_page
from tests.support.training import small, train

pytestmark = pytest.mark.programs

PAGE = ROOT / "docs" / "guides" / "predict.md"


def test_the_page_runs(tmp_path):
    demo_data(tmp_path / "demo")
    done = run_page(PAGE, tmp_path, tmp_path / "demo" / "atlas.h5ad")
    assert "'obsm/X_emb': '(2000, 64) float32'" in done.stdout
    assert "(1000, 64)" in done.stdout


def test_the_commands_of_the_page_run(tmp_path):
    demo_data(tmp_path / "demo")
    dasksc.convert(tmp_path / "demo" / "atlas.h5ad", tmp_path / "atlas.zarr")
    raw = small(tmp_path / "demo" / "atlas.h5ad", tmp_path / "run", training__max_steps=2)
    (section,) = (block[2] for block in blocks(PAGE, "yaml"))
    assert Config.of(raw | yaml.safe_load(section)).predict["key"] == "X_emb"
    train(raw)
    (file,) = (block[2] for block in blocks(PAGE, "python") if block[2].startswith("# models.py\n"))
    (tmp_path / "models.py").write_text(file)
    commands = [
        line.removeprefix("python -m ")
        for block in blocks(PAGE, "bash")
        for line in block[2].splitlines()
        if " embed " in line
    ]
    assert len(commands) == 3
    for command in commands:
        printed = run([sys.executable, "-m", *shlex.split(command)], cwd=tmp_path, is_preloaded=True)
        assert "2,000 of 2,000 cells predicted" in printed


def test_the_example_trains_embeds_and_draws(tmp_path):
    program = ROOT / "examples" / "embed_umap.py"
    sizes = ["--cells", "8000", "--genes", "2000", "--drawn", "600", "--epochs", "5"]
    printed = run(
        [sys.executable, program, *sizes, "--figure", "umap.png"], cwd=tmp_path, is_preloaded=True, TMPDIR=str(tmp_path)
    )
    assert "embedded 8,000 cells" in printed
    shared, chance = map(int, re.search(r"share cell_type: (\d+)%, by chance (\d+)%", printed).groups())
    assert shared > 2 * chance
    assert (tmp_path / "umap.png").read_bytes().startswith(b"\x89PNG")
