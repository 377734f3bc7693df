"""Classification of documents: cross-entropies of the scores at their last tokens, one for each label."""

import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.nn import log_softmax, softplus
from jaxtyping import Array, Float

from jaxglue.data.batch import Batch
from jaxglue.data.config import AnswerTask, Columns, LabelTask
from jaxglue.data.formats import LABELS
from jaxglue.objectives.config import ClassifySettings
from jaxglue.objectives.objective import Objective, TargetValues
from jaxglue.objectives.scores import SCORES_EXCLUDE

LABEL = "label"
"""Column of a document's only label."""
_MISSING = float("nan")


class Classification(Objective):
    """Losses of transformers' sequence classifiers: softmax of one label, or sigmoids of several."""

    Settings = ClassifySettings
    classifies = True
    trains_scores = True
    excludes = SCORES_EXCLUDE
    learning_rates = {"lora": 1e-4, "full": 1e-5}  # noqa: RUF012 - as of reward models

    @property
    def is_single(self) -> bool:
        """Tell whether each document has one label."""
        return self.config.problem_type == "single_label_classification"

    @property
    def columns_read(self) -> Columns:
        """Return the columns of labels, which every row must have."""
        names = [LABEL] if self.is_single else [f"{LABELS}.{i}" for i in range(self.labels)]
        return dict.fromkeys(names, _MISSING)

    def task(self, *, shared_prompt: bool, copies: bool = False) -> AnswerTask | LabelTask | None:
        """Return the values of a label."""
        return LabelTask(values=self.labels if self.is_single else 2)

    @property
    def labels(self) -> int:
        """Return the number of scores."""
        return self.config.num_labels

    @property
    def sums(self) -> tuple[str, ...]:
        """Return the name of the share of right labels."""
        return ("accuracy",)

    @property
    def title(self) -> str:
        """Return the number of labels."""
        return f"classification of a document's last token, {self.labels} labels"

    def __call__(self, values: TargetValues, batch: Batch) -> Float[Array, " sums"]:
        """Return [Σ loss, Σ accuracy] over the documents of this device's rows."""
        scores = values.class_scores
        losses, hits = self._single(scores, batch) if self.is_single else self._several(scores, batch)
        weights = batch.loss_weights
        return jnp.stack([jnp.sum(weights * each) for each in (losses, stop_gradient(hits))])

    def _single(self, scores: Float[Array, "B T C"], batch: Batch) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        label = batch.columns[LABEL].astype(jnp.int32)
        losses = -jnp.take_along_axis(log_softmax(scores), label[..., None], axis=-1)[..., 0]
        return losses, (jnp.argmax(scores, axis=-1) == label) * 1.0

    def _several(self, scores: Float[Array, "B T C"], batch: Batch) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        """Return means over the labels."""
        wanted = jnp.stack([batch.columns[f"{LABELS}.{i}"] for i in range(self.labels)], axis=-1)
        losses = softplus(scores) - scores * wanted
        return losses.mean(-1), ((scores > 0) == (wanted > 0.5)).mean(-1)
