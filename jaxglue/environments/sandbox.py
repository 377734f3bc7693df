"""Tools that run programs of the model's, away from this machine's files, processes and network.

They run in bubblewrap's namespaces: the system's programs and Python are there to read, and one empty folder to write,
which ends with the episode. Without bubblewrap they are refused.
"""

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

_LONGEST = 8000
"""Characters of a program's output that the model reads."""
_FILE = 64 * 2**20
"""Bytes of a file that a program may write."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
_NO_SANDBOX = (
    "programs that a model writes run in bubblewrap alone: install it (apt install bubblewrap), or let them run beside "
    "the training, with its files and network, by --environment 'sandbox?unsafe=yes'"
)


class Sandbox:
    """A folder of an episode's, in which programs run.

    Args:
        seconds: the most time of a program.
        memory: GiB of a program's address space.
        unsafe: yes runs programs without a sandbox.
    """

    def __init__(self, seconds: str = "10", memory: str = "2", unsafe: str = "no"):
        self._seconds, self._memory = float(seconds), int(float(memory) * 2**30)
        self._unsafe = unsafe == "yes"
        self._folder: str | None = None
        if not self._unsafe:
            _require_sandbox()

    def __enter__(self) -> "Sandbox":
        self._folder = tempfile.mkdtemp(prefix="jaxglue-sandbox-")
        return self

    def __exit__(self, *error: object) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def reset(self, **row) -> None:
        """Begin with an empty folder."""

    def python(self, code: str) -> str:
        """Run a Python program and return what it prints. Files stay for further programs, variables do not.

        Args:
            code: the program.
        """
        return self._run([os.path.realpath(sys.executable), "-I", "-c", code])

    def shell(self, command: str) -> str:
        """Run a command of the shell and return what it prints.

        Args:
            command: for sh.
        """
        return self._run(["/bin/sh", "-c", command])

    def _run(self, command: list[str]) -> str:
        assert self._folder is not None
        started = command if self._unsafe else [*_namespaces(self._folder), *command]
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                started,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                start_new_session=True,
                preexec_fn=self._limit,
            )
            try:
                status = process.wait(self._seconds)
                ended = "" if status == 0 else f"\n[status {status}]"
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                ended = f"\n[ended after {self._seconds:g} s]"
            output.seek(0)
            text = output.read(4 * _LONGEST + 4).decode(errors="replace")
        cut = f"{text[:_LONGEST]}\n[cut]" if len(text) > _LONGEST else text
        return (cut + ended).strip() or "[no output]"

    def _limit(self) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (self._memory, self._memory))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE, _FILE))
        resource.setrlimit(resource.RLIMIT_CPU, (int(self._seconds) + 1,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _namespaces(folder: str) -> list[str]:
    """Return the command that runs another one with this folder as all that it may write."""
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    for path in _SYSTEM:
        if Path(path).is_symlink():
            command += ["--symlink", str(Path(path).readlink()), path]
        elif Path(path).exists():
            command += ["--ro-bind", path, path]
    base = str(Path(sys.base_prefix).resolve())
    if not base.startswith("/usr"):
        command += ["--ro-bind", base, base]
    command += ["--dev", "/dev", "--tmpfs", "/tmp", "--bind", folder, "/work", "--chdir", "/work"]
    return [*command, "--setenv", "PATH", f"{base}/bin:/usr/bin:/bin", "--setenv", "HOME", "/work"]


def _require_sandbox() -> None:
    """Raise ValueError where programs cannot run in a sandbox."""
    if shutil.which("bwrap") is None:
        raise ValueError(_NO_SANDBOX)
    with tempfile.TemporaryDirectory() as folder:
        tried = subprocess.run([*_namespaces(folder), "/bin/true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        raise ValueError(f"bubblewrap makes no sandbox here ({tried.stderr.strip()[:200]}); {_NO_SANDBOX}")
