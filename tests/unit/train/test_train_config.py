"""Configurations of a training, and the errors for invalid ones."""

from __future__ import annotations

import inspect
import json
import math
import sys

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import dasksc
from dasksc import InputError, MissingPathError, World, cli
from dasksc.train import Config
from dasksc.train.config import Data, Fsdp, Open, Optimizer, Profile, Scheduler, Training, Validation
from dasksc.train.launch import local_rank_of
from dasksc.train.optim import factor_at, make_optimizer
from dasksc.train.parallel import RankContext, modules_to_shard, strategy_of, unused_of

pytestmark = pytest.mark.core

SMALL = {"data": {"path": "atlas.h5ad"}, "model": "vae"}


def refused(**sections: object) -> str:
    with pytest.raises(InputError) as error:
        Config.of({**SMALL, **sections})
    return str(error.value)


def test_the_data_section_accepts_all_arguments_of_open_and_scdataset():
    fields = set(Data.model_fields) | set(Open.model_fields)
    # Arguments that only a program can set: hooks, and those that depend on the run, such as the rank.
    not_in_yaml = {"self", "data_collection", "rank", "world_size", "group", "device", "transform"}
    not_in_yaml |= {"fetch_callback", "fetch_transform", "batch_callback", "batch_transform", "return_index"}
    not_in_yaml |= {"label_key"}  # an argument of the strategy
    assert set(inspect.signature(dasksc.scDataset.__init__).parameters) - not_in_yaml <= fields
    # `names` is set by `dasksc train`, which needs cell names only for index_unique. Attached arrays fit one atlas, and
    # a training may open others for validation and prediction.
    assert set(inspect.signature(dasksc.open).parameters) - {"data", "names", "attach"} <= fields


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"modle": "vae"}, "modle is not known; did you mean 'model'?"),
        (
            {"training": {"gradient_clipping": 1}},
            "training.gradient_clipping is not known; did you mean 'gradient_clip'?",
        ),
        (
            {"training": {"fsdp": {"sharding_stategy": "FULL_SHARD"}}},
            "training.fsdp.sharding_stategy is not known; did you mean 'sharding_strategy'?",
        ),
        ({"data": {"path": "a", "open": {"joint": "outer"}}}, "data.open.joint is not known; did you mean 'join'?"),
        (
            {"data": {"path": "a", "validation": {"shar": 1}}},
            "data.validation.shar is not known; did you mean 'share'?",
        ),
        (
            {"data": {"path": "a", "validation": {"share": 0.1, "conditions": ["a"], "hold_out": {"a": "b"}}}},
            "hold_out and share both select the validation rows; give one of them",
        ),
        ({"data": {"path": "a", "validation": {"few_shot": 1}}}, "data.validation.few_shot=1"),
        ({"data": {"batch_size": 8}}, "data.path is missing"),
        ({"data": {"path": "a.h5mu"}}, "data.path='a.h5mu': files of several modalities can be read only in Python"),
        ({"data": {"path": {"rna": "a.h5mu"}}}, "data.path={'rna': 'a.h5mu'}: files of several modalities"),
        (
            {"data": {"path": "a", "validation": {"path": ["b.h5mu"]}}},
            "data.validation.path=['b.h5mu']: files of several modalities",
        ),
        (
            {"data": {"path": "a", "genes": {"rna": ["x"]}}},
            "data.genes={'rna': ['x']}: expected one list, or a file; genes of several modalities can be set only in",
        ),
        ({"training": {"precision": "bf16"}}, "training.precision='bf16': did you mean 'bf16-mixed'?"),
        ({"training": {"strategy": "fsdb"}}, "training.strategy='fsdb': did you mean 'fsdp'?"),
        ({"training": {"strategy": "horovod"}}, "training.strategy='horovod': expected one of ddp, dp, fsdp, single"),
        ({"training": {"logger": "tensorbord"}}, "training.logger='tensorbord': did you mean 'tensorboard'?"),
        ({"training": {"logger": ["csv", "std"]}}, "training.logger.1='std': did you mean 'stdout'?"),
        (
            {"training": {"scheduler": "cosine_warmpu"}},
            "training.scheduler.name='cosine_warmpu': did you mean 'cosine_w",
        ),
        ({"data": {"path": None}}, "data.path=None: give text"),
        ({"data": {"path": "a", "batch_size": True}}, "data.batch_size=True: expected a number"),
        ({"data": {"path": "a", "validation": True}}, "data.validation.share=True: expected a number"),
        ({"training": {"max_epochs": 0}}, "training.max_epochs=0: must be at least 1"),
        ({"training": {"fsdp": {"sharding_strategy": "HALF"}}}, "training.fsdp.sharding_strategy='HALF'"),
        ({"data": {"path": "a", "equal_ranks": False}}, "data.equal_ranks=False: expected true"),
        ({"data": {"path": "a", "obs": "cell_type"}}, "='cell_type': give a list, such as obs: [cell_type]"),
        ({"data": {"path": "a", "obs": [1]}}, "data.obs.0=1: give text in quotes: '1'"),
        ({"data": {"path": "a", "batch_size": "many"}}, "data.batch_size='many': give a whole number, such as 64"),
        ({"data": {"path": "a", "drop_last": 7}}, "data.drop_last=7: give true or false"),
        ({"data": 5}, "data=5: give a section, such as data: {path: ...}"),
        ({"training": {"optimizer": {"lr": 0}}}, "training.optimizer.lr=0: must be greater than 0"),
        ({"training": {"timeout_s": "long"}}, "training.timeout_s='long': give a number, such as 0.1"),
        ({"training": {"lr": 0.1}}, "training.lr is not known; did you mean 'training.optimizer.lr'?"),
    ],
)
def test_mistakes_are_reported_with_the_nearest_name(sections, message):
    assert message in refused(**sections)


