"""Evaluation between steps: loss on held-out data, and load of experts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from jaxglue.data.batch import Batch
from jaxglue.data.iterator import EvalBatches
from jaxglue.engine.executor import Executor
from jaxglue.models.parameters import Params
from jaxglue.sharding.mesh import place_batch
from jaxglue.training.expert_load import ExpertLoadProbe
from jaxglue.training.progress import SHOWN
from jaxglue.training.setup import Setup

_LARGEST_EXPONENT = 700.0
"""Of a float64, whose exponential is finite."""


class Evaluation:
    """Evaluates a model during training.

    Args:
        setup: the run, perhaps with held-out batches.
        executor: runs the model.
        probe: reads its routers.
        mesh: devices that share the work; None for one device.
    """

    def __init__(self, setup: Setup, executor: Executor, probe: ExpertLoadProbe, mesh: Mesh | None):
        self._batches, self._executor, self._mesh = setup.eval_batches, executor, mesh
        self._sources = setup.data.eval_sources
        self._objective = setup.workload.objective
        self._probe = None if setup.model.moe is None else probe
        self.best: tuple[float, int] | None = None
        """The lowest loss on held-out data, and its step."""
        self.since_best = 0
        """Evaluations since then."""
        self._patience = setup.config.run.early_stopping

    @property
    def is_needed(self) -> bool:
        """Return whether the run has held-out data or routers."""
        return self._batches is not None or self._probe is not None

    @property
    def is_stale(self) -> bool:
        """Return whether `--early-stopping` ends the run."""
        return self._patience is not None and self.since_best >= self._patience

    @property
    def why_stale(self) -> str:
        """Return the reason of an early end, for the user."""
        loss, step = self.best or (math.nan, 0)
        count = f"{self.since_best} evaluations" if self.since_best > 1 else "1 evaluation"
        return f"stopped early: no eval loss below {loss:.4f}, of step {step:,}, in {count}"

    def read(self, step: int, trainable: Params, frozen: Params, last_batch: Batch | None) -> dict[str, float]:
        """Return `eval_loss`, the mean per held-out target token, with further metrics, and expert load.

        Args:
            step: optimizer steps done.
            trainable, frozen: parameter trees of `split_model`.
            last_batch: batch for the routers where nothing is held out.
        """
        values = {} if self._batches is None else self._held_out(self._batches, trainable, frozen)
        if "eval_loss" in values:
            self._count(values["eval_loss"], step)
        if self._probe is not None:
            batch = last_batch if self._batches is None else next(iter(self._batches))
            values |= self._probe.read(trainable, frozen, place_batch(batch, self._mesh))
        return values

    def _held_out(self, batches: EvalBatches, trainable: Params, frozen: Params) -> dict[str, float]:
        placed = (place_batch(batch, self._mesh) for batch in batches)
        if self._objective is not None:
            losses = [self._executor.loss(trainable, frozen, batch) for batch in placed]
            means: Any = np.sum(jax.device_get(losses), 0) / batches.targets
            metrics = {f"eval_{name}": float(value) for name, value in self._objective.metrics(means).items()}
            return {"eval_loss": float(np.ravel(means)[0])} | metrics
        count = len(self._sources)
        found = [self._executor.evaluate(trainable, frozen, batch, count) for batch in placed]
        sums = np.sum(jax.device_get(found), 0, dtype=np.float64)
        loss = float(sums[0].sum() / batches.targets)
        return {"eval_loss": loss} | held_out_metrics(loss, sums, self._sources)

    def _count(self, loss: float, step: int) -> None:
        self.since_best += 1
        if math.isfinite(loss) and (self.best is None or loss < self.best[0]):
            self.best, self.since_best = (loss, step), 0

    def get_state(self) -> dict[str, Any]:
        """Return the best loss, and the evaluations since, as JSON."""
        return {"best_eval": self.best, "since_best": self.since_best}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from `get_state`."""
        self.best, self.since_best = state["best_eval"] and tuple(state["best_eval"]), state.get("since_best", 0)


def held_out_metrics(loss: float, sums: Float[np.ndarray, "3 sources"], names: Sequence[str]) -> dict[str, float]:
    """Return perplexity, accuracy and, of several sources, each one's loss.

    Args:
        loss: mean over all target tokens, nats.
        sums: Σ weight · loss, Σ weight · hit and Σ weight of each source.
        names: of the sources.
    """
    losses, hits, weights = sums
    values = {"eval_perplexity": math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf}
    values["eval_token_accuracy"] = float(hits.sum() / weights.sum())
    if len(names) > 1:
        means = zip(names, losses, weights, strict=True)
        values |= {f"eval_loss/{name}": float(total / weight) for name, total, weight in means if weight}
    return values


def evaluation_lines(values: Mapping[str, float]) -> Iterator[str]:
    """Yield the console's lines of an evaluation: all sources together, then each."""
    shown = [f"eval loss {values['eval_loss']:.4f}"]
    if "eval_token_accuracy" in values:
        perplexity, accuracy = values["eval_perplexity"], values["eval_token_accuracy"]
        shown.append(f"perplexity {perplexity:.4g}, token accuracy {accuracy:.1%}")
    shown += [f"{name} {values[f'eval_{key}']:.3g}" for key, name in SHOWN.items() if f"eval_{key}" in values]
    yield ", ".join(shown)
    for name, loss in values.items():
        if name.startswith("eval_loss/"):
            yield f"  {name.removeprefix('eval_loss/')}: {loss:.4f}"
