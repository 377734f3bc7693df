"""Number of this process among those of its run, from flags, SLURM or Open MPI."""

import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, NamedTuple

from jaxglue.distributed.token import TOKEN, find_token
from jaxglue.settings.config import Config, NonNegativeInt, Range

_NUMBERS = ("coordinator", "num_processes", "process_id")
_UNSET = "start the run with them, or unset their variables"
_FIRST_PORT, _PORTS = 61_000, 4_000
"""Above the ports that Linux assigns by itself."""


@dataclass(frozen=True, kw_only=True)
class DistributedConfig(Config):
    """A run in several processes; under srun and mpirun these flags are not needed."""

    coordinator: str | None = None
    """HOST:PORT where the processes meet: process 0's host, and a free port there."""
    num_processes: Annotated[int, Range(ge=1, le=2**16)] | None = None
    """Number of processes, on all hosts together."""
    process_id: NonNegativeInt | None = None
    """Number of this process, from 0."""
    token: str | None = field(default=None, repr=False)
    """Secret by which the processes know each other; better given as JAXGLUE_TOKEN, since other users of a host see
    command lines. By default from the launcher's job."""

    def validate(self) -> None:
        """Refuse an address that is not HOST:PORT, a process that is not in the run, and a short token."""
        if self.coordinator is not None and not _is_address(self.coordinator):
            raise ValueError(f"--coordinator: expected HOST:PORT, such as node1:12355, got {self.coordinator!r:.100}")
        if self.num_processes and self.process_id and self.process_id >= self.num_processes:
            raise ValueError(
                f"--process-id: expected 0 to {self.num_processes - 1} of --num-processes {self.num_processes}, "
                f"got {self.process_id}"
            )


@dataclass(frozen=True, kw_only=True)
class ProcessInfo:
    """One process of several."""

    coordinator: str
    num_processes: int
    process_id: int
    token: bytes = field(repr=False)

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port of the coordinator."""
        return _split(self.coordinator)


def find_process_info(config: DistributedConfig, environ: Mapping[str, str]) -> ProcessInfo | None:
    """Combine flags with SLURM's or Open MPI's variables; None for a run in one process.

    Args:
        config: the flags.
        environ: the environment variables.

    Raises:
        ValueError: some but not all values are given, or no token.
    """
    launcher = _find_launcher(environ)
    told = {name: value for name in _NUMBERS if (value := getattr(launcher, name)) is not None}
    flags = {name: value for name, value in asdict(config).items() if value is not None and name != "token"}
    values = {**told, **flags}
    if values.get("num_processes", 0 if flags else 1) == 1:
        return None
    if missing := [f"--{name.replace('_', '-')}" for name in _NUMBERS if name not in values]:
        source = (
            f" by flags or {launcher.name}" if launcher.name else ", and neither srun nor mpirun started this process"
        )
        raise ValueError(
            f"{' and '.join(missing)}: not given{source}; give --coordinator, --num-processes and "
            "--process-id together, only the last differing between processes (see docs/multi_node.md)"
        )
    host, _ = _split(values["coordinator"])
    job = f"{launcher.name} {launcher.job}" if launcher.job else None
    return ProcessInfo(**values, token=find_token(config.token or environ.get(TOKEN), job, host))


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _is_address(text: str) -> bool:
    return bool(re.fullmatch(r"([^:\s]+|\[[^\s\]]+\]):[0-9]{1,5}", text)) and 1 <= _split(text)[1] < 2**16


class _Launcher(NamedTuple):
    """The program that started this process among others, and its account of them; all absent for a single process."""

    name: str | None = None
    job: str = ""
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


def _find_launcher(environ: Mapping[str, str]) -> _Launcher:
    """Read the environment that srun and mpirun give."""
    # Before SLURM: under SLURM, Open MPI's daemons are themselves a job step.
    if (size := _number(environ, "OMPI_COMM_WORLD_SIZE", "1")) > 1:
        index = _number(environ, "OMPI_COMM_WORLD_RANK")
        job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_orte_hnp_uri", "")
        # On several hosts it does not tell which of them has process 0.
        alone = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(size)
        coordinator = f"127.0.0.1:{_port(job)}" if alone else None
        job += environ.get("OMPI_MCA_orte_precondition_transports", "")
        return _Launcher("Open MPI", job, coordinator, size, index)
    # Variables of the job step: the job's own script is one process, whatever the job's size.
    if (size := _number(environ, "SLURM_STEP_NUM_TASKS", "1")) > 1:
        job = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
        coordinator = f"{_first_host(environ.get('SLURM_STEP_NODELIST', ''))}:{_port(job)}"
        return _Launcher("SLURM", job, coordinator, size, _number(environ, "SLURM_PROCID"))
    return _Launcher()


def _number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    """Return a number of at most nine digits that a launcher has set.

    Raises:
        ValueError: another value, or none where the launcher's other variables are there.
    """
    value = environ.get(name, default)
    if not re.fullmatch(r"[0-9]{1,9}", value):
        found = f"is {value!r:.100}" if name in environ else "is missing"
        raise ValueError(f"{name} {found} in the environment, expected a number as srun and mpirun set it: {_UNSET}")
    return int(value)


def _first_host(nodes: str) -> str:
    """Return the first host of a SLURM list: `gpu003` of `gpu[003-007,012],login1`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST is {nodes!r:.100}, expected names of hosts as srun sets it: {_UNSET}")
    return "".join(part or "" for part in match.groups())


def _port(job: str) -> int:
    """Return one port for all processes of a job, and another for the next job on the host."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS
