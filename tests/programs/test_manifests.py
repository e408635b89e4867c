"""Batch scripts of examples/slurm, and manifests of examples/kubernetes: their options and schemas."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.support.programs import ROOT

pytestmark = pytest.mark.programs

SCRIPTS = sorted((ROOT / "examples" / "slurm").glob("*.sbatch"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_batch_script_has_its_options_before_its_first_command(script):
    options, body = re.fullmatch(r"#!/bin/bash\n((?:#.*\n)+)([\s\S]*)", script.read_text()).groups()
    named = re.findall(r"^#SBATCH --([a-z-]+)(?:=\S+)?$", options, re.MULTILINE)
    assert len(named) == script.read_text().count("#SBATCH")
    assert body.startswith("set -euo pipefail")
    subprocess.run(["bash", "-n", script], check=True)


MANIFESTS = [
    manifest
    for path in sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
]
KINDS = {"PyTorchJob": "KubeflowOrgV1PyTorchJob", "ConfigMap": "V1ConfigMap", "NetworkPolicy": "V1NetworkPolicy"}


def check(kind: str, given: dict[str, Any]) -> None:
    """Fail if `given` is not a Kubernetes object of this kind: wrong types, missing or unknown properties."""
    client = pytest.importorskip("kubeflow.training").ApiClient()
    # The types of Kubernetes and of Kubeflow's training operator, generated from their published schemas.
    parsed = client.deserialize(SimpleNamespace(data=json.dumps(given)), kind)
    # Parsing ignores unknown properties.
    assert client.sanitize_for_serialization(parsed) == given


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda one: f"{one['kind']} {one['metadata']['name']}")
def test_a_manifest_fits_the_schema_of_its_kind(manifest):
    if manifest["kind"] == "DaskCluster":
        jsonschema = pytest.importorskip("jsonschema")
        files = importlib.metadata.files("dask-kubernetes") or []
        (crd,) = [file for file in files if str(file).endswith("dask-kubernetes-operator/crds/daskcluster.yaml")]
        (version,) = yaml.safe_load(Path(str(crd.locate())).read_text())["spec"]["versions"]
        jsonschema.validate(manifest, version["schema"]["openAPIV3Schema"])
        for part in ("scheduler", "worker"):
            check("V1PodSpec", manifest["spec"][part]["spec"])
    else:
        check(KINDS[manifest["kind"]], manifest)
