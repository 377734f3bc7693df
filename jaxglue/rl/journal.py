"""Episodes on disk while a generation is under way: a run that is killed goes on with those that had ended, and in the
middle of those whose environments can say their state."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from jaxglue.files.journal import Journal

EPISODES = ".episodes.jsonl"
"""Ends the name of such a file."""
_log = logging.getLogger(__name__)


class EpisodeFile(Journal):
    """A journal of episodes.

    Args:
        path: of the file.
        run: what episodes depend on; those of others are not read.
    """

    named: ClassVar[str] = "episode"

    def __init__(self, path: Path, run: Mapping[str, Any]):
        super().__init__(path, run)
        if self.kept:
            ended = sum("sample" in episode for episode in self.kept.values())
            _log.warning(
                "of the episodes under way when the run ended, %d had ended and %d go on from their turn; all others "
                "start again",
                *(ended, len(self.kept) - ended),
            )
