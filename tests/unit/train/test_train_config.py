"""Configurations of a training, and the errors for invalid ones."""

from __future__ import annotations

import inspect
import json
import math
import sys

import pytest
import torch
import yaml
from click.testing import CliRunner
from torch import nn

import dasksc
from dasksc import InputError, MissingPathError, World, cli
from dasksc.train import Config
from dasksc.train.config import Data, Fsdp, Open, Optimizer, Profile, Scheduler, Training, Validation
from dasksc.train.import_paths import find
from dasksc.train.launch import first_node, launch, local_rank_of, n_nodes_of, node_of, processes_to_start, rendezvous
from dasksc.train.loggers import CSVLog
from dasksc.train.optim import factor_at, make_optimizer
from dasksc.train.parallel import RankContext, modules_to_shard, replicas_of, strategy_of, unused_of
from tests.support.training import GUIDE

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


def test_all_mistakes_are_reported_at_once():
    message = refused(training={"max_epoch": 1, "seeds": 2})
    assert "'max_epochs'" in message
    assert "'seed'" in message


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


def test_a_location_is_reported_once_and_without_the_names_of_alternatives():
    message = refused(data={"path": 3}, training={"logger": "std"})
    assert message == (
        "the configuration: data.path=3: give text in quotes: path: '3'; training.logger='std': did you mean 'stdout'?"
    )


def test_sections_that_are_switched_off_are_none():
    config = Config.of({**SMALL, "data": {"path": "a", "validation": 0}, "training": {"profile": False}})
    assert (config.data.validation, config.training.profile) == (None, None)


def test_arguments_of_the_default_strategy_need_no_name():
    strategy = Config.of(SMALL, changes=["data.strategy.block_size=64"]).data.strategy
    assert (strategy.name, strategy.arguments) == ("block_shuffling", {"block_size": 64})


def test_an_empty_fsdp_section_is_reported_to_select_nothing(caplog):
    assert Config.of({**SMALL, "training": {"fsdp": None}}).training.fsdp is None
    assert "training.fsdp is empty, which does not select FSDP; write fsdp: {}" in caplog.text
    caplog.clear()
    Config.of({**SMALL, "training": {"fsdp": None, "strategy": "ddp"}})
    assert not caplog.text


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


def test_numbers_may_be_written_without_a_point(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "data: {path: a}\nmodel: {name: vae, beta: 1e-3}\ntraining: {optimizer: {lr: 1e-4}}"
    )
    config = Config.load(tmp_path / "c.yaml")
    assert config.model.arguments == {"beta": 1e-3}
    assert config.training.optimizer.lr == 1e-4


def test_the_layout_of_the_guide_means_the_same():
    config = Config.of(yaml.load(GUIDE, Loader=yaml.SafeLoader))
    data, training = config.data, config.training
    assert (data.path, data.num_workers, data.batch_size) == (["first.h5ad", "second.h5ad"], 4, 32)
    assert data.batch_size * data.fetch_factor == 8192
    assert config.tokenizer.vocabulary is None
    # In the guide, max_genes includes the cell token, and 80% of the genes to predict are replaced with the mask token.
    masking = {"mask_ratio": 0.15, "random_replace_ratio": 0.1, "keep_ratio": 0.1}
    expected = {"strategy": "rank_value", "max_genes": 2047, "prepend_cls": True, "masking": masking}
    assert config.tokenizer.options == expected
    assert config.model.name == "transformer_encoder"
    sizes = {"hidden_dim": 512, "num_layers": 12, "num_heads": 8, "dropout": 0.1, "max_seq_len": 2048}
    assert config.model.arguments == sizes
    assert (training.strategy, training.num_gpus, training.num_nodes) == ("fsdp", 8, 2)
    assert training.checkpoints_activations
    assert training.optimizer.arguments == {"weight_decay": 0.01}
    assert training.optimizer.lr == 1e-4
    assert training.scheduler == Scheduler(name="cosine_warmup", warmup_steps=10_000, total_steps=100_000)
    assert (training.loggers, training.wandb_project, training.save_top_k) == (["wandb"], "cells", 3)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["tokenizer.prepend_cls=false"], {"max_genes": 2048, "prepend_cls": False}),
        (["tokenizer={strategy: rank_value}", "data.max_genes=512"], {"max_genes": 511, "prepend_cls": True}),
        (
            ["tokenizer.masking.keep_ratio=0"],
            {"masking": {"mask_ratio": 0.15, "random_replace_ratio": 0.1, "keep_ratio": 0}},
        ),
        # With data.path, the layout is that of dasksc, and options are used as given.
        (["data={path: a.h5ad}"], {"max_genes": 2048, "masking": {"mask_ratio": 0.15}}),
    ],
)
def test_tokens_are_counted_as_in_the_guide(changes, expected):
    options = Config.of(yaml.safe_load(GUIDE), changes=changes).tokenizer.options
    assert {name: options[name] for name in expected} == expected


