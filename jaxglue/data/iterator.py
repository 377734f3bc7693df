"""Prefetching iterators of training and evaluation batches, with a checkpointable state."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from jaxtyping import Int

from jaxglue.data.batch import Batch, target_room
from jaxglue.data.dataset import TokenDataset, token_values
from jaxglue.data.mixing import plan_dataset_epoch
from jaxglue.data.packing import PackPlan, plan_packing
from jaxglue.ops.segments import batch_kind, segment_bucket
from jaxglue.vision.rows import Images, RowImages

if TYPE_CHECKING:
    import grain

See = Callable[[RowImages], Images]
"""Makes arrays of the images of rows on the host."""
Ahead = Callable[[RowImages], Images | RowImages]
"""Does so on a thread that reads ahead, where that is possible."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Data of one optimizer step."""

    micro_batches: tuple[Batch, ...]
    """This process's rows of every micro-batch."""
    tokens: int
    """Tokens in the rows of all processes, excluding padding."""
    targets: float
    """Target tokens in the rows of all processes, or another number by which the objective divides losses."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further values of the step to log, such as rewards."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Random access to an epoch's steps."""

    dataset: TokenDataset
    plan: PackPlan
    seq_len: int
    max_segments: int
    batch_size: int
    gradient_accumulation_steps: int
    process_index: int
    process_count: int
    ahead: Ahead | None = None
    """Applied to the images of rows; None leaves them to `See`."""
    with_sources: bool = False
    """Batches name the source of each token."""
    targets: int | None = None
    """Targets of rows, of which the head computes so many or a row's more; None for all tokens."""
    features: int = 0
    """Features of images for which rows have room at least (`RowImages.room`)."""

    def __len__(self) -> int:
        return len(self._first_rows) - 1

    @cached_property
    def _first_rows(self) -> Int[np.ndarray, "steps+1"]:
        return self.plan.step_rows(self.batch_size * self.gradient_accumulation_steps)

    def __getitem__(self, step: int) -> Step:
        self.dataset.store.check()
        first, end = self._first_rows[[step, step + 1]]
        count = -(-(end - first) // self.batch_size)
        # Empty rows complete the last micro-batch.
        rows = np.arange(first, first + count * self.batch_size)
        rows[rows >= end] = self.plan.rows
        micro_batches = rows.reshape(count, self.process_count, -1)
        documents = self.documents(step)
        batches = tuple(self._own_rows(rows, documents) for rows in micro_batches)
        self.dataset.store.release()
        return Step(
            micro_batches=batches,
            tokens=int(self.dataset.lengths[documents].sum()),
            targets=int(self.dataset.targets[documents].sum()),
        )

    def documents(self, step: int) -> Int[np.ndarray, "documents"]:
        """Return the documents of a step, over all processes."""
        rows = np.minimum(self._first_rows[[step, step + 1]], self.plan.rows)
        return self.plan.documents[slice(*self.plan.bounds[rows])]

    def _own_rows(self, rows: Int[np.ndarray, "processes B"], step: Int[np.ndarray, "documents"]) -> Batch:
        """Build this process's rows of a micro-batch; the rows of all processes decide on its kind."""
        own = rows[self.process_index]
        batch = self.dataset.build_batch(
            self.plan,
            own,
            step,
            seq_len=self.seq_len,
            max_segments=self.max_segments,
            kind=batch_kind([self.dataset.lengths[self.plan.row(row)] for row in rows.ravel()], self.max_segments),
        )
        if batch.images is not None:
            largest = self.dataset.most_features([self.plan.row(row) for row in rows.ravel()])
            images = replace(batch.images, largest=largest, room=self.features)
            batch = replace(batch, images=self.ahead(images) if self.ahead else images)
        if self.targets is not None and batch.answers is None and batch.reads is None:
            most = most_targets(self.dataset, [self.plan.row(row) for row in rows.ravel()])
            batch = replace(batch, room=target_room(max(most, self.targets), self.seq_len))
        if not self.with_sources or self.dataset.sources is None:
            return batch
        members = [self.plan.row(row) for row in own]
        owners = [np.repeat(self.dataset.sources[row], self.dataset.segments_of(row)) for row in members]
        sources: Any = token_values(np.asarray(batch.segments.segment_ids), owners).astype(np.int32)
        return replace(batch, sources=sources)


def most_targets(dataset: TokenDataset, rows: Iterable[Int[np.ndarray, "documents"]]) -> int:
    """Return the targets of the row of documents that has most of them."""
    return max((int(dataset.targets[row].sum()) for row in rows), default=0)


def seen(step: Step, see: See) -> Step:
    """Return a step whose images are arrays."""
    return replace(step, micro_batches=tuple(seen_batch(batch, see) for batch in step.micro_batches))


def seen_batch(batch: Batch, see: See) -> Batch:
    """Return a batch whose images are arrays."""
    return replace(batch, images=see(batch.images)) if isinstance(batch.images, RowImages) else batch


class BatchState(TypedDict):
    """Position of the next step, and the settings that the order of data depends on, as JSON."""

    epoch: int
    steps: dict[str, Any]
    """Grain's position in the epoch."""
    run: dict[str, Any]


class StepSizes(TypedDict):
    """Sizes of an optimizer step."""

    batch_size: int
    """Rows of a micro-batch over all processes."""
    gradient_accumulation_steps: int


class ProcessShare(TypedDict):
    """The part of each batch's rows that a process makes."""

    process_index: int
    process_count: int


class BatchIterator(Iterator[Step]):
    """Iterator over optimizer steps that visits every document once per epoch, or as often as its source's weight says.

    Each epoch is shuffled and packed as a function of `seed` and epoch. Empty rows complete an epoch's last step. All
    batches have the same shapes.

    Args:
        dataset: the documents; none longer than `seq_len`.
        seq_len: T.
        batch_size: B, rows in a micro-batch over all processes.
        gradient_accumulation_steps: micro-batches in a step.
        seed: of shuffling.
        epochs: number of epochs, the last of which may be a part of one: its first steps; None for endless.
        documents_per_step: documents in a step, in as many micro-batches as their rows take; None for steps of
            `gradient_accumulation_steps` micro-batches of full rows.
        max_segments: maximum documents per row, rounded up to a power of two; by default the first epoch's maximum.
        process_index, process_count: select this process's `B / process_count` rows of every micro-batch; batches and
            state do not depend on the number of processes.

    Raises:
        ValueError: a size below 1, or a batch size not divisible by the processes.
    """

    _ahead: "grain.DatasetIterator | None"
    _following: "grain.DatasetIterator | None" = None
    """Reads the next epoch, from the last step of this one on."""
    _coming: Step | None = None
    """Next step of the epoch, whose images are begun with."""

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        seq_len: int,
        batch_size: int,
        gradient_accumulation_steps: int = 1,
        seed: int = 0,
        epochs: float | None = None,
        documents_per_step: int | None = None,
        max_segments: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
    ):
        if documents_per_step is not None:
            _check_sizes(documents_per_step=documents_per_step)
        if epochs is not None and epochs <= 0:
            raise ValueError(f"epochs={epochs}: expected above 0")
        self._documents_per_step = documents_per_step
        self._dataset, self._seq_len, self._seed, self._epochs = dataset, seq_len, seed, epochs
        self._sizes = StepSizes(batch_size=batch_size, gradient_accumulation_steps=gradient_accumulation_steps)
        check_batch(process_count=process_count, **self._sizes)
        self._share = ProcessShare(process_index=process_index, process_count=process_count)
        first = self._plan(0, segment_bucket(max_segments) if max_segments else None)
        self.max_segments = segment_bucket(max_segments or first.max_segments)
        """Segment slots S of every batch."""
        rows = [first.row(row) for row in range(first.rows)]
        self._targets, self._features = most_targets(dataset, rows), dataset.most_features(rows)
        self.steps_per_epoch = self._count_steps(first)
        """Optimizer steps in the first epoch; other epochs may differ by a few."""
        self.see: See = RowImages.with_patches
        """Applied to the images of a step when it is taken, which `ahead` left as they were."""
        self.ahead: Ahead = RowImages.with_patches
        """Applied to the images of steps while they are read ahead."""
        self.begin: Callable[[RowImages], None] | None = None
        """Called with the images of the step behind the one that is taken, which `ahead` left as they were."""
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="packing")
        self._start(0, first)

    @property
    def epoch(self) -> int:
        """Return the next step's epoch, from 0; right after an epoch's last step, the finished epoch."""
        return self._epoch

    @cached_property
    def total_steps(self) -> int | None:
        """Count the optimizer steps of all epochs; None if endless."""
        if self._epochs is None:
            return None
        epochs = range(1, math.ceil(self._epochs))
        later = (self._part(epoch, self._count_steps(self._plan(epoch, self.max_segments))) for epoch in epochs)
        return self._part(0, self.steps_per_epoch) + sum(later)

    def _part(self, epoch: int, steps: int) -> int:
        """Return how many of an epoch's steps are taken: all, but of a last part of one."""
        return steps if self._epochs is None else math.ceil(min(self._epochs - epoch, 1) * steps)

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Step:
        step = seen(self._take(), self.see)
        if self.begin is not None and self._taken < self._last:
            self._coming = self._take()
            for batch in self._coming.micro_batches:
                if isinstance(batch.images, RowImages):
                    self.begin(batch.images)
        return step

    def _take(self) -> Step:
        """Return the next step as it was read ahead."""
        if self._coming is not None:
            step, self._coming = self._coming, None
            return step
        while True:
            if self._next_plan is None and self._taken == self._last:
                raise StopIteration
            try:
                step = next(self._steps)
            except StopIteration:
                if self._next_plan is None:
                    raise
                following, self._following = self._following, None
                self._stop_reading()
                self._start(self._epoch + 1, self._next_plan.result())
                self._ahead = following
                continue
            self._taken += 1
            if self._taken == len(self._epoch_steps) and self._next_plan is not None:
                self._following = read_ahead(self._steps_of(self._next_plan.result()))
                self._following.start_prefetch()
            return step

    @property
    def _steps(self) -> "grain.DatasetIterator":
        """Return the epoch's prefetching iterator, which begins with the first use: a plan needs none."""
        self._ahead = self._ahead or read_ahead(self._epoch_steps)
        return self._ahead

    def _stop_reading(self) -> None:
        self._coming = None
        for reading in (self._ahead, self._following):
            if reading is not None:
                reading.close()
        self._following = None

    @property
    def first(self) -> Step:
        """Return the first step of the epoch."""
        return seen(self._epoch_steps[0], self.see)

    @property
    def dataset(self) -> TokenDataset:
        """Return the documents."""
        return self._dataset

    def documents(self) -> Iterator[Int[np.ndarray, "documents"]]:
        """Yield the documents of each step of the epoch, over all processes."""
        return map(self._epoch_steps.documents, range(len(self._epoch_steps)))

    def replace_dataset(self, dataset: TokenDataset) -> None:
        """Continue with the same documents, of which more is known."""
        state, self._dataset = self.get_state(), dataset
        self.set_state(state)

    def get_state(self) -> BatchState:
        """Return a JSON-able state."""
        steps = self._steps.get_state()
        if self._coming is not None:
            steps = {**steps, "next_index": steps["next_index"] - 1}
        return {"epoch": self._epoch, "steps": steps, "run": self._run()}

    def set_state(self, state: BatchState) -> None:
        """Continue from a state of `get_state`.

        Raises:
            ValueError: data, seed or sizes differ from the state's, by name.
        """
        check_run(state["run"], self._run())
        self._stop_reading()
        self._start(state["epoch"], self._plan(state["epoch"], self.max_segments))
        self._steps.set_state(state["steps"])
        self._taken = state["steps"]["next_index"]

    def close(self) -> None:
        """Stop prefetching."""
        self._stop_reading()
        self._planner.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> dict[str, Any]:
        fixed = {"data": self._dataset.fingerprint, "seed": self._seed, "seq_len": self._seq_len}
        if self._documents_per_step is not None:
            fixed["documents_per_step"] = self._documents_per_step
        return {**fixed, **self._sizes, "max_segments": self.max_segments}

    def _plan(self, epoch: int, max_segments: int | None) -> PackPlan:
        return plan_dataset_epoch(
            self._dataset,
            seq_len=self._seq_len,
            seed=self._seed,
            epoch=epoch,
            max_segments=max_segments,
            documents_per_step=self._documents_per_step,
        )

    def _count_steps(self, plan: PackPlan) -> int:
        return len(plan.step_rows(self._sizes["batch_size"] * self._sizes["gradient_accumulation_steps"])) - 1

    def _steps_of(self, plan: PackPlan) -> Steps:
        return Steps(
            dataset=self._dataset,
            plan=plan,
            seq_len=self._seq_len,
            max_segments=self.max_segments,
            ahead=lambda rows: self.ahead(rows),  # which may be set after this
            targets=self._targets,
            features=self._features,
            **self._sizes,
            **self._share,
        )

    def _start(self, epoch: int, plan: PackPlan) -> None:
        """Begin an epoch and plan the next in the background."""
        self._epoch, self._taken = epoch, 0
        self._epoch_steps = self._steps_of(plan)
        self._last = self._part(epoch, len(self._epoch_steps))
        self._ahead = None
        self._next_plan: Future[PackPlan] | None = None
        if self._epochs is None or epoch + 1 < self._epochs:
            self._next_plan = self._planner.submit(self._plan, epoch + 1, self.max_segments)