def test_missing_files_and_invalid_yaml_are_reported(tmp_path):
    with pytest.raises(MissingPathError, match="there is no configuration at"):
        Config.load(tmp_path / "c.yaml")
    (tmp_path / "c.yaml").write_text("data: [")
    with pytest.raises(InputError, match="is not YAML: line 1, column 8: expected the node content"):
        Config.load(tmp_path / "c.yaml")
    (tmp_path / "c.yaml").write_text("data:\n\tpath: a.h5ad\n")
    with pytest.raises(InputError, match=r"is not YAML: line 2 is indented with a tab; use spaces$"):
        Config.load(tmp_path / "c.yaml")
    (tmp_path / "c.yaml").write_text("")
    with pytest.raises(InputError, match="is empty; expected sections: data, model"):
        Config.load(tmp_path / "c.yaml")
    (tmp_path / "c.yaml").write_text("- data")
    with pytest.raises(InputError, match="contains a list; expected sections: data, model"):
        Config.load(tmp_path / "c.yaml")
    (tmp_path / "c.yaml").write_bytes(b"\x89HDF\r\n")
    for path in (tmp_path / "c.yaml", tmp_path):
        with pytest.raises(InputError, match=r"is not a text file with a configuration.*\. Give a YAML file$"):
            Config.load(path)


def test_set_replaces_single_values_of_any_depth():
    changes = [
        "training.optimizer.lr=1e-4",
        "training.fsdp.min_num_params=10",
        "model.latent_dim=8",
        "data.obs=[donor, plate]",
        "training.checkpoint_dir=runs/1",
        "data.fetch_factor=",
    ]
    config = Config.of(SMALL, changes=changes)
    assert config.training.optimizer.lr == 1e-4
    assert config.training.fsdp == Fsdp(min_num_params=10)
    assert config.model.name == "vae"
    assert config.model.arguments == {"latent_dim": 8}
    assert config.data.obs == ["donor", "plate"]
    assert config.training.checkpoint_dir == "runs/1"
    assert config.data.fetch_factor is None
    with pytest.raises(InputError, match="not of the form"):
        Config.of(SMALL, changes=["training.seed"])
    with pytest.raises(InputError, match=r"--set training.seed=\[: '\[' is not YAML"):
        Config.of(SMALL, changes=["training.seed=["])
    assert SMALL == {"data": {"path": "atlas.h5ad"}, "model": "vae"}


