"""The manifests of examples/kubernetes, against the types of the APIs they are for."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dasksc.dashboard import install

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))

# What Kubeflow's training operator (kubeflow.org/v1) knows above the pods: properties of a PyTorchJob's parts.
PYTORCH_JOB = {"elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs", "runPolicy"}
ELASTIC_POLICY = {"maxReplicas", "maxRestarts", "minReplicas", "rdzvBackend", "rdzvConf", "rdzvHost", "rdzvId"}
RUN_POLICY = {"activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy", "suspend", "ttlSecondsAfterFinished"}
REPLICA_SPEC = {"replicas", "restartPolicy", "template"}


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())


def check(kind: str, given: dict[str, Any]) -> None:
    """Fail where `given` is no Kubernetes object of this kind: a wrong type, a missing or an unknown property."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    # A model leaves out what it does not know.
    assert getattr(models, f"IoK8sApiCoreV1{kind}").from_dict(given).to_dict() == given


def pods() -> dict[str, dict[str, Any]]:
    job, cluster = read("pytorchjob.yaml")["spec"], read("daskcluster.yaml")["spec"]
    return {
        "rank": job["pytorchReplicaSpecs"]["Worker"]["template"]["spec"],
        "scheduler": cluster["scheduler"]["spec"],
        "worker": cluster["worker"]["spec"],
    }


def test_manifests_are_named_here():
    assert {path.name for path in FILES} == {"daskcluster.yaml", "network-policy.yaml", "pytorchjob.yaml"}


@pytest.mark.parametrize("name", ["rank", "scheduler", "worker"])
def test_pods_are_pods_whose_mounts_and_ports_are_there(name):
    pod = pods()[name]
    check("PodSpec", pod)
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    for container in pod["containers"]:
        assert {mount["name"] for mount in container.get("volumeMounts", [])} == volumes
        ports = {port["name"] for port in container.get("ports", [])}
        for probe in ("readinessProbe", "livenessProbe"):
            if probe in container:
                assert container[probe]["httpGet"]["port"] in ports


def test_a_wrong_pod_is_refused():
    pytest.importorskip("kubeflow_trainer_api")
    for wrong in ({"containers": [{"image": "a"}]}, {"containers": [], "volume": []}):
        with pytest.raises((AssertionError, ValueError)):
            check("PodSpec", wrong)


def test_the_training_job_is_a_pytorch_job_that_starts_an_example():
    job = read("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = job["spec"]
    assert set(spec) <= PYTORCH_JOB
    assert set(spec["elasticPolicy"]) <= ELASTIC_POLICY
    assert set(spec["runPolicy"]) <= RUN_POLICY
    assert isinstance(spec["nprocPerNode"], str)
    (replica,) = spec["pytorchReplicaSpecs"].values()
    assert set(replica) <= REPLICA_SPEC
    check("PodTemplateSpec", replica["template"])
    (container,) = pods()["rank"]["containers"]
    assert container["name"] == "pytorch"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == spec["nprocPerNode"]
    (program,) = re.findall(r"torchrun (\S+)", container["args"][0])
    text = (ROOT / program).read_text()
    assert all(f'"{option}"' in text for option in re.findall(r"--[\w-]+", container["args"][0]))


def test_the_dask_cluster_is_what_the_operator_takes():
    cluster = read("daskcluster.yaml")
    assert (cluster["apiVersion"], cluster["kind"]) == ("kubernetes.dask.org/v1", "DaskCluster")
    scheduler, worker = cluster["spec"]["scheduler"], cluster["spec"]["worker"]
    assert set(cluster["spec"]) == {"idleTimeout", "scheduler", "worker"}
    assert (set(scheduler), set(worker)) == ({"spec", "service"}, {"replicas", "spec"})
    check("ServiceSpec", scheduler["service"])
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


def test_the_network_policy_lets_in_those_who_are_there():
    policy, cluster, job = read("network-policy.yaml"), read("daskcluster.yaml"), read("pytorchjob.yaml")
    assert (policy["apiVersion"], policy["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
    service = cluster["spec"]["scheduler"]["service"]
    assert policy["spec"]["podSelector"]["matchLabels"] == service["selector"]
    (rule,) = policy["spec"]["ingress"]
    labels = [one["podSelector"]["matchLabels"] for one in rule["from"] if "podSelector" in one]
    assert {"dask.org/cluster-name": cluster["metadata"]["name"]} in labels
    assert {"training.kubeflow.org/job-name": job["metadata"]["name"]} in labels
    assert {port["port"] for port in rule["ports"]} == {port["port"] for port in service["ports"]}
