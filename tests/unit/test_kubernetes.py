"""The Kubernetes manifest fits the published schema."""

import yaml
from kubernetes_validate import validate

from bigsgan.config.deepspeed_file import REPOSITORY

VERSION = "1.30"


def test_every_document_fits_the_schema():
    documents = list(yaml.safe_load_all((REPOSITORY / "launch" / "k8s" / "train.yaml").read_text()))
    assert [document["kind"] for document in documents] == ["Service", "Job"]
    for document in documents:
        validate(document, VERSION, strict=True)
    service, job = documents
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    nodes = job["spec"]["completions"]
    assert f"--nnodes={nodes}" in container["command"]
    endpoint = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert any(word.startswith(f"--rdzv-endpoint={endpoint}:") for word in container["command"])
    assert f"--nproc_per_node={container['resources']['limits']['nvidia.com/gpu']}" in container["command"]
