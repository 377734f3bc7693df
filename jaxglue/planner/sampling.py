"""Predicted time of sampling answers: prompts, and decode steps that read weights, experts, the cache and states."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxglue.planner import calibration as fitted
from jaxglue.planner.flops import matmul_parameters, routed_parameters
from jaxglue.planner.gpus import Gpu
from jaxglue.planner.workload import Workload, abstract_parts

_EXPERTS = "experts"
"""Part of the paths of experts' parameters."""


@dataclass(frozen=True, kw_only=True)
class DecodeCost:
    """What a decode step reads and multiplies."""

    weights: float
    """Bytes of all parameters but experts', and but an embedding that is no output projection."""
    experts: float
    """Bytes of all experts with their adapters."""
    chosen: float
    """Share of a layer's experts that a token chooses."""
    expert_rate: float
    """Share of the memory's rate at which experts in their format are read."""
    flops: float
    """Of a token's matmuls but experts'."""
    expert_flops: float
    """Of its experts'."""
    adapted: int
    """Layers whose experts have live adapters."""
    token_bytes: float
    """Of a token in the cache of all layers."""
    state_bytes: float
    """Bytes of an answer's states in recurrent layers; each step reads and writes them."""
    layers: int

    @classmethod
    def of(cls, workload: Workload, token_bytes: float, state_bytes: float) -> "DecodeCost":
        """Return the cost of a model with its live adapters; bytes are those of the cache, of a token and an answer."""
        graphdefs, *trees = abstract_parts(workload)
        moe, routed = workload.config.moe, 2.0 * routed_parameters(workload.config)
        adapters = trees[0].get("layers", {}) if workload.lora else {}
        sizes = {True: 0.0, False: 0.0}
        for tree in trees:
            read = tree if graphdefs.lm_head is None else {k: v for k, v in tree.items() if k != "embed_tokens"}
            for path, leaf in jax.tree_util.tree_leaves_with_path(read):
                sizes[_is_expert(path)] += leaf.size * leaf.dtype.itemsize
        return cls(
            weights=sizes[False],
            experts=sizes[True],
            chosen=1.0 if moe is None else moe.num_experts_per_tok / moe.num_experts,
            expert_rate=1.0 if moe is None else fitted.EXPERTS_READ[moe.quantize],
            flops=2.0 * matmul_parameters(workload.config) - routed,
            expert_flops=routed,
            adapted=sum(any(_is_expert(path) for path, _ in jax.tree_util.tree_leaves_with_path(a)) for a in adapters),
            token_bytes=token_bytes,
            state_bytes=state_bytes,
            layers=workload.config.num_hidden_layers,
        )

    def steps(self, gpu: Gpu, live: Float[np.ndarray, " steps"]) -> Float[np.ndarray, " steps"]:
        """Return the seconds of steps with so many live answers, without those of the cache and of states."""
        read = self.weights / (fitted.DECODE_READ * gpu.copy)
        multiplied = self.flops * live / (fitted.DECODE_MATMUL * gpu.matmul)
        touched = 1 - (1 - self.chosen) ** live
        experts = self.experts * touched / (self.expert_rate * gpu.copy)
        experts += self.expert_flops * live / (fitted.EXPERTS_MULTIPLY * gpu.matmul)
        experts += self.adapted * fitted.ADAPTED_EXPERTS * (live > fitted.FEW_ADAPTED)
        return np.maximum(read, multiplied) + experts

    def seconds(self, gpu: Gpu, lengths: Int[np.ndarray, " answers"], prompt: int, each: int, slots: int) -> float:
        """Return the seconds in which answers are sampled.

        Args:
            gpu: its rates.
            lengths: of the answers, in the order in which they begin.
            prompt: tokens of a prompt, which is read once for its answers.
            each: answers to a prompt.
            slots: answers at a time.
        """
        live = _live(lengths.tolist(), slots)
        cached = self.token_bytes * (lengths * (prompt + lengths / 2)).sum() + 2 * self.state_bytes * lengths.sum()
        prompts = (self.flops + self.expert_flops) * prompt * len(lengths) / each
        return float(self.steps(gpu, live).sum() + cached / (fitted.DECODE_READ * gpu.copy) + prompts / gpu.matmul)

    def exact_seconds(self, gpu: Gpu, lengths: Int[np.ndarray, " answers"], slots: int) -> float | None:
        """Return the seconds that exact sampling adds; None where they were not measured.

        They are measured on some GPUs, of dense models, and of so many answers at a time at most. Fewer answers
        are taken to add as much, and a layer as much as the measured one, as kernels do not begin faster for smaller
        ones, or more in proportion to its weights.
        """
        measured, live = fitted.EXACT.get(gpu.name, {}), _live(lengths.tolist(), slots)
        if self.experts or live.max() > max(measured, default=0):
            return None
        streams, seconds = zip(*sorted(measured.items()), strict=True)
        size = max(1.0, self.weights / self.layers / fitted.EXACT_LAYER)
        return float(self.layers * size * np.interp(live, streams, seconds).sum())


@dataclass(frozen=True, kw_only=True)
class AnswerTimes:
    """The answers of a step on a GPU, and what they take by the number that is sampled at a time."""

    gpu: Gpu
    cost: DecodeCost
    prompt: int
    """Tokens of a prompt."""
    lengths: Int[np.ndarray, " answers"]
    each: int
    """Answers to a prompt."""

    def seconds_with(self, slots: int) -> float:
        """Return the seconds of sampling so many answers at a time, with kernels that sum as fast as they can."""
        return self.cost.seconds(self.gpu, self.lengths, self.prompt, self.each, slots)

    def pays_moving(self, size: float, arrays: int, slots: int, more: int) -> bool:
        """Return whether more slots save more time than it takes to move arrays to the host for them, and back.

        Args:
            size: bytes of the arrays.
            arrays: their number.
            slots: answers at a time without their memory.
            more: answers at a time with it.
        """
        moving = 2 * (size / self.gpu.link + arrays * self.gpu.dispatch.copy)
        return more > slots and self.seconds_with(slots) - self.seconds_with(more) > moving


def _is_expert(path: tuple[Any, ...]) -> bool:
    """Return whether a parameter at this path is an expert's."""
    return f"'{_EXPERTS}'" in jax.tree_util.keystr(path)


def _live(lengths: Sequence[int], slots: int) -> Float[np.ndarray, " steps"]:
    """Return the number of answers that decode in each step, each as soon as a slot is free."""
    free, spans = [0] * slots, list[tuple[int, int]]()
    for length in lengths:
        begin = heapq.heappop(free)
        spans.append((begin, begin + length))
        heapq.heappush(free, begin + length)
    changes = np.zeros(max(end for _, end in spans) + 1)
    for begin, end in spans:
        changes[begin] += 1
        changes[end] -= 1
    return np.cumsum(changes)[:-1]
