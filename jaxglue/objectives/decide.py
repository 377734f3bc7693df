"""Decisions: probabilities of typed questions' options, read from label tokens where their answers begin."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient
from jax.nn import log_softmax, logsumexp
from jaxtyping import Array, Bool, Float, Int
from transformers import PreTrainedTokenizerBase

from jaxglue.data.batch import Reads
from jaxglue.data.decide_rows import DecisionEncoder
from jaxglue.data.questions import CHOICE, MOST_LEVELS, SCORE, TYPES, YES_NO, Labels
from jaxglue.data.reads import ReadDataset, ReadTask, Slots
from jaxglue.objectives import calibration
from jaxglue.objectives.objective import ObjectiveConfig
from jaxglue.objectives.reading import READS_EXCLUDE, PartOutputs, PartValues, ReadObjective
from jaxglue.objectives.reading_config import DecideHeadSettings, DecideSettings
from jaxglue.objectives.scores import SCORES_EXCLUDE
from jaxglue.ops.segments import segment_bucket

_NO = -1e30
"""Logit of options that a question does not have; finite, so that gradients are."""
_SCORE = TYPES.index("score")
_HEAD_OPTIONS = 64
"""Options of a choice for which a head has rows."""
_USUAL_OPTIONS = 16
"""Options of questions up to which batches of few shapes are alike."""
_VERSION = 3
"""Increment when questions or gold read otherwise, to tokenize anew."""


@dataclass(frozen=True, kw_only=True)
class DecideTask(ReadTask):
    """Questions about a state, read where their answers begin."""

    rows: int | None = None
    """Options of choices for which a head has rows; None reads tokens."""

    def encoder(self, tokenizer: PreTrainedTokenizerBase, system: str) -> DecisionEncoder:
        """Return the tokenizer of states and questions."""
        return DecisionEncoder(tokenizer, system=system, rows=self.rows)

    @property
    def encoding(self) -> str:
        """Return the version of questions' texts."""
        return f"decisions {_VERSION} {self.rows}"

    def labels(self, tokenizer: PreTrainedTokenizerBase, system: str) -> Labels:
        """Return the tokens that answer questions."""
        return self.encoder(tokenizer, system).labels

    def values(self, dataset: ReadDataset, parts: Slots) -> dict[str, np.ndarray]:
        """Return label tokens, the option that each stands for, gold probabilities, and types."""
        assert dataset.labels is not None
        table, labels, most = dataset.table, dataset.labels, dataset.most_options
        least = _USUAL_OPTIONS if dataset.slot_tokens else 1
        width, options = labels.width(most), segment_bucket(max(most, least))
        owners = np.full((*parts.parts.shape, width), -1, np.int32)
        gold, kinds = np.zeros((*parts.parts.shape, options), np.float32), np.zeros(parts.parts.shape, np.int32)
        for at in zip(*np.nonzero(parts.parts >= 0), strict=True):
            part = int(parts.parts[at])
            count, kinds[at] = int(table.options[part]), table.kinds[part]
            owners[at] = labels.owners(TYPES[kinds[at]], count, width)
            order = parts.orders.get(part)
            gold[at][:count] = table.gold_of(part) if order is None else table.gold_of(part)[order]
        tokens = np.tile(np.array(labels.tokens[:width], np.int32), (len(owners), 1))
        found = {"tokens": tokens, "owners": owners, "gold": gold, "kinds": kinds}
        if dataset.permuted:
            found["order"] = np.tile(np.arange(options, dtype=np.int32), (*parts.parts.shape, 1))
            for at in zip(*np.nonzero(parts.parts >= 0), strict=True):
                if (order := parts.orders.get(int(parts.parts[at]))) is not None:
                    found["order"][at][: len(order)] = order
        return found


def option_logits(logits: Float[Array, "B A L"], owners: Int[Array, "B A L"], options: int) -> Float[Array, "B A C"]:
    """Return the logits of options, which label tokens share; those of no option are very small."""
    is_own = owners[:, :, None] == jnp.arange(options, dtype=jnp.int32)[:, None]
    found = logsumexp(jnp.where(is_own, logits[:, :, None], _NO), axis=-1)
    return jnp.where(is_own.any(-1), found, _NO)


