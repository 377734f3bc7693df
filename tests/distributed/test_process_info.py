"""Process numbers from flags, SLURM and Open MPI; agreement among processes."""

import pytest

from jaxglue.distributed import DistributedConfig, find_process_info
from jaxglue.distributed.processes import SINGLE_PROCESS, Processes, share_gpus

SLURM = {
    "SLURM_JOB_ID": "812",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}
MPI = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "3", "PMIX_NAMESPACE": "prterun-node1-42@1"}
ONE_HOST = {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}


def test_single_process_without_flags_and_launcher():
    assert find_process_info(DistributedConfig(), {}) is None
    assert find_process_info(DistributedConfig(), {**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert (
        find_process_info(DistributedConfig(), {"SLURM_JOB_ID": "812", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"})
        is None
    )


def test_flags_give_the_process():
    flags = {"num_processes": 4, "process_id": 2, "token": "0123456789"}
    info = find_process_info(DistributedConfig(coordinator="node1:1234", **flags), {})
    assert (info.address, info.num_processes, info.process_id) == (("node1", 1234), 4, 2)
    six = find_process_info(DistributedConfig(coordinator="[fe80::1]:1234", **flags), {})
    assert six.address == ("fe80::1", 1234)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[003-004]", "gpu003"), ("a7,b[1-2]", "a7"), ("n[5,9-12]-ib,m1", "n5-ib"), ("login", "login")],
)
def test_slurm_gives_the_process(nodes, first):
    info = find_process_info(DistributedConfig(), {**SLURM, "SLURM_STEP_NODELIST": nodes})
    assert (info.address[0], info.num_processes, info.process_id) == (first, 16, 9)
    other = find_process_info(DistributedConfig(), {**SLURM, "SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": nodes})
    assert 61_000 <= info.address[1] < 65_000 and info.address[1] != other.address[1]


def test_open_mpi_needs_a_coordinator_on_several_hosts():
    info = find_process_info(DistributedConfig(), {**MPI, **ONE_HOST})
    assert (info.address[0], info.num_processes, info.process_id) == ("127.0.0.1", 8, 3)
    with pytest.raises(ValueError, match="--coordinator: not given by flags or Open MPI"):
        find_process_info(DistributedConfig(), {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    info = find_process_info(DistributedConfig(coordinator="node1:12355"), {**SLURM, **MPI})
    assert (info.coordinator, info.process_id) == ("node1:12355", 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"coordinator": "node1:1"}, "--num-processes and --process-id: not given, and neither srun nor mpirun"),
        ({"num_processes": 2}, "--coordinator and --process-id: not given"),
        ({"coordinator": "node1:1", "process_id": 0}, "--num-processes: not given"),
        ({"coordinator": "node1:1", "num_processes": 2, "process_id": 0}, "--token: not given, .*set JAXGLUE_TOKEN"),
        ({"coordinator": "::1:1", "num_processes": 2, "process_id": 0}, "--coordinator: expected HOST:PORT"),
        ({"coordinator": "node1:65536"}, "--coordinator: expected HOST:PORT"),
        ({"num_processes": 2**40}, "num_processes: expected int >= 1 and <= 65536"),
        ({"coordinator": "node1"}, "--coordinator: expected HOST:PORT, such as node1:12355, got 'node1'"),
        ({"num_processes": 2, "process_id": 2}, "--process-id: expected 0 to 1 of --num-processes 2, got 2"),
        ({"num_processes": 0}, r"num_processes: expected int >= 1 and <= 65536 \| none, got 0"),
    ],
)
def test_incomplete_or_wrong_flags_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        find_process_info(DistributedConfig(**given), {})


def test_token_is_given_or_the_jobs_or_the_users_own(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))

    def token(coordinator="node1:1234", environ=(), **flags):
        flags = {"num_processes": 4, "process_id": 2, **flags}
        return find_process_info(DistributedConfig(coordinator=coordinator, **flags), dict(environ)).token

    given = token(token="0123456789")
    assert token(environ={**SLURM, "JAXGLUE_TOKEN": "0123456789"}) == given
    assert token(environ=SLURM) == token(environ=SLURM) != token(environ={**SLURM, "SLURM_STEP_ID": "1"})
    own = token("127.0.0.1:1234")
    assert len(own) == 32 and own == token("localhost:1234")
    assert (tmp_path / ".cache/jaxglue/token").stat().st_mode & 0o777 == 0o600
    assert "0123456789" not in repr(DistributedConfig(token="0123456789"))
    with pytest.raises(ValueError, match="--token, JAXGLUE_TOKEN: expected 8 or more characters, got 3"):
        token(environ={"JAXGLUE_TOKEN": "abc"})
    (tmp_path / ".cache/jaxglue/token").chmod(0o644)
    with pytest.raises(ValueError, match="other users can read this secret"):
        token("127.0.0.1:1234")


def test_processes_share_the_gpus_they_both_see():
    four, two = ["a", "b", "c", "d"], ["e", "f"]
    assert [share_gpus([["x", four]] * 2, index) for index in range(2)] == [[0, 1], [2, 3]]
    assert [share_gpus([["x", two], ["y", two]], index) for index in range(2)] == [[0, 1], [0, 1]]
    assert [share_gpus([["x", four[:2]], ["x", four[2:]]], index) for index in range(2)] == [[0, 1], [0, 1]]
    assert share_gpus([["x", []]] * 2, 1) == []
    with pytest.raises(ValueError, match="3 processes on x see the same 4 GPUs, which do not divide"):
        share_gpus([["x", four]] * 3, 0)


class _Recorded(Processes):
    """A process that has received the others' objects."""

    def __init__(self, *others):
        super().__init__(count=1 + len(others))
        self._others = others

    def all_gather_object(self, value):
        return [value, *self._others]


def test_disagreement_names_the_values():
    mine = {"run": {"batch_size": 8, "seed": 0}, "data": "0a1b"}
    flat = {"run.batch_size": 8, "run.seed": 0, "data": "0a1b"}
    SINGLE_PROCESS.agree("configuration", mine)
    _Recorded(flat).agree("configuration", mine)
    with pytest.raises(ValueError, match="the processes disagree on the configuration:") as error:
        _Recorded(flat, {**flat, "run.batch_size": 4, "data": "77"}).agree("configuration", mine)
    assert "  run.batch_size: 8 on process 0, 4 on process 2\n  data: '0a1b' on process 0, '77'" in str(error.value)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is missing in the environment"),
        ({"OMPI_COMM_WORLD_SIZE": "two"}, "OMPI_COMM_WORLD_SIZE is 'two' in the environment, expected a number"),
        ({"OMPI_COMM_WORLD_SIZE": "9" * 5000}, "OMPI_COMM_WORLD_SIZE is '9999"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NODELIST is '', expected names of hosts"),
        ({**SLURM, "SLURM_PROCID": ""}, "SLURM_PROCID is '' in the environment"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n1"}, "SLURM_PROCID is missing"),
    ],
)
def test_variables_of_a_launcher_that_are_no_job_s_are_refused(environ, message):
    with pytest.raises(ValueError, match=message):
        find_process_info(DistributedConfig(), environ)
