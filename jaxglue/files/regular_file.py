"""The reader of strangers' files: regular ones of a bounded size. A pipe may wait for ever, and a device never ends."""

import errno
import hashlib
import io
import os
import stat
from pathlib import Path

MAX_BYTES = 256 * 2**20
"""Above every text file of a published model."""
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


def open_regular(path: str | Path, most: int | None = None) -> io.BufferedReader:
    """Open a regular file for reading.

    Raises:
        ValueError: a pipe, device or socket, or a file of more than `most` bytes.
        OSError: as `open`, also for a folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # else opening a pipe waits for its writer
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "no regular file")
            raise ValueError(f"{path} is {kind}: write its content to a file, and name that")
        if most is not None and status.st_size > most:
            raise ValueError(f"{path} has {status.st_size:,} bytes: at most {most:,} are read")
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_regular(path: str | Path, most: int = MAX_BYTES) -> bytes:
    """Read a regular file of at most `most` bytes; errors are those of `open_regular`."""
    with open_regular(path, most) as file:
        return file.read(most)


def read_regular_text(path: str | Path, encoding: str = "utf-8-sig", most: int = MAX_BYTES) -> str:
    """Read a regular text file with its ends of lines as \\n; errors are those of `open_regular`, or of decoding."""
    with open_regular(path, most) as file:
        return io.TextIOWrapper(file, encoding).read()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
