"""Publication of a checkpoint's folder: everything in it is on disk before its name is."""

import os
from pathlib import Path
from typing import Any

from orbax.checkpoint._src.path.atomicity import AtomicRenameTemporaryPath

from jaxglue.data.store import sync


class DurablePath(AtomicRenameTemporaryPath):
    """Orbax's temporary folder, synced to disk file by file before the rename that publishes it."""

    async def finalize(self) -> None:
        """Complete the folder under a temporary name, sync it, and rename it."""
        final = self.get_final()
        self._final_path: Any = final.parent / f"{final.name}.synced{self._tmp_path.suffix}"
        try:
            await super().finalize()
            sync_tree(Path(self._final_path))
            os.rename(self._final_path, final)
        finally:
            self._final_path = final
        sync(Path(final.parent))


def sync_tree(folder: Path) -> None:
    """Sync all files and folders below a folder, and the folder itself."""
    for parent, _, files in os.walk(folder, topdown=False):
        for file in files:
            sync(Path(parent, file))
        sync(Path(parent))
