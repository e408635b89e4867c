"""The programs of docs/guides/atlases.md run."""

from __future__ import annotations

import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from anndata import AnnData
from anndata.io import write_elem
from click.testing import CliRunner
from zarr.storage import ZipStore

from dasksc import cli
from tests.support.cell_ranger import make_counts, write_v3
from tests.support.programs import ROOT

pytestmark = pytest.mark.programs

TEXT = (ROOT / "docs" / "guides" / "atlases.md").read_text()


def made(seed: int, n_vars: int, donors: list[str]) -> AnnData:
    rng = np.random.default_rng(seed)
    obs = pd.DataFrame(
        {
            "cell_type": pd.Categorical(rng.choice(["T cell", "B cell", "NK cell"], 300)),
            "n_genes": rng.integers(0, 100, 300),
            "donor": rng.choice(donors, 300),
        },
        index=[f"cell{seed}-{i}" for i in range(300)],
    )
    x = sp.random(300, n_vars, 0.3, format="csr", dtype=np.float32, random_state=seed)
    adata = AnnData(x, obs=obs, var=pd.DataFrame(index=[f"g{seed + i}" for i in range(n_vars)]))
    adata.raw = adata
    return adata


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("atlases")
    made(0, 20, [f"d{i}" for i in range(12)]).write_h5ad(folder / "atlas.h5ad")
    (folder / "plates").mkdir()
    for i in (1, 2):
        made(i, 15, [f"d{2 * i}", f"d{2 * i + 1}"]).write_h5ad(folder / "plates" / f"{i}.h5ad")
    types = ["Gene Expression"] * 16 + ["Antibody Capture"] * 4
    write_v3(folder / "filtered_feature_bc_matrix.h5", make_counts(50, 20), feature_type=types)
    with warnings.catch_warnings(), ZipStore(folder / "atlas.zarr.zip", mode="w") as store:
        warnings.simplefilter("ignore")
        made(0, 20, ["d"]).write_zarr(store)
    rna, prot = made(3, 20, ["d"]), made(3, 5, ["d"])[::-1].copy()
    with h5py.File(folder / "cite.h5mu", "w") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_elem(file, "obs", pd.DataFrame(index=rna.obs_names))
        file.create_group("mod").attrs["mod-order"] = ["rna", "prot"]
        write_elem(file["mod"], "rna", rna)
        write_elem(file["mod"], "prot", prot)
    return folder


def test_the_programs_run_one_after_the_other(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    programs = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(programs) == 15
    for program in programs:
        exec(program, names)
    printed = capsys.readouterr().out
    assert "(600, 16) ['1', '2']" in printed
    assert "(50, 16) (50, 4) ['gene_ids', 'feature_types', 'genome']\n50 4\n" in printed
    assert "2 of 3 genes matched by var_names (66.7%); 1 missing are zeros: g999\n" in printed
    (shown,) = re.findall(r"```text\n(census.*?)```", TEXT, flags=re.DOTALL)
    assert shown in printed
    assert "source: census 55.8% (33.3% stored), plate 1 28.0% (33.3% stored), plate 2 16.2%" in printed
    assert names["batches"][0] == [18, 9, 5]
    assert "torch.Size([64, 20])\n" in printed
    assert "(300, 20)" in printed
    assert "torch.Size([64, 20]) torch.Size([64, 5]) torch.Size([64])" in printed


def test_the_commands_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    blocks = re.findall(r"```bash\n(.*?)```", TEXT, flags=re.DOTALL)
    commands = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    assert [command[1] for command in commands] == ["info", "check", "suggest", "bench", "convert"]
    quick = {"info": ["--seconds", "0"], "bench": ["--seconds", "0.01", "--rounds", "1"]}
    for _, name, *arguments in commands:
        done = CliRunner().invoke(cli.group, [name, *arguments, *quick.get(name, [])])
        assert done.exit_code == 0, (done.output, done.exception)
