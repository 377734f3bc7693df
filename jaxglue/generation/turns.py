"""Turns of many conversations, decoded together: each begins when what precedes it is known, whatever the others do.

While a conversation waits for its next turn, its keys and values stay in their pages, or on the host where others need
the memory.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from jaxglue.generation import scheduler
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.engine import Completion, Engine, completion_of
from jaxglue.generation.inputs import ProgramKind
from jaxglue.generation.pages import CachePlan
from jaxglue.generation.scheduler import Request
from jaxglue.models.parameters import Params
from jaxglue.vision.rows import PromptImages


@dataclass(eq=False)
class Turn:
    """A turn of a conversation."""

    prompt: Sequence[int]
    """All tokens before it."""
    index: int
    answer: int
    seed: int
    """With the position of a token, these decide on its random number."""
    most: int
    """The most tokens."""
    after: "Turn | None" = None
    """The turn whose prompt and tokens the prompt begins with, if it holds its pages."""
    images: PromptImages | None = None
    """Of the prompt."""
    holds: bool = False
    """Another turn may go on from it: its pages stay until they are released."""
    sequence: scheduler.Sequence | None = None
    """Its answer, once it has begun."""


class TurnSource(Protocol):
    """Says which turns begin, and takes their tokens; its methods but `wait` return at once."""

    def ready(self) -> list[Turn]:
        """Return turns that may begin, once each."""

    def released(self) -> list[Turn]:
        """Return turns that nothing goes on from any more, once each."""

    def take(self, turn: Turn, completion: Completion) -> None:
        """Take a turn's tokens."""

    def wait(self, seconds: float = 60.0) -> None:
        """Wait until a turn is ready or all are over, so many seconds at most."""

    @property
    def is_over(self) -> bool:
        """Return whether no further turn comes."""


def decode_turns(
    engine: Engine,
    trees: tuple[Params, Params],
    source: TurnSource,
    plan: CachePlan,
    sampling: SamplingConfig,
    stops: Collection[int],
    *,
    whole: bool,
) -> None:
    """Decode the turns of a source until it is over.

    Args:
        engine: of the model.
        trees: its parameters.
        source: of the turns.
        plan: of the cache, with as many slots as decode at once.
        sampling: of every token, but for seeds and limits.
        stops: tokens that end a turn.
        whole: as of `Engine.open`.

    Raises:
        ValueError: as of `Engine.generate`.
    """
    kind = ProgramKind.of([Request((0,), sampling)], stops)
    batch, turns = engine.open(*trees, plan, kind, whole=whole), dict[scheduler.Sequence, Turn]()
    try:
        while True:
            for turn in source.released():
                if turn.sequence is not None:
                    batch.release(turn.sequence)
            request = None
            for turn in source.ready():
                request = _request(turn, sampling, request)
                sequence = turn.sequence = engine.answer(request, turn.answer)
                turns[sequence] = turn
                batch.add([sequence], stops)
            if batch.is_busy:
                if batch.free_slots > 0 and not source.is_over and (seconds := batch.spare()):
                    source.wait(seconds)
                    continue
                for sequence, _, finish in batch.advance():
                    if finish:
                        source.take(turns.pop(sequence), completion_of(sequence, finish))
            elif source.is_over:
                return
            else:
                source.wait()
    finally:
        batch.close()


def _request(turn: Turn, sampling: SamplingConfig, last: Request | None) -> Request:
    """Return a turn's request: the last one, where it has the same prompt, so that its pages are shared."""
    after = turn.after.sequence if turn.after is not None else None
    settings = replace(sampling, seed=turn.seed, max_tokens=turn.most)
    request = Request(turn.prompt, settings, turn.index, images=turn.images, holds=turn.holds, after=after)
    return last if last is not None and after is None and last.prompt is turn.prompt and last == request else request
