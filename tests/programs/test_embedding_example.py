"""The example of training, embedding and UMAP."""

from __future__ import annotations

import re
import sys

import pytest

from tests.support.programs import ROOT, run

pytestmark = pytest.mark.programs


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
