"""Tests that run the examples unchanged and check that their models learn."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from make_atlas import make_atlas

import dasksc
from tests.support import programs
from tests.support.programs import ROOT

pytestmark = pytest.mark.programs

EXAMPLES = ROOT / "examples"
TORCHRUN = (*programs.TORCHRUN[1:], "--standalone", "--nproc_per_node=2")


def run(*command: object, **options: object) -> str:
    return programs.run([sys.executable, *command], is_preloaded=True, **options)


@pytest.fixture(scope="session")
def atlas(atlas_of) -> Path:
    """Return an atlas of ten separable cell types, where the most common type has a third of the cells."""
    return atlas_of(3_000, 8_000, n_types=10)


@pytest.fixture(scope="session")
def small_atlas(atlas_of) -> Path:
    return atlas_of(2_000, 300)


def accuracy(printed: str, of: str) -> float:
    return float(re.search(rf"{of}\s+loss [\d.]+\s+accuracy ([\d.]+)%", printed)[1])


def test_make_atlas_writes_every_format(tmp_path):
    run(EXAMPLES / "make_atlas.py", "--cells", 500, "--genes", 100, "--out", tmp_path / "a.zarr", "--zarr")
    make_atlas(tmp_path / "a.h5ad", 500, 100, compression="gzip")
    stored, packed = ad.read_zarr(tmp_path / "a.zarr"), ad.read_h5ad(tmp_path / "a.h5ad")
    assert (stored.X != packed.X).nnz == 0


def test_quickstart_recognises_cells_of_held_out_donors_without_packages_of_extras(tmp_path):
    extras = ("scanpy", "tqdm", "matplotlib", "bokeh", "obstore", "sklearn")
    absent = f"import sys; sys.modules.update(dict.fromkeys({extras})); "
    program = f"{absent}import runpy; runpy.run_path({str(EXAMPLES / 'quickstart.py')!r})"
    printed = programs.run([sys.executable, "-c", program], cwd=tmp_path)
    right, held_out = map(int, re.search(r"(\d+) of (\d+) cells of held-out donors", printed).groups())
    assert right > 0.8 * held_out  # the most common type has a third of the cells
    assert not list(tmp_path.iterdir())


def test_train_ddp_accumulates_resumes_and_learns(atlas, tmp_path):
    program = (*TORCHRUN, EXAMPLES / "train_ddp.py", atlas, "--batch-size", 16, "--accumulate", 3, "--epochs", 2)
    checkpoint = tmp_path / "run.pt"
    run(*program, "--checkpoint", checkpoint, "--max-steps", 4)
    stopped = torch.load(checkpoint)
    printed = run(*program, "--checkpoint", checkpoint, "--resume")
    ended = torch.load(checkpoint)
    # 1,341 cells per rank are 84 batches, so 28 steps per epoch.
    assert (stopped["done"], ended["done"]) == ({"steps": 4}, {"steps": 56})
    assert re.search(r"epoch 1: [\d,]+ cells/s on 2 ranks \(cpu\)", printed)
    assert accuracy(printed, "epoch 1.*\n.*\n  validation") > 40


def test_train_fsdp_learns_and_goes_on_with_more_ranks(small_atlas, tmp_path):
    options = (EXAMPLES / "train_fsdp.py", small_atlas, "--batch-size", 32, "--width", 32, "--epochs", 2)
    two, three = ((*TORCHRUN[:-1], f"--nproc_per_node={n}", *options) for n in (2, 3))
    # On two ranks, an epoch of 2,000 cells takes 32 steps. After 11 of these, it takes 14 more steps on three ranks.
    printed = run(*two, "--checkpoint", tmp_path / "run", "--max-steps", 11)
    assert re.findall(r"^step (\d+):", printed, re.MULTILINE) == ["11"]
    printed = run(*three, "--checkpoint", tmp_path / "run", "--resume")
    assert [int(step) for step in re.findall(r"^step (\d+):", printed, re.MULTILINE)] == [11 + 14, 11 + 14 + 21]
    first, second = map(float, re.findall(r"loss ([\d.]+)", printed))
    assert second < first


def test_train_dp_learns(atlas):
    printed = run(EXAMPLES / "train_dp.py", atlas, "--epochs", 2, "--batch-size", 16)
    assert accuracy(printed, "epoch 1:") > 60


@pytest.mark.parametrize("options", [[], ["--cluster"]], ids=["threads", "cluster"])
def test_incremental_fit_learns_from_the_chunks_of_an_epoch(atlas, options):
    printed = run(EXAMPLES / "incremental_fit.py", atlas, *options)
    assert float(re.search(r"accuracy ([\d.]+)%", printed)[1]) > 50


def test_train_lightning_shards_accumulates_clips_and_resumes_without_sharding(atlas, tmp_path):
    pytest.importorskip("lightning")
    program = (EXAMPLES / "train_lightning.py", atlas, "--folder", tmp_path, "--devices", 2, "--batch-size", 8)
    sharded = run(*program, "--accumulate", 2, "--fsdp", "--precision", "bf16-mixed", "--clip", 1e-3)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert saved["global_step"] == 50
    assert saved["state_dict"]["scores.weight"].shape == (10, 8_000)
    # Adam's running means of clipped gradients stay within the clipping norm. Adam still learns: it rescales its steps.
    means = [one["exp_avg"].flatten() for one in saved["optimizer_states"][0]["state"].values()]
    assert 1e-5 < torch.cat(means).norm() <= 1e-3
    copied = run(*program, "--accumulate", 2, "--epochs", 2, "--resume", "last")
    for printed in (sharded, copied):
        predicted = [int(n) for n in re.findall(r"rank \d: accuracy [\d.]+%, predicted (\d+)", printed)]
        assert len(predicted) == 2
        assert predicted[0] == predicted[1]
        assert 250 < sum(predicted) < 350  # a tenth of all cells
    assert float(re.search(r"accuracy ([\d.]+)%", copied)[1]) > 40
    steps = [torch.load(tmp_path / f"best-epoch={i}.ckpt", weights_only=False)["global_step"] for i in range(2)]
    assert steps[1] == 2 * steps[0]


def test_train_workers_reads_every_cell_once_in_two_goes(small_atlas, tmp_path):
    pytest.importorskip("torchdata")
    program = (EXAMPLES / "train_workers.py", small_atlas, "--checkpoint", tmp_path / "checkpoint.pt")
    assert run(*program, "--stop-after", 20).startswith("1280 of 2000 cells")
    assert run(*program, "--resume").startswith("2000 of 2000 cells")


def test_train_accelerate_learns_on_two_processes_and_goes_on(atlas, tmp_path):
    pytest.importorskip("accelerate")
    program = (*TORCHRUN, EXAMPLES / "train_accelerate.py", atlas, "--folder", tmp_path / "saved")
    first = float(re.search(r"3000 cells on 2 processes: accuracy ([\d.]+)%", run(*program))[1])
    (second,) = re.findall(r"accuracy ([\d.]+)%", run(*program, "--resume"))
    assert float(second) > first


def test_train_transformers_learns_on_two_processes_and_goes_on(atlas, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    program = (*TORCHRUN, EXAMPLES / "train_transformers.py", atlas, "--folder", tmp_path / "saved")
    steps, first = re.search(r"(\d+) steps: held-out loss ([\d.]+)", run(*program)).groups()
    again, second = re.search(r"(\d+) steps: held-out loss ([\d.]+)", run(*program, "--epochs", 2, "--resume")).groups()
    assert int(again) == 2 * int(steps)
    assert max(float(first), float(second)) < np.log(10) - 0.1  # that of equal scores for ten types


def test_train_scvi_embeds_every_cell(small_atlas, tmp_path):
    pytest.importorskip("scvi")
    printed = run(EXAMPLES / "train_scvi.py", small_atlas, "--batch-key", "plate", "--out", tmp_path / "latent.npy")
    assert printed.splitlines()[-1].startswith("2000 cells in 10 dimensions")
    assert np.isfinite(np.load(tmp_path / "latent.npy")).all()


def test_embed_umap_trains_embeds_and_draws(tmp_path):
    program = EXAMPLES / "embed_umap.py"
    sizes = ["--cells", "8000", "--genes", "2000", "--drawn", "600", "--epochs", "5"]
    printed = run(program, *sizes, "--figure", "umap.png", cwd=tmp_path, TMPDIR=str(tmp_path))
    assert "embedded 8,000 cells" in printed
    shared, chance = map(int, re.search(r"share cell_type: (\d+)%, by chance (\d+)%", printed).groups())
    assert shared > 2 * chance
    assert (tmp_path / "umap.png").read_bytes().startswith(b"\x89PNG")


def test_train_perturbation_beats_both_means_on_two_ranks(tmp_path):
    program = (*TORCHRUN, EXAMPLES / "train_perturbation.py", "--cells", "16000", "--epochs", "10")
    printed = run(*program, TMPDIR=str(tmp_path))
    assert len(re.findall(r"^epoch \d+: loss", printed, re.MULTILINE)) == 10
    assert "20 conditions held out" in printed
    errors = dict(re.findall(r"^  (.*?) +(\d\.\d+)$", printed, re.MULTILINE))
    assert set(errors) == {"set model", "same perturbation, other lines", "mean of all"}
    model, same, mean = (float(errors[name]) for name in errors)
    assert model < 0.9 * same < 0.9 * mean


GENES = ["ctrl", "AARS", "NUP107", "MYC", "TP53"]
TOML = """
[datasets]
"screen.v2" = "{folder}/screen"
"other" = "{folder}/o{{ne,wt}}o*.h5ad"

