"""Manifests of examples/kubernetes, validated against the types of their APIs."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from dasksc.dashboard import install
from dasksc.train import Config
from tests.programs.with_slurm import free_ports
from tests.support.programs import ROOT, TORCHRUN, run

pytestmark = pytest.mark.programs

FOLDER = ROOT / "examples" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())


def read_training() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ConfigMap and the job of the example that runs ``dasksc train`` with a YAML configuration."""
    given, job = yaml.safe_load_all((FOLDER / "pytorchjob-train.yaml").read_text())
    return given, job


def check(kind: str, given: dict[str, Any]) -> None:
    """Fail if `given` is not a Kubernetes object of this kind: wrong types, missing or unknown properties."""
    kubeflow = pytest.importorskip("kubeflow.training")
    client = kubeflow.ApiClient()
    # The types of Kubernetes and of Kubeflow's training operator, generated from their published schemas.
    parsed = client.deserialize(SimpleNamespace(data=json.dumps(given)), kind)
    # Parsing ignores unknown properties.
    assert client.sanitize_for_serialization(parsed) == given


def pods() -> dict[str, dict[str, Any]]:
    job, cluster = read("pytorchjob.yaml")["spec"], read("daskcluster.yaml")["spec"]
    _, training = read_training()
    return {
        "rank": job["pytorchReplicaSpecs"]["Worker"]["template"]["spec"],
        "training": training["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"],
        "scheduler": cluster["scheduler"]["spec"],
        "worker": cluster["worker"]["spec"],
    }


def test_manifests_are_named_here():
    named = {"daskcluster.yaml", "network-policy.yaml", "pytorchjob-train.yaml", "pytorchjob.yaml"}
    assert {path.name for path in FILES} == named


@pytest.mark.parametrize("name", ["rank", "training", "scheduler", "worker"])
def test_pods_are_valid_and_their_mounts_and_ports_exist(name):
    pod = pods()[name]
    check("V1PodSpec", pod)
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    for container in pod["containers"]:
        assert {mount["name"] for mount in container.get("volumeMounts", [])} == volumes
        ports = {port["name"] for port in container.get("ports", [])}
        for probe in ("readinessProbe", "livenessProbe"):
            if probe in container:
                assert container[probe]["httpGet"]["port"] in ports


def test_a_wrong_pod_is_refused():
    for wrong in ({"containers": [{"image": "a"}]}, {"containers": [], "volume": []}):
        with pytest.raises((AssertionError, ValueError)):
            check("V1PodSpec", wrong)


