"""Models of the Hugging Face hub: downloaded by name, recorded by commit, uploaded.

The network is used only for a name that is no local folder; `HF_HUB_OFFLINE`, `HF_ENDPOINT`, `HF_HOME` and `HF_TOKEN`
have huggingface_hub's meaning.
"""

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from jaxglue.data.hub_client import checked_answers
from jaxglue.hf.files import refuse_link_out

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
TEXTS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*processor_config.json",
    "LICENSE*",
    "NOTICE*",
)
"""Files of a model folder beside its weights that are downloaded and exported."""
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_REVISION = re.compile(r"(?!.*(\.\.|//))[\w][\w./+-]*")
"""Names of branches, tags, commits and pull requests; they become names of files."""
_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})/?$")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHOWN = 300
"""Longest reason of the hub's client, in characters."""
_REMEDIES = {
    401: "log in with `hf auth login` or HF_TOKEN",
    403: "log in with `hf auth login` or HF_TOKEN, of an account that may read it",
    429: "it has had too many requests: wait some minutes, or log in with `hf auth login`",
}
"""Remedies by the status of a refusal."""
_TRANSPORT = {
    "TimeoutException": "the hub did not answer in time",
    "ConnectError": "the hub cannot be reached",
    "RemoteProtocolError": "the hub's answer is cut short or no HTTP",
    "NetworkError": "the connection to the hub broke off",
    "TransportError": "the hub cannot be reached",
}
"""Failures by the HTTP client's kinds of errors, narrow ones first."""
_SMALL = 2**26
"""Bytes of the largest file whose digest is checked: weights have checks of their own, and take longer."""


class BaseReference(NamedTuple):
    """Name by which a base model is found again."""

    name: str
    """Absolute folder, or a hub id."""
    revision: str | None = None
    """Commit on the hub; None for a folder."""


def is_hub_id(name: str | Path) -> bool:
    """Tell whether a name is no local folder and may be `owner/name` on the hub."""
    return not Path(name).exists() and _ID.fullmatch(str(name)) is not None


def model_path(name: str | Path, revision: str | None = None, *, weights: bool = True) -> Path:
    """Return a model's local folder: the named one where it exists, else the hub's snapshot, downloaded if need be.

    Args:
        name: folder, or `owner/name` on the hub.
        revision: branch, tag or commit on the hub; by default its main branch.
        weights: also download safetensors.

    Raises:
        ValueError: the hub does not have it, withholds it, or cannot be reached.
    """
    return _download(str(name), revision, weights) if is_hub_id(name) else Path(name)


