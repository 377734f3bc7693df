"""Token generation with a paged key/value cache: one answer streamed, or many prompts batched.

Rows of prompts are padded to bucketed lengths, and a page table decouples programs from lengths, so few are compiled:
one prefill and one decode step per layer type, at any depth, and for batches one of several steps.
"""

from collections.abc import Callable, Collection, Iterator, Sequence

import jax
import jax.numpy as jnp

from jaxglue.generation.batch import Batch, Request, Sequenced
from jaxglue.generation.cache import CachePlan, make_caches, plan_cache
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.programs import Programs, Trees
from jaxglue.models.config import DecoderConfig
from jaxglue.models.parameters import ModelGraphDefs, Params

STEPS = 16
"""Tokens that a batch decodes between two looks at the answers that ended."""
_MANY_STEPS = 1024
"""Decode steps from which one program for all layers, whose compile time grows with depth, is worth compiling."""


class Generator:
    """Token generator for a model split by `split_model`.

    Args:
        graphdefs: the modules.
        config: the model's shape.
        dtype: the dtype of activations, matmuls and cache.
        attention: the attention backend for prompts.
    """

    def __init__(
        self, graphdefs: ModelGraphDefs, config: DecoderConfig, *, dtype=jnp.bfloat16, attention: str = "auto"
    ):
        self.config, self._dtype = config, dtype
        self._programs = Programs(graphdefs, config, dtype, attention)
        self.compilations = self._programs.compilations

    def stream(
        self,
        trainable: Params,
        frozen: Params,
        prompt: Sequence[int],
        sampling: SamplingConfig,
        stop: Collection[int] = (),
        *,
        index: int = 0,
    ) -> Iterator[int]:
        """Yield new tokens up to a stop token (excluded), `max_tokens` or the model's limit.

        Args:
            trainable, frozen: the parameters.
            prompt: tokens to continue.
            sampling: distribution and most tokens.
            stop: tokens that end the answer.
            index: see `Request`.

        Raises:
            ValueError: an empty prompt, one reaching the model's limit, or a token outside its vocabulary.
        """
        request = Request(prompt, sampling, index)
        batch = self._batch((trainable, frozen), [request], self.plan([request], 1), stop)
        for piece in batch.pieces(steps=1, whole=False):
            yield from piece.tokens

    def answers(
        self,
        trainable: Params,
        frozen: Params,
        requests: Sequence[Request],
        stop: Collection[int] = (),
        *,
        plan: CachePlan | None = None,
        until: Callable[[int, list[int]], bool] | None = None,
        whole: bool | None = None,
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield (number, new tokens) of every request as it ends; each is what `stream` yields for it.

        Args:
            trainable, frozen: the parameters.
            requests: numbered in order.
            stop: tokens that end an answer.
            plan: of the cache; by default `plan`'s.
            until: `until(number, tokens)` ends an answer, which may hold tokens after the decisive one.
            whole: compile all layers and several steps into one program; by default for many steps. Weights on
                several devices always run layer by layer.

        Raises:
            ValueError: as `stream`, before the first answer, or as `plan`.
        """
        trees, tokens = (trainable, frozen), [list[int]() for _ in requests]
        if not requests:
            return
        plan = plan or self.plan(requests)
        if whole is None:
            whole = sum(request.sampling.max_tokens for request in requests) >= _MANY_STEPS * plan.slots
        batch = self._batch(trees, requests, plan, stop)
        for number, new, ended in batch.pieces(steps=STEPS, whole=whole and _sharding(trees) is None):
            tokens[number] += new
            if not ended and until and until(number, tokens[number]):
                batch.end(number)
                ended = True
            if ended:
                yield number, tokens[number]

    def plan(self, requests: Sequence[Request], batch_size: int | None = None) -> CachePlan:
        """Plan the cache for requests, by default with as many at a time as free memory holds.

        Raises:
            ValueError: a prompt that `stream` refuses, or too little memory.
        """
        lengths = [self._end(request, number) for number, request in enumerate(requests, 1)]
        return plan_cache(lengths, self.config, self._dtype, batch_size=batch_size)

    def _batch(self, trees: Trees, requests: Sequence[Request], plan: CachePlan, stop: Collection[int]) -> Batch:
        numbered = [Sequenced(i, request, self._end(request, i + 1)) for i, request in enumerate(requests)]
        caches = make_caches(plan, self.config, self._dtype, _sharding(trees))
        return Batch(self._programs, trees, numbered, plan, caches, stop)

    def _end(self, request: Request, number: int) -> int:
        """Return the limit of prompt and answer together, after checking the prompt."""
        limit, vocabulary, count = self.config.max_position_embeddings, self.config.vocab_size, len(request.prompt)
        if not 0 < count < limit:
            raise ValueError(f"prompt {number} has {count:,} tokens: expected 1 to {limit - 1:,}, the model's limit")
        if (token := max(request.prompt)) >= vocabulary:
            raise ValueError(f"prompt {number} holds token id {token}, but the model's vocabulary has {vocabulary}")
        return min(count + request.sampling.max_tokens, limit)


def _sharding(trees: Trees) -> jax.sharding.Sharding | None:
    """Return the sharding of a value that all devices of the weights hold; None for a single device."""
    sharding = next((leaf.sharding for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array)), None)
    if not isinstance(sharding, jax.sharding.NamedSharding) or len(sharding.device_set) == 1:
        return None
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