class Decisions(ReadObjective):
    """Cross-entropies of gold probabilities of options, with proper scores beside them; a mean over questions."""

    Settings: ClassVar[type[ObjectiveConfig]] = DecideSettings
    kind = "decide"
    learning_rates = {"lora": 1e-4, "full": 1e-5}  # noqa: RUF012 - with adapters the public trainers'

    def task(self, *, shared_prompt: bool, copies: bool = False) -> DecideTask:
        """Return the treatment of rows of questions."""
        return DecideTask(shared_prompt=shared_prompt, copies=copies, permutes_options=self.config.permute_options)

    @property
    def sums(self) -> tuple[str, ...]:
        """Return the names of the metrics."""
        return ("accuracy", "brier")

    @property
    def title(self) -> str:
        """Return the objective's name with what is beside the cross-entropy."""
        weights = ("label_smoothing", "brier_weight", "rps_weight", "ordinal_weight", "vocabulary_weight")
        beside = [f"{name.replace('_', ' ')} {value:g}" for name in weights if (value := getattr(self.config, name, 0))]
        order = ["options permuted"] if self.config.permute_options else []
        return ", ".join(["decisions from label tokens", *beside, *order])

    def part_sums(self, values: PartValues, reads: Reads) -> Float[Array, " sums"]:
        """Return the sums of `__call__`; the whole vocabulary is read only where it has a weight."""
        return self.sums_of(self._read(values, reads, has_mass=self.config.vocabulary_weight > 0), reads)

    def sums_of(self, outputs: Float[Array, "B A K"], reads: Reads) -> Float[Array, " sums"]:
        """Return [Σ loss, Σ accuracy, Σ Brier score] over questions."""
        gold = reads.values["gold"]
        log_p = log_softmax(outputs[..., : gold.shape[-1]])
        p = jnp.exp(log_p)
        brier = ((p - gold) ** 2).sum(-1)
        chosen = jnp.argmax(log_p, axis=-1, keepdims=True)
        right = jnp.take_along_axis(gold, chosen, axis=-1)[..., 0] >= gold.max(-1) - 1e-6
        losses = self._losses(log_p, p, gold, brier, reads)
        if weight := getattr(self.config, "vocabulary_weight", 0.0):
            losses -= weight * outputs[..., -1]
        return jnp.stack([jnp.sum(reads.used * each) for each in (losses, *map(stop_gradient, (right * 1.0, brier)))])

    def outputs(self, values: PartValues, reads: Reads) -> Float[Array, "B A C+1"]:
        """Return the logits of each question's options, and the log of these labels' share of all probability."""
        return self._read(values, reads, has_mass=True)

    def _read(self, values: PartValues, reads: Reads, *, has_mass: bool) -> Float[Array, "B A K"]:
        tokens = reads.values["tokens"]
        logits = values.read_logits(tokens)
        found = option_logits(logits, reads.values["owners"], reads.values["gold"].shape[-1])
        if not has_mass:
            return found
        every = logits[..., 0] - values.read_log_probs(tokens[:, 0])
        mass = jnp.where(reads.used > 0, logsumexp(found, axis=-1) - every, 0)
        return jnp.concatenate([found, mass[..., None]], axis=-1)

    def _losses(
        self,
        log_p: Float[Array, "B A C"],
        p: Float[Array, "B A C"],
        gold: Float[Array, "B A C"],
        brier: Float[Array, "B A"],
        reads: Reads,
    ) -> Float[Array, "B A"]:
        settings, has = self.config, _has_option(reads)
        count = jnp.maximum(has.sum(-1, keepdims=True), 1)
        target = gold
        if smoothing := settings.label_smoothing:
            target = (1 - smoothing) * gold + smoothing * has / count
        losses = -jnp.where(target > 0, target * log_p, 0).sum(-1)
        if settings.brier_weight:
            losses += settings.brier_weight * brier
        is_score = reads.values["kinds"] == _SCORE
        if settings.rps_weight:
            differences = jnp.where(has, jnp.cumsum(p, -1) - jnp.cumsum(gold, -1), 0)
            losses += settings.rps_weight * jnp.where(is_score, (differences**2).sum(-1), 0)
        if settings.ordinal_weight:
            levels = jnp.arange(p.shape[-1])
            distance = jnp.abs(levels[:, None] - levels) / jnp.maximum(count - 1, 1)[..., None]
            expected = jnp.einsum("bai,baj,baij->ba", p, gold, distance, precision=jax.lax.Precision.HIGHEST)
            losses += settings.ordinal_weight * jnp.where(is_score, expected, 0)
        return losses

    def measure(self, found: PartOutputs, dataset: ReadDataset) -> dict[str, float]:
        """Return measures of probabilities, of each type too, and by temperatures of the other half."""
        logits, gold, kinds = gold_outputs(found)
        log_p = calibration.log_softmax(logits)
        values = calibration.measures(log_p, gold)
        values["label_mass"] = float(label_masses(found).mean())
        for kind, name in enumerate(TYPES):
            if (own := kinds == kind).any() and not own.all():
                values |= {f"{key}/{name}": value for key, value in calibration.measures(log_p[own], gold[own]).items()}
        if len(np.unique(found.units)) > 1:
            scaled = calibration.cross_fitted(logits, gold, kinds, found.units, len(TYPES))
            calibrated = calibration.measures(scaled, gold)
            values |= {f"{key}/calibrated": calibrated[key] for key in ("nll", "brier", "ece")}
        return values

    def compare_orders(self, found: PartOutputs, permuted: PartOutputs) -> dict[str, float]:
        """Return how much the probabilities of choices differ where their options come in another order.

        flips is the share of choices whose likeliest option is another; distance the mean of Σ |p − p'| / 2.
        """
        logits, _, kinds = gold_outputs(found)
        order, choices = permuted.values["order"], kinds == TYPES.index("choice")
        if not choices.any():
            return {}
        other, _, _ = gold_outputs(permuted)
        p, shown = np.exp(calibration.log_softmax(logits)), np.exp(calibration.log_softmax(other))
        q = np.zeros_like(p)
        np.put_along_axis(q, order, shown, -1)
        p, q = p[choices], q[choices]
        flips = (p.argmax(-1) != q.argmax(-1)).mean()
        return {"order/flips": float(flips), "order/distance": float(np.abs(p - q).sum(-1).mean() / 2)}

    def fit(self, found: PartOutputs, dataset: ReadDataset) -> dict[str, Any]:
        """Return a temperature for each type of question, and the held-out measures at them and without."""
        logits, gold, kinds = gold_outputs(found)
        temperatures = calibration.fit_by_kind(logits, gold, kinds, len(TYPES))
        log_p = calibration.log_softmax(logits)
        return {
            "temperatures": dict(zip(TYPES, temperatures.tolist(), strict=True)),
            "held_out": {"questions": len(logits), **calibration.measures(log_p, gold)},
            "reliability": [list(each) for each in calibration.reliability(np.exp(log_p), gold)],
        }

    def abstract_values(self, batch: int, slots: int, hidden: int) -> dict[str, Any]:
        """Return the shapes of a batch's labels and gold, of two options."""
        integers = jax.ShapeDtypeStruct((batch, slots, 4), jnp.int32)
        return {
            "tokens": jax.ShapeDtypeStruct((batch, 4), jnp.int32),
            "owners": integers,
            "gold": jax.ShapeDtypeStruct((batch, slots, 2), jnp.float32),
            "kinds": jax.ShapeDtypeStruct((batch, slots), jnp.int32),
        }