@lru_cache
def _download(name: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [*TEXTS, *(WEIGHTS if weights else ())]
    if revision is not None and not _REVISION.fullmatch(revision):  # perhaps of a stranger's adapter_config.json
        raise ValueError(f"{name}: the revision {revision!r:.100} is no name of a branch, tag or commit")
    try:
        with checked_answers():
            folder = snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"])
    except Exception as error:
        raise ValueError(_explain(error, name, revision)) from error
    return _checked(Path(folder), name)


def _checked(folder: Path, name: str) -> Path:
    """Compare the small files of a snapshot with the digests that name them in the cache; a proxy may cut them."""
    if not folder.is_dir():
        raise ValueError(f"{name}: the hub lists none of a model's files: check its name, or name a folder")
    for path in folder.iterdir():
        blob = path.resolve()
        if not _DIGEST.fullmatch(blob.name) or blob.stat().st_size > _SMALL:
            continue
        if blob.name not in _digests(blob.read_bytes()):
            path.unlink()
            blob.unlink()
            raise ValueError(f"{name}: {path.name} was altered on its way from the hub, and is removed: start again")
    return folder


def _digests(content: bytes) -> set[str]:
    """Return the names that the hub, git and proxies give a file by its content."""
    git = b"blob %d\0%b" % (len(content), content)
    return {hashlib.sha256(content).hexdigest(), *(hashlib.sha1(each).hexdigest() for each in (content, git))}


def _explain(error: Exception, name: str, revision: str | None) -> str:
    """Describe a failed download or upload with its remedy."""
    from huggingface_hub import errors

    chain = [error, *_causes(error)]

    def is_any(*kinds: type[Exception]) -> bool:
        return any(isinstance(each, kinds) for each in chain)

    if is_any(errors.GatedRepoError):
        return f"{name} is gated: accept its terms on its page of the hub, then log in with `hf auth login` or HF_TOKEN"
    if is_any(errors.RevisionNotFoundError):
        remedy = "leave out --revision, or name a branch, tag or commit"
        return f"{name} has no revision {revision!r:.100} on the hub: {remedy}"
    if is_any(errors.RepositoryNotFoundError):
        return (
            f"{name} is neither a folder here nor a model on the hub: check its name; "
            "a private one needs `hf auth login` or HF_TOKEN"
        )
    if is_any(errors.OfflineModeIsEnabled):
        return f"{name} is not in the cache, and HF_HUB_OFFLINE forbids downloads: unset it once, or name a folder"
    if status := next((status for each in chain if (status := _status(each))), None):
        remedy = _REMEDIES.get(status, "try again later" if status >= 500 else "check its name, and HF_ENDPOINT if set")
        return f"{name} is not a folder here, and the hub answers with status {status}: {remedy}"
    if failed := next((failed for each in chain if (failed := _transport_failure(each))), None):
        return f"{name} is not a folder here, and {failed}: check the network, or name a folder"
    reason = " ".join(str(error).split())[:_SHOWN]
    if is_any(errors.LocalEntryNotFoundError):
        return f"{name} is not a folder here, nor whole in the hub's cache, and cannot be downloaded: {reason}"
    if is_any(OSError, ValueError):
        return f"{name} cannot be downloaded: {reason}"
    # Its client takes an answer's form for granted.
    return f"{name}: the hub's answer cannot be read ({type(error).__name__}: {reason}): a proxy may have changed it"


def _status(error: BaseException) -> int | None:
    """Return the status of an answer that is an error, or None."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return status if isinstance(status, int) and status >= 400 else None


def _transport_failure(error: BaseException) -> str | None:
    """Describe a failure of the HTTP client, whose package differs with huggingface_hub's version."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return next((text for kind, text in _TRANSPORT.items() if kind in kinds), None)


def _causes(error: BaseException) -> list[BaseException]:
    cause = error.__cause__ or error.__context__
    return [] if cause is None else [cause, *_causes(cause)]


def base_reference(folder: str | Path) -> BaseReference:
    """Return the name of a base: a hub id and commit for a snapshot, an absolute path for another folder."""
    path = Path(folder)
    if not path.is_dir():
        return BaseReference(str(folder))
    if match := _SNAPSHOT.search(path.absolute().as_posix()):
        return BaseReference(f"{match['owner']}/{match['name']}", match["revision"])
    return BaseReference(str(path.resolve()))


def push_folder(folder: str | Path, name: str, card: str, *, extra: Sequence[Path] = (), private: bool = False) -> str:
    """Upload a folder's files and a card to the hub in one commit; return the repository's address.

    Args:
        folder: its own files go up, but no hidden ones and no README.md.
        name: of the repository, `owner/name`, created if absent.
        card: README.md.
        extra: further files.
        private: create the repository as private.

    Raises:
        ValueError: the name is malformed, a file is a link out of its folder, or the hub refuses or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    if not _ID.fullmatch(name):
        raise ValueError(f"--push {name}: expected owner/name")
    paths = [path for path in sorted(Path(folder).iterdir()) if path.is_file() and not path.name.startswith(".")]
    for path in (*paths, *extra):
        refuse_link_out(path, path.parent)
    files = {path.name: path for path in (*paths, *extra)}
    files.pop("README.md", None)
    operations = [CommitOperationAdd(path_in_repo=key, path_or_fileobj=path) for key, path in files.items()]
    operations.append(CommitOperationAdd(path_in_repo="README.md", path_or_fileobj=card.encode()))
    try:
        with checked_answers():
            api = HfApi()
            url = api.create_repo(name, private=private, exist_ok=True)
            api.create_commit(name, operations, commit_message="Upload from jaxglue")
    except Exception as error:
        raise ValueError(_explain_push(error, name)) from error
    return str(url)


def _explain_push(error: Exception, name: str) -> str:
    """Describe a failed upload with its remedy."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.LocalTokenNotFoundError) or status in (401, 403):
        return f"--push {name}: the hub refused: log in with `hf auth login` or HF_TOKEN, with a token that may write"
    return f"--push {_explain(error, name, None)}"
