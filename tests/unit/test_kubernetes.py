"""The Kubernetes manifests fit the published schema, and say what a run needs."""

import jsonschema
import pytest
import yaml
from kubernetes_validate import validate

from bigsgan.elastic import EXIT_STOPPED
from bigsgan.errors import EXIT_BAD_INPUT
from tests import REPOSITORY

VERSION = "1.30"
PLACE = REPOSITORY / "launch" / "k8s"
NAMES = {"train.yaml": ["Service", "PersistentVolumeClaim", "Job"], "jobset.yaml": ["JobSet"]}

WHOLE = {"type": "integer", "minimum": 0}


def _object(required=(), **properties):
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


RULE = _object(
    ["action"],
    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
    onJobFailureReasons={"type": "array", "items": {"type": "string"}},
    targetReplicatedJobs={"type": "array", "items": {"type": "string"}},
)
# Of a JobSet's own fields those that jobset.x-k8s.io_jobsets.yaml has in all of v0.6 to v0.9.
JOB_SET = _object(
    ["replicatedJobs"],
    network=_object(
        enableDNSHostnames={"type": "boolean"},
        publishNotReadyAddresses={"type": "boolean"},
        subdomain={"type": "string"},
    ),
    ttlSecondsAfterFinished=WHOLE,
    failurePolicy=_object(maxRestarts=WHOLE, rules={"type": "array", "items": RULE}),
    replicatedJobs={
        "type": "array",
        "items": _object(["name", "template"], name={"type": "string"}, replicas=WHOLE, template={"type": "object"}),
    },
)


def documents(name):
    return list(yaml.safe_load_all((PLACE / name).read_text()))


def job(name):
    """The Job of a manifest, whole, and the name of its first pod."""
    *_, last = documents(name)
    if last["kind"] == "Job":
        return last, f"{last['metadata']['name']}-0.{last['spec']['template']['spec']['subdomain']}"
    (replicated,) = last["spec"]["replicatedJobs"]
    meta = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": replicated["name"]}}
    names = last["metadata"]["name"], replicated["name"]
    return {**meta, "spec": replicated["template"]["spec"]}, f"{names[0]}-{names[1]}-0-0.{names[0]}"


@pytest.mark.parametrize("name", NAMES)
def test_every_document_fits_the_schema(name):
    """A JobSet is not a part of Kubernetes: its own fields are checked, and its Job."""
    found = documents(name)
    assert [document["kind"] for document in found] == NAMES[name]
    for document in found:
        if document["kind"] == "JobSet":
            jsonschema.validate(document["spec"], JOB_SET)
        else:
            validate(document, VERSION, strict=True)
    validate(job(name)[0], VERSION, strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_agents_of_all_pods_meet_at_the_first(name):
    found, first = job(name)
    spec = found["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    command = container["command"]
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"]
    assert f"--nnodes={spec['completions']}" in command
    assert any(word.startswith(f"--rdzv-endpoint={first}:") for word in command)
    assert f"--nproc_per_node={container['resources']['limits']['nvidia.com/gpu']}" in command
    assert command.index("--") < command.index("out=/data/run")


@pytest.mark.parametrize("name", NAMES)
def test_pods_wait_for_each_other_and_have_time_to_save(name):
    """An agent waits for the first pod's store as long as ``read_timeout``, a minute by default."""
    pod = job(name)[0]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (settings,) = [word for word in container["command"] if word.startswith("--rdzv-conf=")]
    waits = dict(pair.split("=") for pair in settings.removeprefix("--rdzv-conf=").split(","))
    assert {name: int(seconds) for name, seconds in waits.items()} == {"join_timeout": 3600, "read_timeout": 1800}
    (variable,) = container["env"]
    assert variable["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    assert 30 < int(variable["value"]) < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", NAMES)
def test_a_failure_counts_where_another_try_may_help(name):
    found, _ = job(name)
    spec = found["spec"]
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # else there is no podFailurePolicy
    bad_input, disrupted, stopped = spec["podFailurePolicy"]["rules"]
    (container,) = pod["containers"]
    for rule, action, status in ((bad_input, "FailJob", EXIT_BAD_INPUT), (stopped, "Ignore", EXIT_STOPPED)):
        expected = {"containerName": container["name"], "operator": "In", "values": [status]}
        assert (rule["action"], rule["onExitCodes"]) == (action, expected)
    assert disrupted["action"] == "Ignore"
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert pod["tolerations"]
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()


def test_pods_meet_before_they_are_ready_and_share_a_volume():
    service, claim, _ = documents("train.yaml")
    assert service["spec"]["publishNotReadyAddresses"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for name in NAMES:
        volumes = job(name)[0]["spec"]["template"]["spec"]["volumes"]
        assert {"claimName": claim["metadata"]["name"]} in [v.get("persistentVolumeClaim") for v in volumes]
    (jobset,) = documents("jobset.yaml")
    assert jobset["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}


def test_both_manifests_start_the_same():
    (one, first), (other, second) = job("train.yaml"), job("jobset.yaml")
    (jobset,) = documents("jobset.yaml")
    assert one["spec"].pop("ttlSecondsAfterFinished") == jobset["spec"]["ttlSecondsAfterFinished"] > 0
    assert one["spec"]["template"]["spec"].pop("subdomain") == "bigsgan"  # which a JobSet sets by itself
    text = yaml.safe_dump(other["spec"]).replace(second, first)
    assert yaml.safe_load(text) == one["spec"]