def test_a_vocabulary_of_the_guide_is_a_file_or_a_name(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO", logger="dasksc")
    assert Config.of(yaml.safe_load(GUIDE)).tokenizer.vocabulary is None
    assert "data.gene_vocab='human_protein_coding' is not a file, so tokens are the column numbers" in caplog.text
    (tmp_path / "human_protein_coding").write_text("CD4\n")
    assert Config.of(yaml.safe_load(GUIDE)).tokenizer.vocabulary == "human_protein_coding"
    for path in ("vocab.json", "lists/genes"):
        assert Config.of(yaml.safe_load(GUIDE), changes=[f"data.gene_vocab={path}"]).tokenizer.vocabulary == path


def test_the_guides_block_selects_fsdp_whatever_the_strategy():
    assert Config.of(yaml.safe_load(GUIDE), changes=["training.strategy=ddp"]).training.strategy == "fsdp"
    assert Config.of({**SMALL, "training": {"strategy": "ddp", "fsdp": {}}}).training.strategy == "ddp"


def test_rows_of_the_guide_may_be_written_with_an_exponent():
    config = Config.of(yaml.safe_load(GUIDE), changes=["data.streaming_shuffle_buffer=1e4", "training.batch_size=32.0"])
    assert (config.data.batch_size, config.data.fetch_factor) == (32, 312)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.streaming": "maybe"}, "data.streaming='maybe' must be true or false"),
        ({"data.streaming_shuffle_buffer": "true"}, r"must be numbers of rows; got \[1024, True\]"),
        ({"tokenizer.max_genes": 1, "data.max_genes": 1}, "max_genes=1 leaves no room for genes beside the cell token"),
        ({"data.max_genes": 1000}, "data.max_genes=1000 and tokenizer.max_genes=2048 are the same setting"),
        ({"data.path": "other"}, r"data.paths=\['first.h5ad', 'second.h5ad'\] and data.path='other'"),
        ({"data.source": "cellxgene"}, "data.source='cellxgene' is not supported; give files or stores"),
        ({"data.streaming_chunk_size": "many"}, "must be numbers of rows"),
        ({"training.batch_size": 0}, "batch_size=0 must be a whole number of at least 1"),
        ({"training.batch_size": "'32'"}, "batch_size='32' must be a whole number of at least 1, without quotes"),
        ({"training.batch_size": ""}, "batch_size=None must be a whole number of at least 1"),
        ({"data.fetch_factor": 3}, "data.streaming_shuffle_buffer=256 and data.fetch_factor=3 are the same setting"),
    ],
)
def test_the_layouts_must_not_contradict_each_other_and_sizes_are_numbers(changes, message):
    with pytest.raises(InputError, match=message):
        Config.of(yaml.safe_load(GUIDE), changes=[f"{name}={value}" for name, value in changes.items()])


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


def test_data_parallel_in_one_process_takes_the_configured_number_of_gpus():
    assert replicas_of(Training(num_gpus=2), 8) == [0, 1]
    assert replicas_of(Training(), 8) == list(range(8))
    assert replicas_of(Training(num_gpus=2), 0) == []
    with pytest.raises(InputError, match="num_gpus=4, but .* has only the 2 GPUs that this process sees"):
        replicas_of(Training(num_gpus=4), 2)


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


def test_settings_with_an_effect_on_another_machine_are_not_reported():
    config = Config.of({**SMALL, "training": {"strategy": "dp", "num_gpus": 8}})
    (line,) = unused_of(config, place_of(config, 1, 1))
    assert line.startswith("training.num_gpus=8 is not used: ")
    assert unused_of(config, place_of(config, 1, 1, device="cuda")) == []
    config = Config.of({**SMALL, "training": {"fsdp": {"sharding_strategy": "HYBRID_SHARD"}}})
    assert unused_of(config, place_of(config, 4, 2)) == unused_of(config, place_of(config, 1, 1)) == []


@pytest.mark.parametrize(
    ("training", "nproc", "nnodes", "expected"),
    [
        ({}, None, None, 0),
        ({"num_gpus": 2}, None, None, 2),
        ({"num_gpus": 8, "num_nodes": 2}, None, None, 4),
        ({"num_gpus": 8}, None, 4, 2),
        ({"num_gpus": 8, "strategy": "dp"}, None, None, 0),
        ({"num_gpus": 8}, "3", None, 3),
        ({}, "1", None, 1),
        ({}, None, 2, 1),
    ],
)
def test_how_many_processes_a_node_starts(training, nproc, nnodes, expected):
    assert processes_to_start(Training(**training), nproc=nproc, nnodes=nnodes, environment={}) == expected


