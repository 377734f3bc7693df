"""Files of model folders: the size of shards, and links out of a folder."""

from pathlib import Path

MAX_SHARD_BYTES = 5 * 10**9
"""Default size of a model folder's shards in bytes, as in transformers."""


def refuse_link_out(path: Path, folder: Path) -> None:
    """Raise ValueError for a link out of its folder, but for those of Hugging Face's cache into its blobs."""
    target, blobs = path.resolve(), folder.resolve().parent.parent / "blobs"
    if path.is_symlink() and target.parent != blobs and not target.is_relative_to(folder.resolve()):
        raise ValueError(f"{path} is a link to {target}, outside its folder: copy the file there first")
