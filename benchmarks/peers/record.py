"""Where, when and how a measurement was made, told alike by every engine. Imports neither jax nor torch."""

import json
import os
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def provenance(gpu: str, versions: dict[str, str]) -> dict:
    """Return GPU, date, commit, versions, command and the host's memory in GiB, of which every result file tells."""
    return {
        "gpu": gpu,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "versions": versions,
        "command": shlex.join(["python", *sys.argv]),
        "host_memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }


def commit() -> str | None:
    """Return the checkout's commit, followed by + where tracked files differ from it.

    Where git does not tell, it is that of `JAXGLUE_COMMIT`, or None: a measurement is not lost for it.
    """
    if not (ROOT / ".git").exists():
        return os.environ.get("JAXGLUE_COMMIT")
    try:
        changed = _git("status", "--porcelain", "--untracked-files=no")
        return _git("rev-parse", "--short=8", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("JAXGLUE_COMMIT")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True).stdout.strip()


def write_json(path: Path, content: dict) -> None:
    """Write compact JSON atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.rename(path)
