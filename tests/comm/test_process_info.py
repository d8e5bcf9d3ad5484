"""Who a process is in a run of several, by what engines leave in its environment."""

import sys
import types

import pytest

from hetjax import process_info

LAUNCHER = {
    "HETJAX_PROCESS_ID": "1",
    "HETJAX_NUM_PROCESSES": "4",
    "HETJAX_COORDINATOR": "127.0.0.1:7000",
}
ADDRESS = {"JAX_COORDINATOR_ADDRESS": "node1:7000"}
TORCH = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCHRUN = {**TORCH, "LOCAL_RANK": "1", "GROUP_RANK": "2", "TORCHELASTIC_RUN_ID": "none"}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "3", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}


def slurm(procid, size, ntasks=None):
    """Of a task of srun; one of its steps has `size` tasks."""
    job = {"JOB_ID": 3, "LOCALID": 0, "NTASKS": ntasks or size, "PROCID": procid}
    job |= {"STEP_NODELIST": "node[1-4]", "STEP_NUM_TASKS": size}
    return {f"SLURM_{name}": str(value) for name, value in job.items()}


SLURM_SHELL = {name: text for name, text in slurm(0, 1, 8).items() if "STEP" not in name}
"""Of a batch script, and of salloc without `use_interactive_step`."""


def open_mpi(rank, size, *, version=4):
    uri = {"OMPI_MCA_orte_hnp_uri": "1079443456.0;tcp://192.0.2.2:57849"} if version == 4 else {}
    space = {"PMIX_NAMESPACE": "1079443457", "PMIX_RANK": str(rank)}
    return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size), **uri, **space}


def pmi(rank, size):
    return {"PMI_FD": "6", "PMI_RANK": str(rank), "PMI_SIZE": str(size)}


def pmix(rank, space):
    return {"PMIX_RANK": str(rank), "PMIX_NAMESPACE": space}