def test_set_below_a_short_form_keeps_its_value():
    raw = {
        "data": {"path": ["a.h5ad", "b.h5ad"], "validation": 0.2, "strategy": "streaming"},
        "model": "vae",
        "training": {"profile": True, "scheduler": "cosine_warmup"},
    }
    changes = ["data.validation.by=donor", "training.profile.active=5", "training.scheduler.warmup_steps=3"]
    config = Config.of(raw, changes=[*changes, "data.strategy.block_size=4"])
    assert config.data.validation == Validation(share=0.2, by="donor")
    assert config.training.profile == Profile(active=5)
    assert config.training.scheduler == Scheduler(name="cosine_warmup", warmup_steps=3)
    assert (config.data.strategy.name, config.data.strategy.arguments) == ("streaming", {"block_size": 4})
    with pytest.raises(InputError, match=r"--set data.path.x=1: \['a.h5ad', 'b.h5ad'\] is a value, not a section"):
        Config.of(raw, changes=["data.path.x=1"])


@pytest.mark.parametrize(
    ("training", "world_size", "expected"),
    [
        ({}, 1, "single"),
        ({}, 2, "ddp"),
        ({"fsdp": {}}, 2, "fsdp"),
        ({"fsdp": {}}, 1, "fsdp"),
        ({"fsdp": {"sharding_strategy": "NO_SHARD"}}, 2, "ddp"),
        ({"strategy": "ddp", "fsdp": {}}, 2, "ddp"),
        ({"strategy": "fsdp"}, 2, "fsdp"),
        ({"strategy": "dp", "num_gpus": 4}, 1, "dp"),
        ({"num_gpus": 2}, 2, "ddp"),
    ],
)
def test_the_strategy_follows_from_the_other_settings(training, world_size, expected):
    assert strategy_of(Training(**training), world_size) == expected


def test_a_run_on_another_number_of_nodes_than_configured_is_refused():
    configured = Training(num_gpus=4, num_nodes=2)
    assert strategy_of(configured, 4, 2) == strategy_of(configured, 4, None) == strategy_of(Training(), 4, 3) == "ddp"
    with pytest.raises(
        InputError, match="num_nodes=2, but the number of nodes of this run is 1. .* --set training.num_nodes=1"
    ):
        strategy_of(configured, 4, 1)
    with pytest.raises(InputError, match="num_nodes=2, but the number of nodes of this run is 1"):
        strategy_of(Training(strategy="dp", num_gpus=4, num_nodes=2), 1, 1)


@pytest.mark.parametrize("section", [{}, {"fsdp": {"activation_checkpointing": True}}])
def test_data_parallel_in_one_process_refuses_activation_checkpointing(section):
    wanted = {"strategy": "dp", "activation_checkpointing": not section, **section}
    with pytest.raises(InputError, match="use ddp or fsdp, or leave activation_checkpointing out"):
        strategy_of(Training(**wanted), 1)


def test_impossible_shard_sizes_are_refused():
    hybrid = {"sharding_strategy": "HYBRID_SHARD", "shard_size": 3}
    assert strategy_of(Training(fsdp=hybrid), 6) == "fsdp"
    with pytest.raises(InputError, match="shard_size=3 must divide the number of ranks, 4"):
        strategy_of(Training(fsdp=hybrid), 4)
    with pytest.raises(InputError, match="shard_size=3 is for .* HYBRID_SHARD, but the strategy is SHARD_GRAD_OP"):
        strategy_of(Training(fsdp={**hybrid, "sharding_strategy": "SHARD_GRAD_OP"}), 6)
    # If nothing is sharded, the run reports that shard_size is not used.
    assert strategy_of(Training(fsdp={**hybrid, "sharding_strategy": "NO_SHARD"}), 4) == "ddp"
    assert strategy_of(Training(strategy="ddp", fsdp=hybrid), 4) == "ddp"


