"""Programs in docs/guides/trainers.md and docs/guides/lightning.md, for each installed library."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from make_atlas import make_atlas

from dasksc.datasets import demo_data
from dasksc.train.config import Scheduler
from dasksc.train.optim import factor_at
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


# --- Keys of YAML files and arguments of Lightning ----------------------------------------------------

on_lightning = pytest.mark.filterwarnings("ignore")  # it emits many warnings


def rows() -> list[tuple[str, list[str]]]:
    """Return the keys and the code of each row of Lightning's table."""
    text = LIGHTNING.read_text()
    _, _, *lines = text[text.index("| YAML | `pl.Trainer` |") :].split("\n\n")[0].splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines]
    return [(keys, re.findall(r"`([^`]+)`", code)) for keys, code in cells]


def code_for(key: str) -> list[str]:
    (found,) = [code for keys, code in rows() if f"`{key}" in keys]
    return found


def names() -> dict[str, Any]:
    """Return the names that the code of the table may use."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.profilers import PyTorchProfiler
    from lightning.pytorch.strategies import ModelParallelStrategy

    classes = (CSVLogger, ModelCheckpoint, ModelParallelStrategy, PyTorchProfiler)
    return {"pl": pl, "torch": torch, **{one.__name__: one for one in classes}}


def arguments(code: list[str], **changes: object) -> dict[str, Any]:
    """Return the trainer arguments of a row, with some numbers changed."""
    given: dict[str, Any] = {}
    for one in code:
        if re.match(r"\w+=", one):
            for name, value in changes.items():
                one = re.sub(rf"\b{name}=\w+", f"{name}={value}", one)
            given |= eval(f"dict({one})", names())
    return given


def small_trainer(**options: Any) -> Any:
    import lightning.pytorch as pl

    quiet = {"logger": False, "enable_checkpointing": "callbacks" in options, "num_sanity_val_steps": 0}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "devices": 1}
    return pl.Trainer(**{**quiet, **options})


def small_model(losses: tuple[float, ...] = ()) -> tuple[Any, Any, Any]:
    """Return a model that records events, 20 training batches, and a validation batch with a given loss."""
    import lightning.pytorch as pl

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)
            self.dtypes: set[torch.dtype] = set()
            self.norms: list[float] = []
            self.validated: list[int] = []
            self.first_step = -1

        def on_train_start(self):
            self.first_step = self.global_step

        def training_step(self, batch, batch_idx):
            scores = self.layer(batch[0])
            self.dtypes.add(scores.dtype)
            loss = (scores.float() - 9).square().sum()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.validated.append(self.current_epoch)
            if losses:
                self.log("validation_loss", losses[self.current_epoch])

        def on_before_zero_grad(self, optimizer):
            gradients = [p.grad.flatten() for p in self.parameters() if p.grad is not None]
            self.norms += [float(torch.cat(gradients).norm())] if gradients else []

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    data = torch.utils.data.TensorDataset(torch.ones(20, 4))
    return Model(), torch.utils.data.DataLoader(data), torch.utils.data.DataLoader(data[:1])


@pytest.fixture
def pl(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return pytest.importorskip("lightning.pytorch")


@on_lightning
def test_every_row_of_the_lightning_table_has_trainer_arguments_or_names_of_the_page(pl):
    defined = {name for program in programs(LIGHTNING) for name in re.findall(r"def (\w+)", program)}
    assert len(rows()) == 16
    for keys, code in rows():
        if keys == "`seed: 0`":
            assert [eval(one, names()) for one in code] == [0]
        elif keys != "`resume_from: auto`":
            given = arguments(code)
            pl.Trainer(accelerator="cpu", **given)
            assert given or set(code) <= defined, keys
    assert small_trainer(strategy="ddp", **arguments(code_for("num_gpus: 8"))).world_size == 8
    assert all(hasattr(pl.loggers, name) for name in code_for("logger: csv")[1:])


@on_lightning
def test_lightning_refuses_what_the_page_says(pl):
    from lightning.pytorch.plugins.precision import FSDPPrecision

    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="'norm'. is currently not supported"):
        FSDPPrecision("32-true").clip_gradients(None, clip_val=1.0)
    with pytest.raises(ValueError, match="does not support .*16-mixed"):
        pl.Trainer(accelerator="cpu", precision="16-mixed", **arguments(code_for("strategy: fsdp")))


@on_lightning
def test_lightning_keeps_the_best_checkpoints_and_resumes_from_the_last_as_the_table_says(pl, tmp_path):
    (fit, _) = code_for("resume_from: auto")
    losses = (5.0, 1.0, 4.0, 2.0, 3.0, 6.0)

    def run(max_epochs: int) -> tuple[Any, Any]:
        model, training, validation = small_model(losses)
        trainer = small_trainer(max_epochs=max_epochs, **arguments(code_for("checkpoint_dir"), every_n_train_steps=15))
        data = pl.LightningDataModule.from_datasets(training.dataset, validation.dataset)
        eval(fit, {"trainer": trainer, "model": model, "data": data})
        return trainer, model

    trainer, model = run(5)
    assert (model.first_step, trainer.global_step) == (0, 100)
    best, _ = trainer.checkpoint_callbacks
    # These are the second, fourth and fifth epochs.
    assert sorted(Path(path).name for path in best.best_k_models) == [
        f"epoch={i}-step={20 * i + 20}.ckpt" for i in (1, 3, 4)
    ]
    assert sorted(map(float, best.best_k_models.values())) == [1.0, 2.0, 3.0]
    trainer, model = run(6)
    assert (model.first_step, trainer.global_step) == (90, 120)
    assert [path.name for path in (tmp_path / "runs").glob("last*")] == ["last.ckpt"]


@on_lightning
def test_lightning_accumulates_and_clips_as_the_table_says(pl):
    clip, accumulate = code_for("gradient_clip: 1.0"), code_for("gradient_accumulation: 4")
    for code, n_steps, norm in ((clip, 20, 1.0), (accumulate, 5, None)):
        model, training, _ = small_model()
        trainer = small_trainer(max_epochs=1, **arguments(code))
        trainer.fit(model, training)
        assert trainer.global_step == n_steps
        assert len(model.norms) == n_steps - 1
        assert min(model.norms) > 10 if norm is None else model.norms == pytest.approx([norm] * 19)


@on_lightning
def test_lightning_follows_the_table_in_precision_duration_and_validation_interval(pl):
    model, training, validation = small_model()
    options = arguments(code_for("max_epochs: 2")) | arguments(code_for("validate_every: 2"))
    trainer = small_trainer(**options, **arguments(code_for("precision: bf16-mixed")))
    trainer.fit(model, training, validation)
    assert model.dtypes == {torch.bfloat16}
    assert model.layer.weight.dtype == torch.float32
    assert (trainer.global_step, model.validated) == (40, [1])
    model, training, _ = small_model()
    trainer = small_trainer(**arguments(code_for("max_epochs: 2"), max_steps=7))
    trainer.fit(model, training)
    assert trainer.global_step == 7


@on_lightning
def test_lightning_logs_and_profiles_what_the_table_says(pl, tmp_path):
    model, training, _ = small_model()
    logs, often = code_for("logger: csv"), code_for("log_every_n_steps: 50")
    options = arguments(logs) | arguments(often) | arguments(code_for("profile"))
    small_trainer(max_epochs=6, **options).fit(model, training)
    (table,) = (tmp_path / "runs").rglob("metrics.csv")
    header, *lines = table.read_text().splitlines()
    assert [line.split(",")[header.split(",").index("step")] for line in lines] == ["49", "99"]
    (trace,) = (tmp_path / "runs").glob("fit-trace*.json")
    assert trace.stat().st_size > 1_000


# The page's model on two processes: its shards, the global gradient norm before and after clipping, learning rates.
SHARDED = """
import json
from pathlib import Path

from dasksc.planning.process_groups import leave_group


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