def test_processes_that_cannot_be_started_are_told():
    assert processes_to_start(Training(), nproc="auto", nnodes=None, environment={}) >= 1
    with pytest.raises(InputError, match="must be a number of processes, or auto"):
        processes_to_start(Training(), nproc="all", nnodes=None, environment={})
    with pytest.raises(
        InputError, match="num_gpus=3 is the total number of GPUs, which must be a multiple of the number of nodes, 2"
    ):
        processes_to_start(Training(num_gpus=3), nproc=None, nnodes=2, environment={})
    torchrun = {"TORCHELASTIC_RUN_ID": "1"}
    assert processes_to_start(Training(num_gpus=8), nproc=None, nnodes=None, environment=torchrun) == 0
    with pytest.raises(InputError, match="starts the processes itself"):
        processes_to_start(Training(), nproc="2", nnodes=None, environment=torchrun)


def test_one_task_of_srun_on_each_node_starts_the_ranks_there(monkeypatch):
    step = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1"}
    step |= {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    assert node_of(step) == (2, 1)
    assert processes_to_start(Training(), nproc="4", nnodes=None) == 4
    assert processes_to_start(Training(num_gpus=2), nproc=None, nnodes=None) == 0
    assert processes_to_start(Training(num_nodes=2), nproc="4", nnodes=None) == 4
    with pytest.raises(InputError, match="training.num_nodes=3, but srun started one task on each of 2 nodes"):
        processes_to_start(Training(num_nodes=3), nproc="4", nnodes=None)
    with pytest.raises(InputError, match="--nnodes=1, but srun started one task on each of 2 nodes"):
        processes_to_start(Training(num_nodes=2), nproc="4", nnodes=1)
    assert node_of({**step, "SLURM_STEP_NUM_TASKS": "8"}) == (1, 0)
    assert node_of({}) == (1, 0)
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "1")
    with pytest.raises(InputError, match="starts the processes itself"):
        processes_to_start(Training(), nproc="4", nnodes=None)


def test_packages_that_are_missing_are_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "dasksc.train.config")
    monkeypatch.setitem(sys.modules, "pydantic", None)
    result = CliRunner().invoke(cli.group, ["train", "--config", "c.yaml"])
    assert isinstance(result.exception, InputError)
    assert "pip install 'dasksc[train]'" in str(result.exception)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu9", "gpu7"),
        ("gpu[003-007,12],login", "gpu003"),
        ("rack1-node[5,7]", "rack1-node5"),
        ("a[1-2]b", "a1b"),
    ],
)
def test_the_first_of_slurms_nodes(nodes, first):
    assert first_node(nodes) == first


