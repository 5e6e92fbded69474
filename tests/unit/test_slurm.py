"""Ranks from the variables that `srun` sets."""

from __future__ import annotations

import pytest

from bigsgan.errors import UserError
from bigsgan.runtime.slurm import first_host, launcher_variables, tasks_on_node

# As srun of Slurm 22.05 set them for the third task of two on the first node and one on the second.
TASK = {
    "SLURM_JOB_ID": "123456",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "node[1-2]",
}


def test_a_task_has_the_ranks_that_torch_reads():
    assert launcher_variables(TASK) == {
        "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "node1", "MASTER_PORT": "23456",
    }  # fmt: skip
    own = launcher_variables({**TASK, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"})
    assert (own["MASTER_ADDR"], own["MASTER_PORT"]) == ("10.0.0.1", "29501")


# Slurm 22.05 in the second of two tasks on a node with two GPUs: how it was started, what it sees, its device.
BOUND = {"CUDA_VISIBLE_DEVICES": "1", "SLURM_GPUS_ON_NODE": "2"}
ALL = {**BOUND, "CUDA_VISIBLE_DEVICES": "0,1"}
DEVICES = {
    "--gpus-per-node 2": (ALL, "1"),
    "--gpus-per-task 1": ({**BOUND, "SLURM_GPUS_PER_TASK": "1"}, "0"),
    "--gpus-per-task 1, and all visible": ({**ALL, "SLURM_GPUS_PER_TASK": "1"}, "1"),
    "--gpus-per-task 1 --gpu-bind none": ({"SLURM_GPUS_PER_TASK": "1", "SLURM_GPUS_ON_NODE": "2"}, "1"),
    "--ntasks-per-gpu 1": ({**BOUND, "SLURM_NTASKS_PER_GPU": "1"}, "0"),
    "--gpu-bind single:1": (BOUND, "0"),
    "--gpus-per-node 1, for both": ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "1"}, "1"),
    "no GPUs": ({"CUDA_VISIBLE_DEVICES": ""}, "1"),
}


@pytest.mark.parametrize("seen, device", DEVICES.values(), ids=DEVICES)
def test_a_task_that_sees_one_device_takes_it(seen, device):
    second = {**TASK, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
    found = launcher_variables({**second, **seen})
    # The number of local ranks that share what is visible; comm.initialize refuses more ranks than devices.
    assert (found["RANK"], found["LOCAL_RANK"], found["LOCAL_SIZE"]) == ("1", device, "1" if device == "0" else "2")
    assert found["LOCAL_WORLD_SIZE"] == "2"


def test_ports_are_below_those_of_outgoing_connections():
    ports = [int(launcher_variables({**TASK, "SLURM_JOB_ID": str(job)})["MASTER_PORT"]) for job in range(0, 50_000, 7)]
    assert 20_000 <= min(ports) < max(ports) < 32_768  # net.ipv4.ip_local_port_range


def test_what_no_srun_started_is_left_alone():
    assert launcher_variables({}) == {}
    assert launcher_variables({**TASK, "RANK": "0"}) == {}
    batch = {name: value for name, value in TASK.items() if not name.startswith("SLURM_STEP")}
    assert launcher_variables(batch) == {}


@pytest.mark.parametrize(
    "nodelist, first",
    [
        ("node1", "node1"),
        ("node[1-2]", "node1"),
        ("gpu[007-010,012]", "gpu007"),
        ("gpu[007-010,012]-ib,login1", "gpu007-ib"),
        ("a,b", "a"),
        ("rack-3.site[4,6],b[1-2]", "rack-3.site4"),
    ],
)
def test_the_first_host(nodelist, first):
    assert first_host(nodelist) == first


@pytest.mark.parametrize("text, counts", [("1", [1]), ("2,1", [2, 1]), ("8(x3),4", [8, 8, 8, 4])])
def test_tasks_on_each_node(text, counts):
    environment = {"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_STEP_NUM_TASKS": str(sum(counts))}
    found = [tasks_on_node(environment, node) for node in range(len(counts))]
    assert found == counts


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"SLURM_PROCID": ""}, "SLURM_PROCID: must be set in a step of Slurm; start with `srun`"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID: must be less than 2, the number of nodes of the step, got 2"),
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID: must be less than 3, the number of tasks of the step, got 3; start"),
        ({"SLURM_PROCID": "-1"}, "SLURM_PROCID: must be a whole number, got '-1'"),
        ({"SLURM_LOCALID": "1"}, "SLURM_LOCALID: must be less than 1, the number of its tasks on this node, got 1"),
        ({"SLURM_STEP_NUM_TASKS": "0"}, "SLURM_STEP_NUM_TASKS: must be at least 1, got '0'"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,0"}, "SLURM_STEP_TASKS_PER_NODE: must be as Slurm sets it, got '2,0'"),
        ({"SLURM_STEP_TASKS_PER_NODE": "99999(x999999),3"},
         "SLURM_STEP_TASKS_PER_NODE: must be of 3 tasks, as SLURM_STEP_NUM_TASKS is, got '99999(x999999),3'; start"),
        ({"SLURM_STEP_TASKS_PER_NODE": "\u0663"}, "SLURM_STEP_TASKS_PER_NODE: must be as Slurm sets it, got"),
        ({"SLURM_STEP_NODELIST": "[1-2"}, "SLURM_STEP_NODELIST: must be a list of hosts, got '[1-2'; set MASTER_ADDR"),
    ],
)  # fmt: skip
def test_what_is_not_as_slurm_sets_it(changes, message):
    with pytest.raises(UserError) as caught:
        launcher_variables({**TASK, **changes})
    assert str(caught.value).startswith(message)
