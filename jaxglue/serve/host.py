"""What endpoints answer with: a loaded model, the thread that decodes, settings and names."""

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
from jaxglue.serve.served_models import ServedModels
from jaxglue.serve.service import Service


@dataclass(eq=False)
class Host:
    """A server's state, which every endpoint gets."""

    assistant: Assistant
    service: Service
    config: ServeConfig
    models: ServedModels
    metrics: Metrics
    adapters: LoadedAdapters | None = None
    """Those that clients load; None where they may not."""
    seeds: count = field(default_factory=lambda: count(1))
    """Seeds of requests that state none."""

    @property
    def sees(self) -> bool:
        """Return whether chats may have images."""
        return self.assistant.sight is not None

    async def scores(self, prompts: Sequence[list[int]], voice: Voice, top: int) -> list[PromptScores]:
        """Return the log-probabilities of prompts' tokens, computed beside the answers; errors as of `PromptScorer`."""
        loop, state = asyncio.get_running_loop(), (self.assistant.adapter, prompts, voice.ranks, top)
        return await loop.run_in_executor(self._scoring, lambda: self._scorer.score(*state))

    @cached_property
    def _scorer(self) -> PromptScorer:
        return PromptScorer(self.assistant)

    @cached_property
    def _scoring(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "scores")