def test_the_training_job_is_a_pytorch_job_that_starts_an_example():
    job = read("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    check("KubeflowOrgV1PyTorchJob", job)
    spec = job["spec"]
    assert isinstance(spec["nprocPerNode"], str)
    (container,) = pods()["rank"]["containers"]
    assert container["name"] == "pytorch"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == spec["nprocPerNode"]
    (program,) = re.findall(r"torchrun (\S+)", container["args"][0])
    text = (ROOT / program).read_text()
    assert all(f'"{option}"' in text for option in re.findall(r"--[\w-]+", container["args"][0]))


def test_the_yaml_training_is_a_pytorch_job_that_mounts_a_config_map():
    given, job = read_training()
    assert (given["apiVersion"], given["kind"]) == ("v1", "ConfigMap")
    check("V1ConfigMap", given)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    check("KubeflowOrgV1PyTorchJob", job)
    pod = pods()["training"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == job["spec"]["nprocPerNode"]
    (volume,) = (one for one in pod["volumes"] if "configMap" in one)
    assert volume["configMap"] == {"name": given["metadata"]["name"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    *_, option, path = container["command"]
    (name,) = given["data"]
    assert (option, path) == ("--config", f"{mounts[volume['name']]}/{name}")
    config = yaml.safe_load(given["data"][name])
    assert config["data"]["path"].startswith(f"{mounts['data']}/")
    assert config["training"]["checkpoint_dir"].startswith(f"{mounts['runs']}/")
    assert config["training"]["resume_from"] == "auto"
    # The operator may continue with fewer pods.
    assert not {"num_gpus", "num_nodes"} & config["training"].keys()


def test_the_command_of_the_training_trains_in_the_environment_that_the_operator_makes(atlas_of, tmp_path):
    given, _ = read_training()
    config = Config.of(yaml.safe_load(given["data"]["train.yaml"])).model_dump()
    config["data"]["path"], config["training"]["checkpoint_dir"] = str(atlas_of(1_000, 300)), str(tmp_path / "run")
    config["training"]["max_steps"] = 4
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))
    *command, _ = pods()["training"]["containers"][0]["command"]
    assert command[0] == "torchrun"
    (port,) = free_ports(1)
    # The operator sets these for one pod with two processes. RANK and WORLD_SIZE count pods, not processes.
    set_by_operator = {
        "PET_NNODES": "1",
        "PET_NPROC_PER_NODE": "2",
        "PET_MAX_RESTARTS": "10",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"localhost:{port}",
        "PET_RDZV_ID": "dasksc-train",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "elsewhere",
        "MASTER_PORT": "23456",
    }
    printed = run(
        [*TORCHRUN, *command[1:], tmp_path / "train.yaml"], is_preloaded=True, OMP_NUM_THREADS="1", **set_by_operator
    )
    assert re.search(r"ranks +2 x cpu, ddp", printed)
    assert (tmp_path / "run" / "step-00000004").is_dir()


def test_the_dask_operator_accepts_the_cluster():
    cluster = read("daskcluster.yaml")
    assert (cluster["apiVersion"], cluster["kind"]) == ("kubernetes.dask.org/v1", "DaskCluster")
    scheduler, worker = cluster["spec"]["scheduler"], cluster["spec"]["worker"]
    assert set(cluster["spec"]) == {"idleTimeout", "scheduler", "worker"}
    assert (set(scheduler), set(worker)) == ({"spec", "service"}, {"replicas", "spec"})
    check("V1ServiceSpec", scheduler["service"])
    selected = {"dask.org/cluster-name": cluster["metadata"]["name"], "dask.org/component": "scheduler"}
    assert scheduler["service"]["selector"] == selected
    (container,) = scheduler["spec"]["containers"]
    named = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in scheduler["service"]["ports"]} == named
    module = container["args"][container["args"].index("--preload") + 1]
    assert importlib.import_module(module).install is install
    # Workers read the same path as the ranks.
    mounts = [pods()[name]["containers"][0]["volumeMounts"][0] for name in ("rank", "worker")]
    assert mounts[0] == mounts[1]


def test_the_dask_cluster_fits_the_operators_own_schema():
    jsonschema = pytest.importorskip("jsonschema")
    try:
        files = importlib.metadata.files("dask-kubernetes") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("dask-kubernetes is not installed")
    (crd,) = [file for file in files if str(file).endswith("dask-kubernetes-operator/crds/daskcluster.yaml")]
    (version,) = yaml.safe_load(Path(str(crd.locate())).read_text())["spec"]["versions"]
    jsonschema.validate(read("daskcluster.yaml"), version["schema"]["openAPIV3Schema"])


def test_the_network_policy_admits_the_pods_of_the_manifests_and_no_others():
    policy, cluster = read("network-policy.yaml"), read("daskcluster.yaml")
    check("V1NetworkPolicy", policy)
    pods_of_cluster = {"dask.org/cluster-name": cluster["metadata"]["name"]}
    # Workers execute the code that they receive, so the policy restricts access to them as well.
    assert policy["spec"]["podSelector"]["matchLabels"] == pods_of_cluster
    for_pods, for_operator = policy["spec"]["ingress"]
    labels = [one["podSelector"]["matchLabels"] for one in for_pods["from"]]
    jobs = [read("pytorchjob.yaml"), read_training()[1]]
    labels_of_jobs = [{"training.kubeflow.org/job-name": job["metadata"]["name"]} for job in jobs]
    assert labels == [pods_of_cluster, *labels_of_jobs]
    # Ranks connect to the workers directly, at any port.
    assert "ports" not in for_pods
    ports = {port["port"] for port in cluster["spec"]["scheduler"]["service"]["ports"]}
    assert {port["port"] for port in for_operator["ports"]} == ports