[training]
"screen.v2" = "train"

[zeroshot]
"screen.v2.jurkat" = "test"
"other.hepg2" = "val"

[fewshot."screen.v2.rpe1"]
val = ["AARS"]
test = ["AARS", "NUP107", "GONE"]
"""


def write(path: Path, cell_types: list[str], seed: int) -> None:
    obs = pd.DataFrame([(line, gene) for line in cell_types for gene in GENES] * 6, columns=["line", "target"])
    obs = obs.sample(frac=1, random_state=seed).set_axis([f"{path.stem}{i}" for i in range(len(obs))])
    ad.AnnData(np.ones((len(obs), 2), "f4"), obs=obs, var=pd.DataFrame(index=["a", "b"])).write_h5ad(path)


def test_cells_go_to_the_parts_that_the_file_says(tmp_path: Path) -> None:
    (tmp_path / "screen").mkdir()
    files = {"screen/both.h5": ["jurkat", "rpe1"], "screen/k562.h5ad": ["k562"], "oneo1.h5ad": ["hepg2"]}
    files["oneo2.h5ad"] = ["a549"]
    for seed, (name, cell_types) in enumerate(files.items()):
        write(tmp_path / name, cell_types, seed)
    (tmp_path / "experiment.toml").write_text(TOML.format(folder=tmp_path))
    options = ["--cell-type-key=line", "--pert-col=target", "--control-pert=ctrl"]
    program = ROOT / "examples" / "cell_load_experiment.py"
    command = [sys.executable, program, tmp_path / "experiment.toml", *options, "--out", tmp_path / "parts.npz"]
    printed = programs.run(command, is_preloaded=True)
    assert "screen.v2.rpe1 has GONE" in printed
    obs = dasksc.open([tmp_path / name for name in files]).obs
    with np.load(tmp_path / "parts.npz") as parts:
        counts = {
            part: obs.iloc[rows].groupby(["line", "target"], observed=True).size().to_dict()
            for part, rows in parts.items()
        }
    perturbed = GENES[1:]
    expected = {
        "train": [("k562", gene) for gene in GENES]
        + [("rpe1", gene) for gene in ("ctrl", "MYC", "TP53")]
        + [(line, "ctrl") for line in ("jurkat", "hepg2")],
        "val": [*(("hepg2", gene) for gene in perturbed), ("rpe1", "AARS")],
        "test": [*(("jurkat", gene) for gene in perturbed), ("rpe1", "AARS"), ("rpe1", "NUP107")],
    }
    assert counts == {part: dict.fromkeys(conditions, 6) for part, conditions in expected.items()}
