"""Programs in docs/guides/trainers.md and docs/guides/lightning.md, for each installed library."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from make_atlas import make_atlas

from dasksc.datasets import demo_data
from dasksc.train.loop import factor_at
from dasksc.train.sections import Scheduler
from tests.support.programs import ROOT, blocks, run

pytestmark = pytest.mark.programs

PAGE = ROOT / "docs" / "guides" / "trainers.md"
LIGHTNING = ROOT / "docs" / "guides" / "lightning.md"
LIBRARIES = ("torch", "torchdata", "lightning", "accelerate", "transformers", "scvi")


def programs(page: Path = PAGE) -> list[str]:
    return [block[2] for block in blocks(page, "python")]


def library_of(program: str) -> str:
    (library,) = {name for name in LIBRARIES if re.search(rf"^(from|import) {name}\b", program, re.MULTILINE)} - {
        "torch"
    }
    return library


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    demo_data(folder / "demo")
    return folder


def run_text(program: str, name: str, folder: Path) -> None:
    (folder / name).write_text(program)
    run([sys.executable, "-W", "ignore", name], cwd=folder, is_preloaded=True)


def test_every_library_of_the_page_has_a_program():
    _, plain, *rest = programs()
    assert "from torch.utils.data" in plain
    assert set(map(library_of, rest)) == set(LIBRARIES[1:])


@pytest.mark.parametrize("library", LIBRARIES)
def test_its_programs_run(library, folder):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    common, plain, *rest = programs()
    of_library = [plain] if library == "torch" else [one for one in rest if library_of(one) == library]
    run_text("".join([common, *of_library]), f"{library}_program.py", folder)


# The page's model on two processes: its shards, the global gradient norm before and after clipping, learning rates.
SHARDED = """
import json
from pathlib import Path

from dasksc.plan.process_groups import leave_group


class Watch(pl.Callback):
    def __init__(self):
        self.before, self.after, self.rates = [], [], []

    def norm(self):
        return float(torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]).norm())

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.before.append(self.norm())
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, module, *outputs_and_batch):
        if trainer.global_step > len(self.after):
            self.after.append(self.norm())


watch = Watch()
strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "precision": "bf16-mixed", "callbacks": [watch]}
options |= {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=8, **options)
trainer.fit(model, data)
layers = [layer for layer in model.scores if isinstance(layer, FSDPModule)]
seen = {
    "recomputed": [layer.forward.func is checkpoint for layer in layers],
    "shards": [[p.to_local().numel(), p.numel()] for p in model.parameters()],
    "n_steps": trainer.global_step,
    **{name: getattr(watch, name) for name in ("before", "after", "rates")},
}
if trainer.global_rank == 0:
    Path("seen.json").write_text(json.dumps(seen))
leave_group()
"""


def test_the_module_of_the_page_is_sharded_clipped_over_all_ranks_and_warmed_up(tmp_path):
    pytest.importorskip("lightning")
    (tmp_path / "demo").mkdir()
    make_atlas(tmp_path / "demo" / "atlas.h5ad", 1_000, 200)
    (sharded,) = programs(LIGHTNING)
    run_text(sharded.split("\nbest = ")[0] + SHARDED, "sharded.py", tmp_path)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["recomputed"] == [True, True]
    assert all(n_here in (n // 2, -(-n // 2)) for n_here, n in seen["shards"])
    # About 900 cells are eight batches per rank, and two batches are a step.
    assert seen["n_steps"] == len(seen["before"]) == 32
    assert min(seen["before"]) > 0.2
    assert seen["after"] == pytest.approx([0.1] * 32, rel=1e-3)
    wanted = Scheduler(name="cosine_warmup", warmup_steps=20)
    assert seen["rates"] == pytest.approx([1e-3 * factor_at(step, wanted, 32) for step in range(32)])
