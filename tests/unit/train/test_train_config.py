"""Configurations of a training, the errors for invalid ones, and what follows from the launcher."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import torch
import yaml
from torch import nn

import dasksc
from dasksc import InputError, MissingPathError, World
from dasksc._compat import UnsupportedVersionError, check_training
from dasksc.plan.binding import SHORT_NAMES
from dasksc.train import Config
from dasksc.train.config import created, found
from dasksc.train.loop import factor_at
from dasksc.train.models import MLPClassifier
from dasksc.train.parallel import local_rank_of, modules_to_shard, rendezvous, strategy_of
from dasksc.train.sections import STRATEGIES as NAMES
from dasksc.train.sections import Fsdp, Scheduler, Training
from tests.support.commands import run_command

pytestmark = pytest.mark.core

SMALL = {"data": {"path": "atlas.h5ad"}, "model": {"name": "vae"}}
CLASSIFIER = {"name": "mlp_classifier", "label": "cell_type"}


def test_the_data_section_accepts_all_arguments_of_open_and_scdataset():
    data = vars(Config.of(SMALL).data)
    # Arguments that only a program can set: hooks, and those that depend on the run, such as the rank.
    not_in_yaml = {
        "self",
        "data_collection",
        "rank",
        "world_size",
        "group",
        "device",
        "expand",
        "pin_memory",
        "transform",
        "categories",
    }
    not_in_yaml |= {"fetch_callback", "fetch_transform", "batch_callback", "batch_transform", "return_index"}
    not_in_yaml |= {"label_key"}  # an argument of the strategy
    not_in_yaml |= {"equal_ranks"}  # training requires its default
    assert set(inspect.signature(dasksc.scDataset.__init__).parameters) - not_in_yaml <= data.keys()
    # `names` is set by `dasksc train`, which needs cell names only for index_unique. Attached arrays fit one atlas, and
    # a training may open others for validation and prediction.
    opened = set(inspect.signature(dasksc.open).parameters) - {"data", "names", "attach", "obs", "mmap"}
    assert opened == data["open"].keys()
    named = dict(SHORT_NAMES)
    for name in ("Streaming", "BlockShuffling", "BlockWeightedSampling", "ClassBalancedSampling", "CellSets"):
        named[name] = named[re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()] = getattr(dasksc, name)
    assert {name: f"dasksc:{cls.__name__}" for name, cls in named.items()} == NAMES


@pytest.mark.parametrize(
    ("sections", "facts"),
    [
        ({"modle": "vae"}, ["modle"]),
        ({"training": {"gradient_clipping": 1}}, ["training.gradient_clipping", "training.gradient_clip"]),
        ({"training": {"fsdp": {"sharding_stategy": "x"}}}, ["training.fsdp.sharding_stategy", "sharding_strategy"]),
        ({"training": {"precision": "bf16"}}, ["training.precision", "bf16-mixed"]),
        ({"training": {"scheduler": "cosine_warmpu"}}, ["training.scheduler.name", "cosine_warmup"]),
        ({"training": {"max_epochs": 0}}, ["training.max_epochs=0", "at least 1"]),
        ({"training": {"gradient_clip": -1}}, ["training.gradient_clip=-1"]),
        ({"training": {"scheduler": {"warmup_steps": -1}}}, ["training.scheduler", "-1"]),
        ({"training": None}, ["training", "None"]),
        ({"data": {"path": "a", "open": 5}}, ["data.open", "5"]),
        ({"training": {"optimizer": {"lr": "fast"}}}, ["training.optimizer.lr", "fast"]),
        ({"data": {"batch_size": 8}}, ["data.path"]),
        ({"data": {"path": "a", "batch_size": True}}, ["data.batch_size", "True"]),
        ({"data": {"path": "a", "equal_ranks": False}}, ["data.equal_ranks"]),
        ({"data": {"path": "a", "open": {"joint": "outer"}}}, ["data.open.joint", "data.open.join"]),
        ({"data": {"path": "a", "validation": {"share": 0.1, "hold_out": {"a": "b"}}}}, ["hold_out", "share"]),
        ({"model": {"name": "vae", "latent_dims": 3}}, ["model.latent_dims", "latent_dim"]),
        ({"model": "mlp_classifier"}, ["model.label"]),
        ({"model": {**CLASSIFIER, "hidden_dim": 16.5}}, ["model.hidden_dim", "16.5"]),
        ({"tokenizer": {"strategy": "rank"}}, ["tokenizer", "rank_value"]),
        ({"tokenizer": {"masking": 0.15}}, ["tokenizer.masking", "mask_ratio"]),
        ({"predict": {"key": "X_mine"}}, ["predict.out is missing"]),
    ],
    ids=str,
)
def test_mistakes_are_reported_with_the_key_the_file_and_the_nearest_name(sections, facts, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **sections}))
    with pytest.raises(InputError) as error:
        Config.load(path)
    for fact in [*facts, *([] if facts == ["data.path"] else [str(path)])]:
        assert fact in str(error.value)


def test_missing_files_and_invalid_yaml_are_reported(tmp_path):
    path = tmp_path / "c.yaml"
    with pytest.raises(MissingPathError, match=str(path)):
        Config.load(path)
    for text in (b"data: [", b"data:\n\tpath: a.h5ad\n", b"", b"- data", b"\x89HDF\r\n"):
        path.write_bytes(text)
        with pytest.raises(InputError, match=r"c\.yaml|data\.path"):
            Config.load(path)


def test_options_replace_single_values_of_any_depth():
    changes = [
        "training.optimizer.lr=1e-4",
        "training.fsdp.min_num_params=10",
        "model.latent_dim=8",
        "data.obs=[donor, plate]",
        "data.batch_size=128",
        "data.fetch_factor=null",
        "data.strategy.block_size=4",
        "data.open.fill_value=1e-4",
        "data.open.keys=a,b",
        "data.validation.by=donor",
    ]
    config = Config.of(SMALL, changes=changes)
    assert config.training.optimizer == {"name": "adamw", "lr": 1e-4}
    assert config.training.fsdp == Fsdp(min_num_params=10)
    assert config.model == {"name": "autoencoder", "variational": True, "latent_dim": 8}
    assert (config.data.obs, config.data.batch_size, config.data.fetch_factor) == (["donor", "plate"], 128, None)
    assert config.data.strategy == {"name": "block_shuffling", "block_size": 4}
    assert (config.data.open["fill_value"], config.data.open["keys"]) == (1e-4, ["a", "b"])
    assert config.data.validation == {"by": "donor"}
    assert Config.of({**SMALL, "data": {"path": "a", "validation": 0.2}}).data.validation == {"share": 0.2}
    assert Config.of({**SMALL, "data": {"path": "a", "validation": False}}).data.validation is None


def test_the_printed_configuration_is_the_configuration(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    printed = run_command("train", "--config", path, "--training.seed", 3, "--print_config").stdout
    assert Config.of(yaml.safe_load(printed)) == Config.load(path, changes=["training.seed=3"])
    assert "--training.seed" in run_command("train", "--config", path, "--training.sed=3", exit_code=2).stderr


def test_storage_options_are_not_recorded():
    raw = {**SMALL, "data": {"path": "s3://a", "open": {"storage_options": {"key": "secret"}}}}
    config = Config.of(raw)
    assert config.data.open["storage_options"] == {"key": "secret"}
    assert "secret" not in str(config.to_dict())


@pytest.mark.parametrize(
    ("training", "world_size", "expected"),
    [
        ({}, 1, "single"),
        ({}, 2, "ddp"),
        ({"fsdp": Fsdp()}, 1, "fsdp"),
        ({"fsdp": Fsdp(sharding_strategy="NO_SHARD")}, 2, "ddp"),
        ({"strategy": "ddp", "fsdp": Fsdp()}, 2, "ddp"),
        ({"num_gpus": 2}, 2, "ddp"),
    ],
)
def test_the_strategy_follows_from_the_other_settings(training, world_size, expected):
    assert strategy_of(Training(**training), world_size) == expected


# Environment variables of a batch script in an allocation of two nodes; mpirun and torchrun pass them on to the ranks.
SBATCH = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "gpu[3-4]", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SBATCH |= {"SLURM_NTASKS": "4"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
SRUN = {**SBATCH, "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 0),
        ({**SBATCH, **TORCHRUN}, 1),
        ({**SBATCH, **MPIRUN}, 1),
        # On nodes other than the first, mpirun starts a Slurm step with one task per node; the variables of this step
        # are set, too.
        ({**SBATCH, **MPIRUN, "SLURM_STEP_ID": "1", "SLURM_PROCID": "1"}, 1),
        (SRUN, 1),
        ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}, 1),
        ({**SBATCH, "PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}, 1),
        # No variable states the number of ranks on this node.
        ({"RANK": "3", "WORLD_SIZE": "4"}, 3),
        ({"RANK": "3", "WORLD_SIZE": "4", "SLURM_LOCALID": "0", "LOCAL_RANK": ""}, 3),
        # Variables inherited from a shell on a node do not describe this process.
        ({"LOCAL_RANK": "1", "SLURM_LOCALID": "1"}, 0),
    ],
)
def test_the_local_rank_comes_from_the_launcher_that_started_this_process(environment, expected, monkeypatch):
    for name in {*TORCHRUN, *MPIRUN, *SRUN, "OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_SIZE", "MASTER_ADDR"}:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert local_rank_of(World.detect(), environment) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({**SRUN, "SLURM_STEP_NODELIST": "gpu[003-007,12],login"}, "gpu003"),
        (SRUN, "gpu3"),
        ({**SBATCH, **MPIRUN}, "gpu3"),
        ({**SBATCH, **MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "127.0.0.1"),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "127.0.0.1"),
        ({**SRUN, "MASTER_ADDR": "node0"}, "node0"),
        ({"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}, "node0"),
    ],
)
def test_ranks_meet_at_the_first_node(environment, expected):
    found = rendezvous(environment, 4)
    assert found["MASTER_ADDR"] == expected
    assert 20_000 <= int(found["MASTER_PORT"]) < 30_000


@pytest.mark.parametrize("environment", [{}, {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, {"MASTER_ADDR": "node0"}])
def test_ranks_that_do_not_know_the_first_node_are_told(environment):
    with pytest.raises(InputError, match="MASTER_ADDR.*MASTER_PORT"):
        rendezvous(environment, 4)


def test_the_learning_rate_rises_and_falls():
    cosine = Scheduler(name="cosine_warmup", warmup_steps=4, final=0.1)
    factors = [factor_at(step, cosine, 24) for step in range(26)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[14] == pytest.approx(0.1 + 0.9 * 0.5)
    assert factors[24] == factors[25] == pytest.approx(0.1)
    assert factors[4:] == sorted(factors[4:], reverse=True)
    linear = Scheduler(name="linear_warmup", total_steps=10)
    assert [factor_at(step, linear, 99) for step in (0, 5, 10)] == pytest.approx([1, 0.5, 0])
    assert factor_at(7, Scheduler(warmup_steps=2), 10) == 1.0
    long = Scheduler(name="cosine_warmup", warmup_steps=9)
    assert all(math.isfinite(factor_at(step, long, 5)) for step in range(9))


def test_own_classes_are_found_by_their_path_and_their_errors_name_the_section():
    parameters = [nn.Parameter(torch.zeros(2))]
    radam = found("torch.optim:RAdam", {}, what="training.optimizer.name")
    assert isinstance(created(radam, {"params": parameters}, what="training.optimizer"), torch.optim.RAdam)
    with pytest.raises(InputError, match="training.optimizer.*weight_decai"):
        created(radam, {"params": parameters, "weight_decai": 1}, what="training.optimizer")
    with pytest.raises(InputError, match="training.optimizer.*weight_decay"):
        created(radam, {"params": parameters, "weight_decay": -1}, what="training.optimizer")
    with pytest.raises(InputError, match="model.name='no_such:thing'.*no_such"):
        found("no_such:thing", {}, what="model.name")


def test_modules_are_sharded_by_size_those_inside_first():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 3)) for _ in range(2))
            self.attention = nn.MultiheadAttention(8, 2)
            self.last = nn.Linear(3, 1)

    net = Net()
    assert modules_to_shard(net, 10**6) == []
    big = [net.layers[0][0], net.layers[1][0], net.attention]
    assert set(modules_to_shard(net, 110)) == set(big)
    # In each layer, the second Linear is now large enough, too.
    expected = [net.layers[0][0], net.layers[0][1], net.layers[1][0], net.layers[1][1], net.attention]
    assert set(modules_to_shard(net, 30)) == set(expected)
    assert set(modules_to_shard(net, 140)) == {net.layers[0], net.layers[1], net.attention}
    called, model = [], MLPClassifier("label", n_genes=3, n_labels=2, hidden_dim=4)
    model.layers.register_forward_hook(lambda *_: called.append(1))  # FSDP gathers the parameters of what is called
    assert (model.embed(torch.ones(5, 3)).shape, called) == ((5, 4), [1])


@pytest.mark.parametrize("version", ["2.9.0", "2.9.0a0+git", "2.13.0+cpu", "3.0.0"])
def test_training_is_refused_with_a_torch_in_which_it_is_wrong(version):
    check_training(version)
    for old in ("2.8.0", "2.6.0+cu124", "1.13.1"):
        with pytest.raises(UnsupportedVersionError, match="FSDP.*2.9"):
            check_training(old)