@pytest.mark.parametrize(
    ("arguments", "environment", "place"),
    [
        ((), {}, None),
        ((0, 1), INDEXED_JOB, None),
        ((0, 2, "host:80"), LAUNCHER, (0, 2, "host:80", None)),
        ((), LAUNCHER, (1, 4, "127.0.0.1:7000", None)),
        ((), {**slurm(2, 8), **TORCHRUN, **LAUNCHER}, (1, 4, "127.0.0.1:7000", None)),
        # Open MPI 4 says where mpirun is, and 5 does not.
        ((), open_mpi(3, 4), (3, 4, None, "ompi")),
        ((), {**open_mpi(3, 4, version=5), **ADDRESS}, (3, 4, "node1:7000", None)),
        # MPICH and Intel MPI
        ((None, None, "[::1]:80"), pmi(0, 2), (0, 2, "[::1]:80", None)),
        ((), {**pmi(1, 2), **ADDRESS}, (1, 2, "node1:7000", None)),
        # Slurm
        ((), slurm(2, 8), (2, 8, None, "slurm")),
        ((), {**slurm(2, 4), **pmi(2, 4)}, (2, 4, None, "slurm")),  # srun --mpi=pmi2
        ((), {**slurm(2, 4), **pmix(2, "slurm.pmix.3.0")}, (2, 4, None, "slurm")),
        ((), SLURM_SHELL, None),
        ((), slurm(0, 1), None),  # srun --pty, and the interactive step of salloc
        # torchrun, also in the tasks of srun and in pods; it may listen at MASTER_PORT itself
        ((), TORCHRUN, (5, 8, "node1:29501", None)),
        ((), {**TORCHRUN, **slurm(2, 4)}, (5, 8, "node1:29501", None)),
        ((), {**TORCHRUN, "MASTER_PORT": "65535"}, (5, 8, "node1:65534", None)),
        ((), {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", **slurm(2, 4)}, None),
        # the same variables by hand, and as operators set them
        ((), TORCH, (5, 8, "node1:29500", None)),
        ((), {**TORCH, "MASTER_ADDR": "fd00::2"}, (5, 8, "[fd00::2]:29500", None)),
        ((), {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, None),
        ((), {"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2", **ADDRESS},
         (1, 2, "node1:7000", None)),
        # Kubernetes
        ((), {**INDEXED_JOB, "JAX_NUM_PROCESSES": "4", "MASTER_ADDR": "job-0.pods",
              "MASTER_PORT": "7000"}, (3, 4, "job-0.pods:7000", None)),
        ((), {**INDEXED_JOB, "TPU_WORKER_HOSTNAMES": "a,b"}, None),  # JAX knows the pod
    ],
)  # fmt: skip
def test_the_nearest_engine_says_who_a_process_is(arguments, environment, place):
    assert process_info.find(*arguments, environment=environment) == place


# As they were left to eight ranks, by Open MPI 4.1.4 and MPICH 4.0.2 in a batch job of Slurm 22.05
# with four nodes, and by Open MPI in an allocation whose first node has mpirun, and no daemon.
OF_DAEMONS = {
    "batch": [(0, 4)] * 4 + [(1, 4)] * 2 + [(2, 4), (3, 4)],
    "allocation": [(0, 8), (2, 3)] + [(0, 3)] * 6,
}


@pytest.mark.parametrize("ranks", [open_mpi, pmi])
@pytest.mark.parametrize("where", OF_DAEMONS)
def test_ranks_of_mpirun_in_slurm_take_the_places_of_mpirun(where, ranks):
    for rank, of_daemon in enumerate(OF_DAEMONS[where]):
        environment = {**slurm(*of_daemon, ntasks=8), **ranks(rank, 8), **ADDRESS}
        assert process_info.find(environment=environment) == (rank, 8, "node1:7000", None)


NOT_OF_HOW_MANY = "says that this is process {}, and nothing says"
OF_TWO = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1"}


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ((), INDEXED_JOB, f"JOB_COMPLETION_INDEX {NOT_OF_HOW_MANY.format(3)} of how many"),
        ((), pmix(1, "prterun-node1-77@1"), f"PMIX_RANK {NOT_OF_HOW_MANY.format(1)}"),
        ((), {**slurm(1, 4, ntasks=8), **pmi(5, 8)}, "PMI_RANK says that .* process 5 of 8, and"),
        ((), open_mpi(1, 2, version=5), "OMPI_COMM_WORLD_RANK says that .* process 1 of 2, and"),
        ((), OF_TWO, "where process 0 listens"),
        ((), {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "8"}, "where process 0 listens"),
        ((1, None), {}, "--process_id is 1 and --num_processes None; give both"),
        ((0, 2), {}, r"--coordinator is missing: HOST:PORT"),
        ((2, 2, "host:80"), {}, "--process_id is 2; "),
        ((0, 2, "host:70000"), {}, "must be HOST:PORT"),
    ],
)
def test_a_process_says_what_is_missing_or_wrong(arguments, environment, message):
    with pytest.raises(ValueError, match=message):
        process_info.find(*arguments, environment=environment)


def test_a_worker_of_ray_train_says_what_is_missing(monkeypatch):
    def context(rank, size):
        own = types.SimpleNamespace(get_world_rank=lambda: rank, get_world_size=lambda: size)
        return types.SimpleNamespace(get_context=lambda: own)

    monkeypatch.setitem(sys.modules, "ray.train", context(1, 4))
    with pytest.raises(ValueError, match=r"Ray Train says that this is process 1 of 4, and noth"):
        process_info.find(environment={})
    assert process_info.find(environment=ADDRESS) == (1, 4, "node1:7000", None)
    monkeypatch.setitem(sys.modules, "ray.train", context(0, 1))
    assert process_info.find(environment={}) is None
    monkeypatch.setitem(sys.modules, "ray.train", types.SimpleNamespace())
    assert process_info.find(environment={}) is None