class HeadDecisions(Decisions):
    """The same by a head with a row for each option in place of the output projection; it begins with labels' rows."""

    Settings = DecideHeadSettings
    trains_scores = True
    excludes = (*READS_EXCLUDE, *(each for each in SCORES_EXCLUDE if each not in READS_EXCLUDE))

    def task(self, *, shared_prompt: bool, copies: bool = False) -> DecideTask:
        """Return the treatment of rows of questions."""
        return replace(super().task(shared_prompt=shared_prompt, copies=copies), rows=_HEAD_OPTIONS)

    @property
    def labels(self) -> int:
        """Return the rows of the head: of yes and no, levels, and options."""
        return 2 + MOST_LEVELS + _HEAD_OPTIONS

    @property
    def title(self) -> str:
        """Return the objective's name with what is beside the cross-entropy."""
        return super().title.replace("from label tokens", "from a head of their own")

    def score_tokens(self, tokenizer: PreTrainedTokenizerBase, system: str) -> list[int]:
        """Return the token that answers by each row, of several the first."""
        encoder = self.task(shared_prompt=True).encoder(tokenizer, system)
        kinds = ((kind, len(encoder.labels.groups[kind])) for kind in (YES_NO, SCORE, CHOICE))
        found = [group[0] for kind, count in kinds for group in encoder.tokens.groups[kind][:count]]
        return found + found[-1:] * (self.labels - len(found))

    def record(self) -> dict[str, Any]:
        """Return that a head answers."""
        return {"score": True}

    def part_sums(self, values: PartValues, reads: Reads) -> Float[Array, " sums"]:
        """Return the sums of `__call__`."""
        return self.sums_of(self._read(values, reads, has_mass=False), reads)

    def outputs(self, values: PartValues, reads: Reads) -> Float[Array, "B A C+1"]:
        """Return the logits of each question's options, and 0: all probability is theirs."""
        found = self._read(values, reads, has_mass=False)
        return jnp.concatenate([found, jnp.zeros_like(found[..., :1])], axis=-1)


def gold_outputs(found: PartOutputs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return logits [N, C], −∞ where a question has no option, gold [N, C] and types [N], in float64."""
    gold = found.values["gold"].astype(np.float64)
    logits = found.outputs[:, : gold.shape[-1]].astype(np.float64)
    return np.where(logits > _NO / 2, logits, -np.inf), gold, found.values["kinds"]


def label_masses(found: PartOutputs) -> np.ndarray:
    """Return the share of the whole vocabulary's probability that each question's labels have, [N]."""
    return np.exp(found.outputs[:, -1].astype(np.float64))


def _has_option(reads: Reads) -> Bool[Array, "B A C"]:
    """Tell which options each question has."""
    count = reads.values["owners"].max(-1, keepdims=True) + 1
    return jnp.arange(reads.values["gold"].shape[-1]) < count
