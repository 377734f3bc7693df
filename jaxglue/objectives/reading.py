"""The interface of objectives whose rows have parts that are read by themselves, and what is read of held-out ones."""

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import numpy as np
from jaxtyping import Array, Float, Int

from jaxglue.data.batch import Batch, Reads
from jaxglue.data.reads import ReadDataset, ReadTask
from jaxglue.objectives.objective import Objective, TargetValues
from jaxglue.settings.config import Excludes

READS_EXCLUDE = (
    *Objective.excludes,
    Excludes("sample_prompt", "it asks for text, and such models are trained to answer without"),
)


class PartOutputs(NamedTuple):
    """What a model gives for parts, in the order of units and of their parts."""

    units: Int[np.ndarray, "N"]
    """Each part's unit in the data set."""
    parts: Int[np.ndarray, "N"]
    """Its number in the unit."""
    outputs: Float[np.ndarray, "N *K"]
    values: dict[str, np.ndarray]
    """The parts' `Reads.values`."""


class PartValues(Protocol):
    """Values of a batch's parts under the model, computed through the head when an objective asks for them."""

    @property
    def reads(self) -> Float[Array, "B A D"]:
        """Return the float32 means of normed hidden states over the tokens of each part (`Batch.reads`)."""

    def read_logits(self, tokens: Int[Array, "B L"]) -> Float[Array, "B A L"]:
        """Return the logits of some tokens at each part's end."""

    def read_log_probs(self, tokens: Int[Array, "B"]) -> Float[Array, "B A"]:
        """Return the log-probability of a token at each part's end, among all tokens; 0 of unused slots."""

    @property
    def read_scores(self) -> Float[Array, "B A"]:
        """Return each part's score under a reward model."""


class ReadObjective(Objective):
    """Loss of parts that are read by themselves."""

    reads = True
    excludes = READS_EXCLUDE
    kind: ClassVar[str]
    """What the model is for, by which commands know it."""

    def __call__(self, values: TargetValues, batch: Batch) -> Float[Array, "*sums"]:
        """Return Σ loss over this device's rows, or [Σ loss, Σ of each of `sums`]."""
        assert batch.reads is not None
        return self.part_sums(cast(PartValues, values), batch.reads)

    def part_sums(self, values: PartValues, reads: Reads) -> Float[Array, "*sums"]:
        """Return the sums of `__call__`."""
        return self.sums_of(self.outputs(values, reads), reads)

    def sums_of(self, outputs: Float[Array, "B A *K"], reads: Reads) -> Float[Array, "*sums"]:
        """Return the sums of `__call__` from `outputs`, of objectives without two passes."""
        raise NotImplementedError

    def task(self, *, shared_prompt: bool, copies: bool = False) -> ReadTask:
        """Return the treatment of the rows."""
        raise NotImplementedError

    def why_constant(self, dataset: ReadDataset, units: Int[np.ndarray, "units"]) -> str:
        """Return why a step of these units has the same loss whatever the weights; empty where it has not."""
        return ""

    def outputs(self, values: PartValues, reads: Reads) -> Float[Array, "B A *K"]:
        """Return what a model gives for each part, such as the logits of its options."""
        raise NotImplementedError

    def measure(self, found: PartOutputs, dataset: ReadDataset) -> dict[str, float]:
        """Return further metrics of held-out parts by name; of objectives with two passes `loss`, too."""
        raise NotImplementedError

    def compare_orders(self, found: PartOutputs, permuted: PartOutputs) -> dict[str, float]:
        """Return what another order of options changes, of objectives that permute it."""
        raise NotImplementedError

    def fit(self, found: PartOutputs, dataset: ReadDataset) -> dict[str, Any]:
        """Return what is fitted on held-out parts, for the record of the result, in JSON's types."""
        return {}

    def record(self) -> dict[str, Any]:
        """Return the settings by which a result is read, in JSON's types."""
        return {}

    def abstract_values(self, batch: int, slots: int, hidden: int) -> dict[str, Any]:
        """Return shapes of `Reads.values` for plans, which are made before batches."""
        return {}


def part_outputs(batches: Iterable[tuple[Reads, Float[np.ndarray, "B A *K"]]]) -> PartOutputs:
    """Collect the parts of batches, of numpy arrays, in the order of units and their parts.

    A value of rows, which is no value of parts, is left out.
    """
    units, parts, outputs = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    values: dict[str, list[np.ndarray]] = {}
    for reads, found in batches:
        used = np.asarray(reads.units) >= 0
        units.append(np.asarray(reads.units)[used])
        parts.append(np.asarray(reads.parts)[used])
        outputs.append(np.asarray(found)[used])
        for name, value in reads.values.items():
            if np.shape(value)[:2] == used.shape:
                values.setdefault(name, []).append(np.asarray(value)[used])
    unit, part = np.concatenate(units), np.concatenate(parts)
    order = np.lexsort((part, unit))
    joined = {name: np.concatenate(each)[order] for name, each in values.items()}
    return PartOutputs(unit[order], part[order], np.concatenate(outputs)[order], joined)
