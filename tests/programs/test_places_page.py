"""Programs of docs/guides/remote.md, which start an S3 endpoint on loopback."""

from __future__ import annotations

import pytest

from dasksc.datasets import demo_data
from tests.support.programs import ROOT, run_page

pytest.importorskip("obstore")
pytest.importorskip("flask_cors")
pytest.importorskip("moto.server")

pytestmark = pytest.mark.programs


def test_its_programs_run_from_top_to_bottom(tmp_path):
    demo_data(tmp_path / "demo")
    done = run_page(ROOT / "docs" / "guides" / "remote.md", tmp_path, tmp_path / "demo" / "atlas.h5ad")
    assert done.stdout.splitlines() == ["torch.Size([64, 300])", "['atlas']", "(2000, 300)", "True"]
