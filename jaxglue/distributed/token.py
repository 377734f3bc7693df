"""The secret by which the processes of a run know each other."""

import contextlib
import hashlib
import os
import secrets
from pathlib import Path

from jaxglue.distributed.meeting import is_loopback

TOKEN = "JAXGLUE_TOKEN"
"""Environment variable of the secret."""
_SHORTEST = 8
_OWN = Path("~/.cache/jaxglue/token")
"""A user's secret for processes of one host."""


def find_token(given: str | None, job: str | None, host: str) -> bytes:
    """Return the secret of a run: the given one, else one from the launcher's job, else this user's on a loopback.

    Args:
        given: by flag or environment variable.
        job: the launcher's name and job; None without a launcher.
        host: the coordinator's.

    Raises:
        ValueError: the given one is too short, or there is none.
    """
    if given is not None and len(given) < _SHORTEST:
        raise ValueError(f"--token, {TOKEN}: expected {_SHORTEST} or more characters, got {len(given)}")
    if given is None and job is None and is_loopback(host):
        return _own_token(_OWN)
    if secret := given or job:
        return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
    raise ValueError(
        f"--token: not given, and no launcher started this process: set {TOKEN} to the same secret for all processes, "
        "such as the output of: openssl rand -hex 16"
    )


def _own_token(path: Path) -> bytes:
    """Read this user's secret, after making it once."""
    try:
        path = path.expanduser()
        if not path.exists():
            _make(path)
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ValueError(f"{path}: other users can read this secret: delete it, or set {TOKEN}")
        return path.read_bytes()
    except (OSError, RuntimeError) as error:  # the latter without a home folder
        reason = getattr(error, "strerror", error)
        raise ValueError(f"{path}: no secret can be kept there ({reason}): set {TOKEN}") from error


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(32))
    with contextlib.suppress(FileExistsError):  # another process was faster
        os.link(temporary, path)
    temporary.unlink()