@pytest.mark.parametrize(
    ("sections", "starts"),
    [
        ({}, []),
        ({"data": {"prefetch_factor": 4}}, ["data.prefetch_factor=4 is not used: data.num_workers is 0"]),
        ({"data": {"prefetch_factor": 4, "num_workers": 1}}, []),
        (
            {"training": {"wandb_project": "cells"}},
            ["training.wandb_project=cells is not used: training.logger"],
        ),
        ({"training": {"wandb_project": "cells", "logger": ["csv", "wandb"]}}, []),
        (
            {"training": {"fsdp": {"sharding_strategy": "NO_SHARD", "cpu_offload": True, "shard_size": 2}}},
            [
                "training.fsdp.cpu_offload=True is not used: NO_SHARD is DDP",
                "training.fsdp.shard_size=2 is not used: NO_SHARD is DDP",
            ],
        ),
        # `strategy_of` already reports that the whole section is not used.
        ({"training": {"strategy": "ddp", "fsdp": {"sharding_strategy": "NO_SHARD", "cpu_offload": True}}}, []),
        ({"training": {"fsdp": {"cpu_offload": True}}}, []),
        ({"training": {"fsdp": {"sharding_strategy": "HYBRID_SHARD"}}}, ["HYBRID_SHARD equals FULL_SHARD here"]),
        ({"training": {"fsdp": {"sharding_strategy": "HYBRID_SHARD", "shard_size": 2}}}, []),
    ],
)
def test_settings_without_effect_are_reported(sections, starts):
    config = Config.of({**SMALL, **sections, "data": {**SMALL["data"], **sections.get("data", {})}})
    lines = unused_of(config, place_of(config, 4, local_world_size=4))
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts


def place_of(config: Config, world_size: int, local_world_size: int, device: str = "cpu") -> RankContext:
    return RankContext(
        rank=0,
        world_size=world_size,
        local_world_size=local_world_size,
        device=torch.device(device),
        strategy=strategy_of(config.training, world_size),
    )


def test_packages_that_are_missing_are_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "dasksc.train.config")
    monkeypatch.setitem(sys.modules, "pydantic", None)
    result = CliRunner().invoke(cli.group, ["train", "--config", "c.yaml"])
    assert isinstance(result.exception, InputError)
    assert "pip install 'dasksc[train]'" in str(result.exception)


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
        ({"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1"}, 1),
        ({**SBATCH, "PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}, 1),
        (SRUN, 1),
        # srun with PMI, and a script that passes on the rank and world size of srun.
        ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}, 1),
        ({**SRUN, "RANK": "3", "WORLD_SIZE": "4"}, 1),
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


def test_optimizers_are_found_by_name_or_path_and_take_their_own_arguments():
    parameters = [nn.Parameter(torch.zeros(2))]
    sgd = make_optimizer(parameters, Optimizer(name="sgd", lr=0.1, momentum=0.9), scale=4)
    assert isinstance(sgd, torch.optim.SGD)
    assert (sgd.defaults["lr"], sgd.defaults["momentum"]) == (pytest.approx(0.4), 0.9)
    assert isinstance(make_optimizer(parameters, Optimizer(name="torch.optim:RAdam")), torch.optim.RAdam)
    with pytest.raises(InputError, match="training.optimizer.weight_decai is not known; did you mean 'weight_decay'"):
        make_optimizer(parameters, Optimizer(weight_decai=1))
    with pytest.raises(InputError, match="training.optimizer.name='adamv' is not known; did you mean 'adam"):
        make_optimizer(parameters, Optimizer(name="adamv"))
    with pytest.raises(InputError, match="cannot be imported"):
        make_optimizer(parameters, Optimizer(name="no_such:thing"))


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
    assert modules_to_shard(net, 110) == big
    # In each layer, the second Linear is now large enough, too.
    expected = [net.layers[0][0], net.layers[0][1], net.layers[1][0], net.layers[1][1], net.attention]
    assert modules_to_shard(net, 30) == expected
    assert modules_to_shard(net, 140) == [net.layers[0], net.layers[1], net.attention]


def test_the_command_checks_a_configuration_and_tells_what_is_wrong(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("data: {path: a.h5ad}\nmodel: vae\n")
    result = CliRunner().invoke(
        cli.group, ["train", "--config", str(path), "--set", "training.seed=3", "--check", "--json"]
    )
    assert result.exit_code == 0
    config = json.loads(result.output)
    assert (config["data"]["path"], config["training"]["seed"], config["model"]["name"]) == ("a.h5ad", 3, "vae")
    assert Config.of(config) == Config.load(path, changes=["training.seed=3"])
    result = CliRunner().invoke(cli.group, ["train", "--config", str(path), "--set", "training.sed=3"])
    assert isinstance(result.exception, InputError)
    assert "did you mean 'seed'" in str(result.exception)
