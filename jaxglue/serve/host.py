"""What endpoints answer with: a loaded model, the threads that decode and read, settings and names."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

from jaxglue.generation.assistant import Assistant, Voice
from jaxglue.generation.scoring import PromptScorer, PromptScores
from jaxglue.serve.config import ServeConfig
from jaxglue.serve.loaded_adapters import LoadedAdapters
from jaxglue.serve.metrics import Metrics
from jaxglue.serve.reading import ReadService
from jaxglue.serve.served_models import ServedModels
from jaxglue.serve.service import Service
from jaxglue.vision.rows import PromptImages


@dataclass(eq=False)
class Host:
    """A server's state, which every endpoint gets; forms are served whose parts are there."""

    text: tuple[Assistant, Service] | None
    """The model that writes text, and its thread; None for one that does not."""
    reader: ReadService | None
    """The thread that answers in one pass; None without."""
    config: ServeConfig
    models: ServedModels
    metrics: Metrics
    adapters: LoadedAdapters | None = None
    """Those that clients load; None where they may not."""
    seeds: count = field(default_factory=lambda: count(1))
    """Seeds of requests that state none."""

    @property
    def assistant(self) -> Assistant:
        """Return the model that writes text."""
        assert self.text is not None
        return self.text[0]

    @property
    def service(self) -> Service:
        """Return the thread that decodes."""
        assert self.text is not None
        return self.text[1]

    @property
    def reading(self) -> ReadService:
        """Return the thread that reads."""
        assert self.reader is not None
        return self.reader

    @property
    def failure(self) -> str | None:
        """Return the reason for a thread's end; None while all run."""
        threads = [self.text and self.text[1], self.reader]
        return next((thread.failure for thread in threads if thread and thread.failure), None)

    @property
    def length(self) -> int:
        """Return the most tokens of a text."""
        return self.service.length if self.text else self.reading.length

    @property
    def kinds(self) -> frozenset[str]:
        """Return what the model is for."""
        return frozenset([*(["text"] if self.text else []), *(self.reader.readers if self.reader else ())])

    @property
    def sees(self) -> bool:
        """Return whether chats may have images."""
        return self.text is not None and self.assistant.sight is not None

    async def scores(
        self, prompts: Sequence[list[int]], voice: Voice, top: int, images: PromptImages | None = None
    ) -> list[PromptScores]:
        """Return the log-probabilities of prompts' tokens, computed beside the answers; errors as of `PromptScorer`.

        One prompt may have images.
        """
        loop, state = asyncio.get_running_loop(), (self.assistant.adapter, prompts, voice.ranks, top, images)
        return await loop.run_in_executor(self._scoring, lambda: self._scorer.score(*state))

    @cached_property
    def _scorer(self) -> PromptScorer:
        model = self.assistant
        return PromptScorer(model.graphdefs, model.config, model.frozen, model.dtype, model.tile)

    @cached_property
    def _scoring(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "scores")