class EvalBatches:
    """Held-out documents packed in order; each `iter()` is one pass, with the last batch padded."""

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        seq_len: int,
        batch_size: int,
        max_segments: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
    ):
        _check_sizes(batch_size=batch_size)
        plan = plan_packing(dataset.lengths, seq_len=seq_len, max_segments=max_segments)
        slots = segment_bucket(max_segments or plan.max_segments)
        features = dataset.most_features([plan.row(row) for row in range(plan.rows)])
        self._steps = Steps(
            dataset=dataset,
            plan=plan,
            seq_len=seq_len,
            max_segments=slots,
            batch_size=batch_size,
            gradient_accumulation_steps=1,
            process_index=process_index,
            process_count=process_count,
            with_sources=True,
            features=features,
        )
        self.see: See = RowImages.with_patches
        """See `BatchIterator.see`."""
        self.targets = int(dataset.targets.sum())
        """Target tokens over all batches and processes."""

    @property
    def dataset(self) -> TokenDataset:
        """Return the documents."""
        return self._steps.dataset

    def replace_dataset(self, dataset: TokenDataset) -> None:
        """Continue with the same documents, of which more is known."""
        self._steps = replace(self._steps, dataset=dataset)

    def on(self, dataset: TokenDataset) -> "EvalBatches":
        """Return the batches of the same documents, of which a data set tells otherwise."""
        other = copy(self)
        other.replace_dataset(dataset)
        return other

    def documents(self) -> Iterator[list[Int[np.ndarray, "documents"]]]:
        """Yield the documents of each batch's rows, over all processes."""
        plan, size = self._steps.plan, self._steps.batch_size
        return ([plan.row(row) for row in range(first, first + size)] for first in range(0, plan.rows, size))

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Batch]:
        return (seen(step, self.see).micro_batches[0] for step in read_ahead(self._steps))


def read_ahead(steps: Steps) -> "grain.DatasetIterator":
    """Return a prefetching iterator over the steps, with a JSON-able state."""
    import grain  # which imports orbax, for a plan in vain

    ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    return iter(grain.MapDataset.source(steps).to_iter_dataset(ahead))


def check_run(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse a state of other data or settings, by name."""
    differing = [f"{key}: {saved.get(key)!r} then, {now[key]!r} now" for key in now if saved.get(key) != now[key]]
    if differing:
        raise ValueError(f"cannot resume, the data order would differ: {'; '.join(differing)}")


def check_batch(*, batch_size: int, gradient_accumulation_steps: int, process_count: int) -> None:
    """Refuse sizes below 1, and a batch size not divisible by the processes."""
    _check_sizes(
        batch_size=batch_size, gradient_accumulation_steps=gradient_accumulation_steps, process_count=process_count
    )
    if batch_size % process_count:
        raise ValueError(f"batch_size={batch_size} does not divide among {process_count} processes")


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value}: expected at least 1")
