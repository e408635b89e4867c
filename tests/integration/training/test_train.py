"""Training in one process: models, checkpoints, resuming, and output files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import torch

import dasksc
from dasksc import InputError
from dasksc.train import Config, load_model
from dasksc.train.data import make_datasets
from dasksc.train.models import Autoencoder, MLPClassifier, TokenTransformer
from dasksc.train.parallel import checkpoint_activations
from tests.programs import train_models
from tests.support.training import checkpoints, figures, rows_of, small, split_rows, train

FRAGILE = "tests.programs.train_models:Fragile"


pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="session")
def atlas(training_atlas) -> Path:
    return training_atlas


@pytest.fixture
def raw(atlas, tmp_path) -> dict[str, Any]:
    return small(atlas, tmp_path / "run")


@pytest.fixture(scope="module")
def unbroken(atlas, tmp_path_factory) -> list[float]:
    """Return the losses of an uninterrupted training run with dropout."""
    folder = tmp_path_factory.mktemp("unbroken")
    return figures(train_fragile(atlas, folder, at=0))


def train_fragile(atlas: Path, folder: Path, *, at: int) -> Path:
    raw = {
        "data": {"path": str(atlas), "batch_size": 16, "fetch_factor": 2, "validation": 0.2},
        "model": {"name": FRAGILE, "label": "cell_type", "mark": str(folder / "mark"), "at": at},
        "training": {
            "max_epochs": 2,
            "gradient_accumulation": 2,
            "scheduler": {"name": "cosine_warmup", "warmup_steps": 3},
            "checkpoint_dir": str(folder / "run"),
            "save_every": 2,
            "resume_from": "auto",
            "log_every_n_steps": 1,
        },
    }
    if at:
        with pytest.raises(RuntimeError, match="the power is gone"):
            train(raw)
    train(raw)
    return folder / "run"


def test_resuming_a_completed_run_does_nothing(raw, tmp_path):
    first = train(raw, data__validation=0.2)
    before = (tmp_path / "run" / "metrics.csv").read_text()
    again = train(raw, data__validation=0.2, training__resume_from="auto")
    assert (tmp_path / "run" / "metrics.csv").read_text() == before
    assert (again.n_steps, again.n_cells, again.figures) == (first.n_steps, 0, first.figures)


# 163 rows are 11 batches, so 6 steps per epoch.
@pytest.mark.parametrize("at", [1, 5, 11])
def test_a_run_that_stops_at_any_batch_resumes_with_the_same_losses(at, unbroken, atlas, tmp_path):
    assert len(unbroken) == 12
    assert figures(train_fragile(atlas, tmp_path, at=at)) == unbroken


def test_a_resumed_run_validates_with_the_masks_of_an_unbroken_one(raw, tmp_path):
    raw["tokenizer"] = {"max_genes": 8, "masking": {"mask_ratio": 0.3}}
    raw["model"] = {"name": "transformer_encoder", "hidden_dim": 8, "num_layers": 1, "num_heads": 2}
    train(raw, data__validation=0.2)
    for n in (1, 2):
        options = {"training__max_epochs": n, "training__checkpoint_dir": str(tmp_path / "parts")}
        train(raw, data__validation=0.2, training__resume_from="auto", **options)
    losses = [[row.get("validation_loss") for row in rows_of(tmp_path / name)] for name in ("run", "parts")]
    assert losses[0] == losses[1]


def test_an_incomplete_checkpoint_is_ignored(raw, tmp_path):
    train(raw, training__save_every=5)
    expected = figures(tmp_path / "run")
    half = tmp_path / "run" / "step-00000099.partial"
    half.mkdir()
    (half / "state.json").write_text("{}")
    report = train(raw, training__max_epochs=3, training__resume_from="auto")
    assert report.n_steps == 39
    assert figures(tmp_path / "run")[:26] == expected


def test_a_new_run_does_not_write_among_the_checkpoints_of_another(raw, tmp_path):
    train(raw)
    with pytest.raises(InputError, match="step-00000026"):
        train(raw)
    with pytest.raises(InputError, match="step-00000026"):
        train(raw, training__resume_from=str(tmp_path / "step-00000013"))


def test_a_run_resumes_from_a_named_checkpoint_in_its_own_directory(raw, tmp_path):
    train(raw, training__save_every=5, training__save_top_k=-1)
    assert checkpoints(tmp_path / "run") == [5, 10, 15, 20, 25, 26]
    named = str(tmp_path / "run" / "step-00000010")
    train(raw, training__resume_from=named, training__checkpoint_dir=str(tmp_path / "other"))
    assert figures(tmp_path / "other") == figures(tmp_path / "run")[10:]
    assert checkpoints(tmp_path / "run") == [5, 10, 15, 20, 25, 26]


@pytest.mark.parametrize("change", [{"data__batch_size": 32}, {"training__gradient_accumulation": 3}], ids=str)
def test_the_schedule_of_a_run_resumed_with_other_sizes_ends_with_its_steps(change, raw, tmp_path):
    raw["training"]["scheduler"] = {"name": "linear_warmup", "final": 0.1}
    train(raw, training__max_steps=16)
    steps = int(train(raw, training__resume_from="auto", **change).n_steps)
    rates = [row["lr"] / 1e-3 for row in rows_of(tmp_path / "run") if "lr" in row][16:]
    assert len(rates) == steps - 16
    assert steps != 26
    # The final learning rate would apply to the step after the last step of the run.
    np.testing.assert_allclose(rates, [0.1 + 0.9 * (1 - step / steps) for step in range(16, steps)])


def test_an_epoch_without_a_batch_is_refused(raw):
    with pytest.raises(InputError, match="203.*256.*drop_last=False"):
        train(raw, data__batch_size=256, data__fetch_factor=1, data__drop_last=True)


def test_a_run_goes_on_in_another_precision(raw):
    train(raw, training__max_epochs=1)
    assert train(raw, training__precision="16-mixed", training__resume_from="auto").n_steps == 26
    report = train(raw, training__max_epochs=3, training__precision="bf16-mixed", training__resume_from="auto")
    assert report.n_steps == 39


def values_of(folder: Path) -> dict[int, float | None]:
    states = [json.loads((path / "state.json").read_text()) for path in folder.glob("step-*")]
    return {state["step"]: state["values"].get(str(state["step"])) for state in states}


def test_the_best_validated_epochs_are_kept_whatever_save_every_is(raw, tmp_path):
    options = {"save_every": 5, "max_epochs": 4, "save_top_k": 2, "monitor_mode": "max"}
    raw["training"] |= options
    train(raw, data__validation=0.2)
    values = {int(row["step"]): row["validation_loss"] for row in rows_of(tmp_path / "run") if "validation_loss" in row}
    assert list(values) == [11, 22, 33, 44]
    best = sorted(values, key=values.__getitem__, reverse=True)[:2]
    assert values_of(tmp_path / "run") == {step: values[step] for step in {*best, 44}}
    train(raw, data__validation=0.2, training__checkpoint_dir=str(tmp_path / "none"), training__save_top_k=0)
    assert checkpoints(tmp_path / "none") == [44]


def test_an_unknown_monitor_and_an_empty_filter_are_refused(raw, tmp_path):
    with pytest.raises(InputError, match="monitor='acuracy'"):
        train(raw, training__monitor="acuracy")
    assert not (tmp_path / "run" / "step-00000013").exists()
    with pytest.raises(InputError, match="'validation_los'.*validation_accuracy"):
        train(raw, training__monitor="validation_los", data__validation=0.2)
    assert checkpoints(tmp_path / "run") == [11]
    with pytest.raises(InputError, match="'validation_loss'.*data.validation"):
        train(raw, training__monitor="validation_loss")
    with pytest.raises(InputError, match="data.filter=.*'none'"):
        train(raw, data__filter="cell_type == 'none'", data__validation=0.2)


def test_the_classifier_learns_and_figures_are_those_of_all_rows(raw, tmp_path, atlas):
    report = train(raw, training__max_epochs=15, data__validation=0.2, training__optimizer={"lr": 1e-2})
    last_epoch = [row["accuracy"] for row in rows_of(tmp_path / "run") if row["epoch"] == 14 and "accuracy" in row]
    assert np.mean(last_epoch) > 0.65  # the largest of the five cell types has 44% of the cells
    model = load_model(report.model)
    _, held = split_rows(dasksc.open(atlas), share=0.2)
    rest = dasksc.scDataset(str(atlas), dasksc.Streaming(held), batch_size=len(held), obs=["cell_type"], seed=0)
    with torch.no_grad():
        (outputs,) = map(model, rest)
    assert outputs["accuracy"].item() == pytest.approx(report.figures["validation_accuracy"])
    assert outputs["loss"].item() == pytest.approx(report.figures["validation_loss"], rel=1e-5)
    assert report.n_cells == 15 * (203 - len(held))
    assert report.cells_per_s == pytest.approx(report.n_cells / report.elapsed_s)
    assert 0 <= report.wait_share <= 1
    assert json.loads(report.to_json())["n_steps"] == report.n_steps


@pytest.mark.parametrize(("name", "layout"), [("autoencoder", "csr"), ("vae", "dense")])
def test_autoencoders_learn_from_x_alone(name, layout, raw):
    raw["model"] = {"name": name, "latent_dim": 4, "hidden_dim": 16}
    raw["training"]["optimizer"] = {"lr": 1e-2}
    report = train(raw, data__layout=layout, training__max_epochs=6)
    first, *_, last = figures(Path(report.model).parent)
    assert last < 0.8 * first


@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "bf16-mixed"), ("fsdp", "32-true")])
def test_every_strategy_trains_in_a_process_that_is_alone(strategy, precision, raw):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    raw["training"] |= {"gradient_clip": 1.0, "gradient_accumulation": 2}
    raw["training"]["activation_checkpointing"] = True
    raw["data"]["validation"] = 0.2
    report = train(raw, training__strategy=strategy, training__precision=precision, training__max_epochs=1)
    assert (report.strategy, report.device, report.world_size) == (strategy, device, 1)
    assert not torch.distributed.is_initialized()
    model = load_model(report.model)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert ("gpu_memory_bytes" in report.figures) == (device == "cuda")
    again = train(raw, training__strategy=strategy, training__max_epochs=2, training__resume_from="auto")
    assert again.n_steps == 2 * report.n_steps


@pytest.mark.parametrize(
    ("precision", "strategy", "obs"), [("bf16-mixed", "single", []), ("16-mixed", "fsdp", ["plate"])]
)
def test_half_precision_does_not_round_the_counts(precision, strategy, obs, raw):
    raw["model"] = {"name": "tests.programs.train_models:Exact"}
    raw["data"]["obs"] = obs
    train(raw, training__precision=precision, training__strategy=strategy, training__max_steps=2)


def test_a_column_that_is_no_label_is_refused(raw):
    raw["model"] = {"name": "mlp_classifier", "label": "n_counts"}
    with pytest.raises(InputError, match="model.label='n_counts'"):
        train(raw)


def test_strategies_take_their_options_and_columns_of_weights(raw):
    raw["data"]["validation"] = 0.2
    raw["data"]["strategy"] = {"name": "class_balanced_sampling", "label_key": "cell_type", "total_size": 64}
    assert train(raw).n_steps == 8
    raw["training"]["checkpoint_dir"] += "-weighted"
    raw["data"]["strategy"] = {"name": "BlockWeightedSampling", "weights": "n_counts", "total_size": 32}
    assert train(raw).n_steps == 4


@pytest.mark.parametrize("control", ["{'cell_type': common}", "an expression"])
def test_sets_and_their_controls_train_and_validate(raw, atlas, control):
    obs = dasksc.open(atlas).obs
    common = obs["cell_type"].value_counts().index[0]
    by_dict = control != "an expression"
    raw["data"] |= {
        "strategy": {
            "name": "cell_sets",
            "by": ["plate", "cell_type"],
            "set_size": 8,
            "control": {"cell_type": common} if by_dict else f"cell_type == '{common}'",
            "match": ["plate"],
            "unmatched": "drop",
            "weights": "groups",
            "n_sets": 6,
        },
        "validation": 0.3,
        "obs": ["plate"] if by_dict else [],
    }
    raw["model"] = {"name": "tests.programs.train_models:SetEffect"}
    assert train(raw).n_steps == 2 * 3
    loaders = make_datasets(Config.of(raw), device=torch.device("cpu"))
    trained = [row for batch in loaders.training for row in batch.index.tolist()]
    held = [row for batch in loaders.validation for row in batch.index.tolist()]
    assert not set(trained) & set(held)
    _, held_out = split_rows(dasksc.open(atlas), share=0.3)
    targets = obs["cell_type"].to_numpy() != common
    assert set(held) == set(held_out[targets[held_out]].tolist())
    controls = [row for batch in loaders.validation for row in batch.control.index.tolist()]
    assert not targets[controls].any()
    assert set(controls) - set(held_out.tolist()), "controls of validation may be any of the atlas"


def test_conditions_are_held_out(raw, atlas):
    obs = dasksc.open(atlas).obs
    common = obs["cell_type"].value_counts().index[0]
    raw["data"]["validation"] = {
        "conditions": ["plate", "cell_type"],
        "hold_out": {"plate": ["plate_0", "plate_3"]},
        "few_shot": 0.25,
        "control": {"cell_type": common},
        "seed": 2,
    }
    loaders = make_datasets(Config.of(raw), device=torch.device("cpu"))
    held = np.concatenate([batch["index"].numpy() for batch in loaders.validation])
    trained = loaders.training.strategy.indices
    np.testing.assert_array_equal(np.sort(np.concatenate([held, trained])), np.arange(203))
    assert set(obs["plate"].iloc[held]) == {"plate_0", "plate_3"}
    assert common not in set(obs["cell_type"].iloc[held])


def test_a_filter_holds_for_training_and_validation(raw, atlas):
    adata = dasksc.open(atlas)
    raw["data"] |= {"filter": "plate in ['plate_0', 'plate_1', 'plate_2']"}
    raw["data"]["validation"] = {"share": 0.2, "stratify": "cell_type"}
    report = train(raw, training__max_epochs=1)
    chosen = adata.obs["plate"].isin(["plate_0", "plate_1", "plate_2"]).to_numpy()
    assert report.n_cells == pytest.approx(0.8 * chosen.sum(), abs=3)
    raw["data"]["validation"] = {"conditions": "plate", "hold_out": {"plate": ["plate_0", "plate_3"]}}
    loaders = make_datasets(Config.of(raw), device=torch.device("cpu"))
    held = sum(len(batch["X"]) for batch in loaders.validation)
    assert held == (adata.obs["plate"] == "plate_0").sum()


@pytest.mark.parametrize("missing", ["zero", "drop"])
def test_one_atlas_trains_and_another_validates(raw, atlas, tmp_path, missing):
    names = [*dasksc.open(atlas).var_names[[5, 1, 9]], "no such gene"]
    (tmp_path / "vocab.json").write_text(json.dumps({"<pad>": 0} | {name: 9 - i for i, name in enumerate(names)}))
    ad.read_h5ad(atlas)[40:90, ::-1].write_h5ad(tmp_path / "other.h5ad")
    raw["data"] |= {"path": {"own": str(atlas), "other": str(tmp_path / "other.h5ad")}, "open": {"label": "file"}}
    raw["data"] |= {"genes": str(tmp_path / "vocab.json"), "genes_missing": missing}
    raw["data"]["validation"] = {"conditions": "file", "hold_out": {"file": ["other"]}}
    loaders = make_datasets(Config.of(raw), device=torch.device("cpu"))
    expected = names[::-1] if missing == "zero" else names[2::-1]
    assert loaders.facts["n_genes"] == len(expected)
    assert sorted(row for batch in loaders.validation for row in batch["index"].tolist()) == list(range(203, 253))
    for loader in (loaders.training, loaders.validation):
        assert list(loader.gene_match.names) == expected
        assert next(iter(loader))["X"].shape[1] == len(expected)


def test_a_loss_that_is_not_finite_ends_the_run(raw):
    with pytest.raises(dasksc.TrainingError, match=r"the loss is \S+ at step \d+"):
        train(raw, training__optimizer={"name": "sgd", "lr": 1e30})


@pytest.mark.parametrize("kind", ["transformer", "own"])
def test_activation_checkpointing_changes_no_gradient(kind):
    torch.manual_seed(0)
    tokens = torch.randint(3, 20, (6, 8))
    if kind == "transformer":
        model = TokenTransformer(n_tokens=20, max_seq_len=8, hidden_dim=16, num_layers=2, num_heads=2, dropout=0.5)
        batch = {"input_ids": tokens, "attention_mask": torch.ones(6, 8, dtype=torch.bool), "labels": tokens}
    else:
        model, batch = train_models.Plain(10), {"X": torch.rand(6, 10)}
    calls: list[int] = []
    inner = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
    inner.register_forward_hook(lambda *_: calls.append(1))

    def gradients() -> list[torch.Tensor]:
        calls.clear()
        torch.manual_seed(1)
        model.zero_grad()
        model(batch)["loss"].backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    kept, n_calls, names = gradients(), len(calls), list(model.state_dict())
    checkpoint_activations(model)
    again = gradients()
    assert all(map(torch.equal, kept, again))
    assert (n_calls, len(calls)) == (1, 2)
    assert list(model.state_dict()) == names


def test_cells_without_a_label_do_not_count():
    model = MLPClassifier("kind", n_genes=3, n_labels=2, num_layers=0).eval()
    X = torch.rand(4, 3)
    labels = torch.tensor([0, -1, 1, -1])
    some = model({"X": X, "obs": {"kind": labels}})
    those = model({"X": X[[0, 2]], "obs": {"kind": labels[[0, 2]]}})
    assert some["loss"].item() == pytest.approx(those["loss"].item())
    assert some["accuracy"] == those["accuracy"]
    none = model({"X": X, "obs": {"kind": torch.full((4,), -1)}})
    assert none["loss"].item() == 0
    assert [outputs["n"].item() for outputs in (some, those, none)] == [2, 2, 0]


def test_the_variational_loss_equals_the_error_if_the_posterior_is_the_prior():
    model = Autoencoder(n_genes=3, latent_dim=2, num_layers=0, variational=True)
    torch.nn.init.zeros_(model.encoder.last.weight)
    torch.nn.init.zeros_(model.encoder.last.bias)
    outputs = model({"X": torch.rand(4, 3)})
    assert outputs["divergence"].item() == 0
    assert outputs["loss"].item() == outputs["error"].item()


def test_padding_changes_nothing_in_the_transformer():
    torch.manual_seed(0)
    model = TokenTransformer(n_tokens=20, max_seq_len=8, hidden_dim=16, num_layers=2, num_heads=2).eval()
    tokens = torch.tensor([[3, 4, 5, 0, 0]])
    mask = torch.tensor([[True, True, True, False, False]])
    labels = torch.tensor([[3, -100, 5, -100, -100]])
    padded = model({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    bare = model({"input_ids": tokens[:, :3], "attention_mask": mask[:, :3], "labels": labels[:, :3]})
    assert padded["loss"].item() == pytest.approx(bare["loss"].item(), rel=1e-6)
    assert not model.embed({"input_ids": tokens[:, :0], "attention_mask": mask[:, :0]}).any()
    with pytest.raises(InputError, match="nothing to predict"):
        model({"input_ids": tokens, "attention_mask": mask})
    with pytest.raises(InputError, match="model.max_seq_len"):
        model({"input_ids": torch.ones(1, 9, dtype=torch.int64), "attention_mask": torch.ones(1, 9, dtype=torch.bool)})