def test_ranks_meet_where_the_launcher_says():
    slurm = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[3-4]"}
    found = rendezvous(slurm, 2)
    assert found["MASTER_ADDR"] == "gpu3"
    assert 20_000 <= int(found["MASTER_PORT"]) < 30_000
    assert rendezvous({**slurm, "SLURM_STEP_ID": "1"}, 2)["MASTER_PORT"] != found["MASTER_PORT"]
    given = {"MASTER_ADDR": "here", "MASTER_PORT": "29500"}
    assert rendezvous({**slurm, **given}, 2) == given
    one_node = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "job"}
    assert rendezvous(one_node, 2)["MASTER_ADDR"] == "127.0.0.1"
    for environment in ({}, {**one_node, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, {"MASTER_ADDR": "here"}):
        with pytest.raises(InputError, match="the 2 ranks of this run do not know the address of the first node"):
            rendezvous(environment, 2)


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


@pytest.mark.parametrize(
    ("world", "environment", "expected"),
    [
        (World(), {**SBATCH, "SLURM_STEP_NUM_NODES": "2"}, 1),
        (World(3, 4, 2, "RANK/WORLD_SIZE"), {**SBATCH, **TORCHRUN, "GROUP_WORLD_SIZE": "2"}, 2),
        (World(3, 4, 1, "RANK/WORLD_SIZE"), {"RANK": "3", "WORLD_SIZE": "4"}, None),
        # Three ranks on one node, one on the other.
        (World(3, 4, 1, "SLURM_PROCID/SLURM_NTASKS"), {**SRUN, "SLURM_STEP_NUM_NODES": "2"}, 2),
        # On the other nodes, the variables of mpirun's own step are set, too.
        (World(3, 4, 1, "OMPI_COMM_WORLD_RANK/OMPI_COMM_WORLD_SIZE"), {**SRUN, "SLURM_STEP_NUM_NODES": "1"}, None),
        (World(3, 4, 4, "OMPI_COMM_WORLD_RANK/OMPI_COMM_WORLD_SIZE"), {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 1),
    ],
)
def test_the_number_of_nodes_is_what_all_ranks_know(world, environment, expected):
    assert n_nodes_of(world, environment) == expected


def test_ranks_of_mpirun_meet_alike_on_all_nodes_of_an_allocation():
    first = {**SBATCH, **MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_ess_base_jobid": "5"}
    # On the other nodes, Open MPI's daemons form a step without the first node.
    second = {**first, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu4"}
    found = rendezvous(first, 4)
    assert found == rendezvous(second, 4)
    assert found["MASTER_ADDR"] == "gpu3"
    assert rendezvous({**first, "OMPI_MCA_ess_base_jobid": "6"}, 4)["MASTER_PORT"] != found["MASTER_PORT"]
    assert rendezvous({**first, "PMIX_NAMESPACE": "7"}, 4)["MASTER_PORT"] != found["MASTER_PORT"]
    untold = {name: value for name, value in first.items() if name != "OMPI_MCA_ess_base_jobid"}
    assert rendezvous(untold, 4) == rendezvous({**untold, "SLURM_STEP_ID": "0"}, 4)
    assert rendezvous({**second, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4)["MASTER_ADDR"] == "127.0.0.1"


STEP = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[3-4]"}


@pytest.mark.parametrize(
    ("environment", "flags", "address", "port"),
    [
        ({"MASTER_ADDR": "node0"}, {"port": 29501}, "node0", "29501"),
        ({"MASTER_PORT": "29999"}, {"address": "node0"}, "node0", "29999"),
        ({"MASTER_ADDR": "node1", "MASTER_PORT": "1"}, {"address": "node0", "port": 2}, "node0", "2"),
        ({"MASTER_ADDR": "node1", "MASTER_PORT": "1"}, {}, "node1", "1"),
        ({}, {"address": "node0"}, "node0", "29500"),
        (STEP, {"port": 29501}, "gpu3", "29501"),
        (STEP, {"address": "node0"}, "node0", "29500"),
        ({**STEP, "MASTER_ADDR": "node1"}, {"port": 29501}, "node1", "29501"),
        ({**STEP, "MASTER_PORT": "1"}, {}, "gpu3", "1"),
        (
            {**STEP, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"},
            {"address": "node0"},
            "node0",
            rendezvous(STEP, 2)["MASTER_PORT"],
        ),
    ],
)
def test_the_rendezvous_combines_flags_the_environment_and_slurm(environment, flags, address, port, monkeypatch):
    started = []
    monkeypatch.setattr("dasksc.train.launch._torchrun", started.extend)
    for name in ("MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_SIZE", *SRUN, *STEP):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    launch(["train"], n_processes=1, n_nodes=2, **flags)
    assert {f"--master-addr={address}", f"--master-port={port}"} <= set(started)


def test_a_port_without_an_address_is_not_enough(monkeypatch):
    for name in ("MASTER_ADDR", "OMPI_COMM_WORLD_SIZE", *SRUN, *STEP):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match="with --nnodes: --master-addr, --master-port"):
        launch(["train"], n_processes=1, n_nodes=2, port=29501)


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


def test_the_table_of_figures_gains_columns_and_is_truncated_where_a_run_resumes(tmp_path):
    path = tmp_path / "metrics.csv"
    table = CSVLog(path)
    table.write({"step": 1, "loss": 2.5})
    table.write({"step": 2, "loss": 1.5})
    table.write({"step": 2, "validation_loss": 3.0})
    again = CSVLog(path, resumed_at=2)
    assert (
        again.rows
        == table.rows
        == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 1.5}, {"step": 2, "validation_loss": 3.0}]
    )
    assert [row["step"] for row in CSVLog(path, resumed_at=1).rows] == [1]
    assert path.read_text().splitlines() == ["step,loss", "1,2.5"]


def test_a_gradient_that_overflowed_is_read_again_from_the_table(tmp_path):
    path = tmp_path / "metrics.csv"
    CSVLog(path).write({"step": 1, "gradient_norm": math.inf, "lr": 1e-05})
    (row,) = CSVLog(path, resumed_at=1).rows
    assert row == {"step": 1, "gradient_norm": math.inf, "lr": 1e-05}
    assert isinstance(row["step"], int)


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


def test_an_import_that_fails_on_access_is_an_error_of_the_path(tmp_path, monkeypatch):
    (tmp_path / "lazily.py").write_text("def __getattr__(name):\n    raise ImportError(f'no backend for {name}')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"model='lazily:Net' cannot be imported: no backend for Net"):
        find("lazily:Net", {}, what="model")
    with pytest.raises(InputError, match="did you mean 'torch:nn.Linear'"):
        find("torch:nn.Linaer", {}, what="model")
