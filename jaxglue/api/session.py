"""A model in training, step by step, for loops of one's own: on the executor, planner and optimizer of `train`."""

import logging
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxglue.api.documents import TokenDocument, check_documents, pack_documents, rows_of
from jaxglue.api.losses import DistillationLoss, FunctionLoss, Loss, token_losses
from jaxglue.data.config import NO_COLUMNS, Columns, DataConfig
from jaxglue.data.iterator import BatchIterator, Step, Steps
from jaxglue.data.memory import name_sources, with_named_tokenizer, write_rows
from jaxglue.data.packing import plan_packing
from jaxglue.data.prepare import PreparedData, prepare_data, read_vision
from jaxglue.files.json_file import read_json, write_json
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.engine import Completion, Engine
from jaxglue.generation.prompts import encode_messages, encode_prompt
from jaxglue.generation.scheduler import Request
from jaxglue.generation.scoring import PromptScorer, PromptScores
from jaxglue.generation.sight import make_rules
from jaxglue.hf.checkpoint import save_tensors
from jaxglue.hf.tensor_files import TensorFiles
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import Params
from jaxglue.objectives.objective import Objective
from jaxglue.ops.segments import segment_bucket
from jaxglue.parts import load_kinds
from jaxglue.settings.recipe import from_settings
from jaxglue.sharding.mesh import mesh_of
from jaxglue.training.config import TrainConfig
from jaxglue.training.memory import configured_jax, planned_memory
from jaxglue.training.optimizer_objects import named_optimizer
from jaxglue.training.result import export_result
from jaxglue.training.rollout_policy import Teacher
from jaxglue.training.setup import resolve_model
from jaxglue.training.step import check_fp8, loss_and_gradients, multiply_in_fp8, prepare_steps, update
from jaxglue.vision.processor import Processor
from jaxglue.vision.rows import PlacedImage, PromptImages, RowImages, read_prompt

_log = logging.getLogger(__name__)
_STATE = "session"
"""Folder beside a result's files that `load` reads."""
_STEPS = 1000
"""Steps for which a plan is chosen where none are given."""


Derive = Callable[[TokenDocument, Float[np.ndarray, " T"]], TokenDocument]
"""Returns a document with columns that follow from its targets' log-probabilities."""


class Answer(NamedTuple):
    """A sampled answer."""

    text: str
    tokens: Int[np.ndarray, " L"]
    """Tokens, with the one that ended it."""
    log_probs: Float[np.ndarray, " L"]
    """Log-probabilities of the tokens, at the temperature."""
    ended: bool
    """False for an answer that reached its longest length."""


class TokenLosses(NamedTuple):
    """Losses of documents of tokens."""

    losses: list[float]
    """Sum over the tokens of each."""
    log_probs: list[Float[np.ndarray, " T"]]
    """Log-probabilities of each one's targets."""
    gradients: Params | None
    """Gradients of the sum of all losses; None where they were not asked for."""


class Session:
    """A model in training whose steps the caller decides on.

    Gradients of `forward_backward` add up until `optim_step`. A function of the caller's as loss is compiled once for
    each function object, so define it outside of the loop.

    Args:
        recipe: file or shipped name; its data are not read.
        base: a session of the same model, whose weights the new adapters are on; they are then held once.
        settings: by the names of `jaxglue train`'s flags: `model`, `quantize`, `lora_r`, `learning_rate`, … The
            learning rate is constant, whatever a recipe says, unless `steps` is among them: it then follows the
            schedule over these.
        images: read images of rows and documents by the model's tower, which runs in each step.

    Raises:
        ValueError: a bad setting or model folder.
    """

    def __init__(
        self,
        *,
        recipe: str | Path | None = None,
        base: "Session | None" = None,
        images: bool = False,
        **settings: Any,
    ):
        if settings.keys() & {"data", "eval_data"}:
            raise ValueError("data: a session is given its rows step by step: pass them to forward_backward or batches")
        load_kinds(settings.get("parts", ()))
        with named_optimizer(with_named_tokenizer(settings)) as named:
            self._open(recipe, named, base, images=images)
        self.tokenizer = self._setup.tokenizer
        folder, limits = self._setup.base.folder, self._data.image_limits
        self.image_rules = make_rules(folder, self.tokenizer, files=None, **limits) if images else None
        """Rules of images; None of a session without."""
        self._engine: Engine | None = None
        self._scorer: PromptScorer | None = None
        self._gradients: Params | None = None
        self._slots = self._sampled = 0

    def _open(
        self, recipe: str | Path | None, settings: dict[str, Any], base: "Session | None", *, images: bool
    ) -> None:
        """Settle the settings, load the weights and make the optimizer."""
        unscheduled = {"schedule": "constant", "warmup_steps": 0, "steps": _STEPS} if "steps" not in settings else {}
        config = from_settings(TrainConfig, {**unscheduled, **settings, "data": ("rows of a session",)}, recipe)
        if unscheduled and config.optimizer.schedule != "constant":
            raise ValueError(f"schedule {config.optimizer.schedule}: it needs the number of steps: give steps, too")
        kind = config.objective.kind
        if kind.forks or kind.reads or kind.trains_scores:
            raise ValueError("objective: a session trains on texts and chats: pass a function as the loss of its steps")
        if config.optimizer.update_in_backward:
            raise ValueError("update_in_backward: gradients of a session add up before its steps: leave it out")
        with ExitStack() as stack:
            stack.enter_context(configured_jax(config.run.compilation_cache, config.model.memory_limit))
            config = replace(config, model=config.model.pinned)
            self._setup = resolve_model(config, images=images)
            self._data = config.data.within(self._setup.model.max_position_embeddings)
            buffers = stack.enter_context(planned_memory(self._setup))
            if base is not None and base.origin != self.origin:
                raise ValueError(f"base: a session of {base.origin}, this one is of {self.origin}")
            frozen = None if base is None else base.frozen
            self._parts, self._state = prepare_steps(self._setup, mesh_of(self._setup.mesh), buffers, frozen)
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxglue-session-")))
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the host's buffers and the temporary files."""
        self._stack.close()

    @property
    def frozen(self) -> Params:
        """Return the weights below the adapters."""
        return self._state.frozen

    @property
    def trained(self) -> Params:
        """Return the trained parameters, which a step replaces."""
        return self._state.trainable

    @property
    def origin(self) -> tuple[Any, ...]:
        """Return the settings that decide these weights."""
        base = self._setup.base
        drawn = base.seed if base.random else None
        return (
            base.folder,
            drawn,
            base.storage,
            base.expand_experts,
            self._setup.asked.weights,
            str(self._setup.dtype),
        )

    @property
    def architecture(self) -> str:
        """Return the model's type."""
        return self._setup.model.model_type

    @property
    def lora(self) -> LoraConfig | None:
        """Return the settings of the adapters in training; None where all weights train."""
        return self._setup.lora

    @property
    def stops(self) -> Collection[int]:
        """Return the tokens that end an answer."""
        return self._setup.stops

    @property
    def step(self) -> int:
        """Return the optimizer steps done."""
        return self._state.step

    def batches(self, data: Any, *, epochs: int | None = 1, columns: Columns = NO_COLUMNS) -> Iterator[Step]:
        """Yield the steps of packed rows that `train` makes of the data, with the session's batch size and seed.

        Args:
            data: as of `train`, names or rows in memory.
            epochs: passes over them; None for endless ones.
            columns: of numbers that a loss reads, each with the value of rows without it.

        Raises:
            ValueError: unusable data, naming file and line where possible.
        """
        config, rows = self._data, self._setup.rows
        names = name_sources(data, Path(config.cache_dir) / "rows")
        prepared = self._prepare(replace(config, data=names), columns)
        steps = BatchIterator(
            prepared.train,
            seq_len=rows.seq_len,
            epochs=epochs,
            seed=config.seed,
            documents_per_step=rows.documents,
            batch_size=rows.batch_size,
            gradient_accumulation_steps=rows.micro_batches,
        )
        try:
            yield from steps
        finally:
            steps.close()

    def forward_backward(
        self,
        rows: Step | Iterable[Mapping[str, Any]],
        loss: Loss | DistillationLoss | None = None,
        *,
        columns: Columns = NO_COLUMNS,
    ) -> float:
        """Add the gradients of the mean loss over the rows' target tokens; return that mean.

        Args:
            rows: dictionaries in any format of `train`, or a step of `batches`.
            loss: function of tokens, or the divergence from a teacher; None for cross-entropy.
            columns: of the rows that the loss reads, each with the value of rows without it.

        Raises:
            ValueError: unusable rows, by their number.
        """
        step = rows if isinstance(rows, Step) else self._pack(rows, columns)
        if note := check_fp8(self._parts, self._state, step.micro_batches[-1]):
            _log.info(note)
        objective: Objective | None = None
        if isinstance(loss, DistillationLoss):
            step, objective = loss.prepared(step, self._setup)
        elif loss is not None:
            objective = FunctionLoss(config=self._setup.objective.config, function=loss)
        return self._add_gradients(step, objective)

    def _add_gradients(self, step: Step, objective: Objective | None) -> float:
        """Add the gradients of a step by the session's objective or another; return the loss."""
        value, gradients = loss_and_gradients(self._parts, self._state, step, objective)
        self.add_gradients(gradients)
        return float(value)

    def add_gradients(self, gradients: Params) -> None:
        """Add gradients of the trained parameters to those of the next `optim_step`."""
        self._gradients = gradients if self._gradients is None else _add(self._gradients, gradients)

    def forward_backward_tokens(
        self, documents: Sequence[TokenDocument], loss: Loss, *, backward: bool = True, derive: Derive | None = None
    ) -> tuple[float, list[Float[np.ndarray, " T"]]]:
        """Add the gradients of a loss's sum over the documents' tokens; return the sum and `log_probs`.

        Arguments and errors are those of `token_losses`.
        """
        found = self.token_losses(documents, loss, backward=backward, derive=derive)
        if found.gradients is not None:
            self.add_gradients(found.gradients)
        return sum(found.losses), found.log_probs

    def token_losses(
        self,
        documents: Sequence[TokenDocument],
        loss: Loss,
        *,
        weights: Params | None = None,
        backward: bool = True,
        derive: Derive | None = None,
    ) -> TokenLosses:
        """Return a loss of documents' tokens, and the gradients of its sum; change nothing.

        Args:
            documents: at least one.
            loss: function of the targets' log-probabilities and of the documents' columns.
            weights: trained parameters in place of the session's; of other ranks, where documents say which they use.
            backward: compute gradients.
            derive: returns a document with columns that follow from its targets' log-probabilities, as constants.

        Raises:
            ValueError: no document, or one that is longer than a row or holds other than tokens and finite numbers.
        """
        state = self._state if weights is None else self._state._replace(trainable=weights)
        step, places = self._pack_documents(documents)
        found = np.concatenate([np.asarray(part) for part in self._log_probs_of(state.trainable, step)])
        log_probs = [found[row, first:last] for row, first, last in places]
        if derive is not None:
            step, places = self._pack_documents([*map(derive, documents, log_probs)])
        gradients = None
        if backward:
            objective = FunctionLoss(config=self._setup.objective.config, function=loss)
            _, gradients = loss_and_gradients(self._parts, state, step, objective)
        columns = [batch.columns for batch in step.micro_batches]
        whole: dict[str, Any] = {name: np.concatenate([each[name] for each in columns]) for name in columns[0]}
        losses = np.asarray(token_losses(loss, jnp.asarray(found), whole))
        return TokenLosses([float(losses[row, first:last].sum()) for row, first, last in places], log_probs, gradients)

    def _pack_documents(self, documents: Sequence[TokenDocument]) -> tuple[Step, list[tuple[int, int, int]]]:
        size = self._setup.model.vocab_size
        options: dict[str, Any] = {"slots": self._slots, "vocabulary": size, "rules": self.image_rules}
        step, places = pack_documents(documents, self._setup.rows, **options)
        self._slots = step.micro_batches[0].segments.slots
        return step, places

    def check_documents(self, documents: Sequence[TokenDocument]) -> None:
        """Raise the errors of `token_losses`."""
        check_documents(documents, self._setup.rows, self._setup.model.vocab_size)

    def shares_rows(self, lists: Sequence[Sequence[TokenDocument]]) -> bool:
        """Return whether lists of documents take fewer rows together, and have the same losses there as alone."""
        alone = sum(rows_of(documents, self._setup.rows) for documents in lists)
        together = rows_of([document for documents in lists for document in documents], self._setup.rows)
        is_same = self._setup.mesh.devices == 1 and self._parts.noise_key(0) is None
        return is_same and together < alone

    def sample_tokens(
        self, requests: Sequence[Request], stops: Collection[int] | None = None, weights: Params | None = None
    ) -> Iterator[Completion]:
        """Yield the answers to tokens as they end, by the present weights or a `snapshot`; stops are the model's."""
        engine, trainable = self._sampling_engine(), self._state.trainable if weights is None else weights
        return engine.generate(trainable, self._state.frozen, requests, self._setup.stops if stops is None else stops)

    def see(
        self, tokens: Int[np.ndarray, " T"], images: Sequence[PlacedImage]
    ) -> tuple[list[int], PromptImages | None]:
        """Return a prompt as the model reads it, with the features of its images, for requests of `sample_tokens`."""
        if not images:
            return tokens.tolist(), None
        assert self.image_rules is not None
        processor, engine = self.image_rules.processor, self._sampling_engine()
        trees, count = (self._state.trainable, self._state.frozen), processor.tokens
        places = [self.image_rules.places(tokens, first, count(image.grid)) for first, image in images]
        pictures = [image for _, image in images]
        see = partial(engine.see, *trees, processor=processor)
        return read_prompt(tokens, pictures, np.concatenate(places), lambda image: see([image]), processor)

    def check_request(self, request: Request) -> None:
        """Raise ValueError for a prompt that `sample_tokens` would refuse, with all that are answered beside it."""
        self._sampling_engine().answers(request, 0)

    def score_tokens(self, text: Sequence[int], top: int, weights: Params | None = None) -> PromptScores:
        """Return log-probabilities of a text's tokens but the first, and of the likeliest in their places.

        By the present weights or a `snapshot`, at temperature 1.
        """
        if self._scorer is None:
            parts, setup = self._parts, self._setup
            self._scorer = PromptScorer(parts.graphdefs, setup.model, self._state.frozen, setup.dtype)
        trainable = self._state.trainable if weights is None else weights
        (scores,) = self._scorer.score(trainable, [list(text)], None, top)
        return scores

    def snapshot(self) -> Params:
        """Return a copy of the trained parameters, for `sample_tokens`."""
        return jax.tree.map(jnp.copy, self._state.trainable)

    def optim_step(self) -> dict[str, float]:
        """Update the parameters by the gradients since the last step; return `grad_norm` and `learning_rate`.

        Raises:
            ValueError: there are no gradients, or some are not finite; these are dropped, and no parameter changes.
        """
        if self._gradients is None:
            raise ValueError("optim_step: there are no gradients since the last one: call forward_backward before")
        gradients, self._gradients = self._gradients, None
        if not _are_finite(gradients):
            raise ValueError(
                "optim_step: the gradients are not finite (NaN or infinity), so they are dropped: check the loss "
                "function, its columns, and the learning rate of the steps before"
            )
        state, values = update(self._parts, self._state, gradients)
        self._state = state._replace(step=state.step + 1)
        return {name: float(value) for name, value in values.items()}

    def log_probs(self, rows: Step | Iterable[Mapping[str, Any]]) -> list[Float[np.ndarray, "B T"]]:
        """Return the log-probabilities of each micro-batch's targets, 0 where none is trained on; float32.

        Raises:
            ValueError: as `forward_backward`.
        """
        step = rows if isinstance(rows, Step) else self._pack(rows, NO_COLUMNS)
        return self._log_probs_of(self._state.trainable, step)

    def _log_probs_of(self, trainable: Params, step: Step) -> list[Float[np.ndarray, "B T"]]:
        log_probs = partial(self._parts.executor.log_probs, trainable, self._state.frozen)
        return [np.asarray(log_probs(batch)) for batch in self._parts.place(step)]

    def sample(
        self, prompts: Sequence[str | Sequence[Mapping[str, Any]]], *, n: int = 1, **sampling: Any
    ) -> list[list[Answer]]:
        """Return n answers to each prompt by the present weights, which are neither merged nor copied.

        Random numbers depend on the seed, the prompt's number in the session and the answer's.

        Args:
            prompts: texts, which the chat template renders as a user's message where there is one, or lists of
                messages.
            n: answers to each.
            sampling: fields of `SamplingConfig`: `max_tokens`, `temperature`, `top_p`, `seed`, …

        Raises:
            ValueError: bad sampling, an empty or too long prompt, or too little memory.
        """
        config = SamplingConfig(**sampling)
        tokens = [self._encode(prompt) for prompt in prompts]
        requests = [Request(prompt, config, self._sampled + i, n=n) for i, prompt in enumerate(tokens)]
        self._sampled += len(requests)
        found: list[dict[int, Answer]] = [{} for _ in prompts]
        for done in self.sample_tokens(requests):
            text = str(self.tokenizer.decode(done.tokens.tolist(), skip_special_tokens=True))
            found[done.number][done.answer] = Answer(text, done.tokens, done.log_probs, done.finish == "stop")
        return [[group[index] for index in range(n)] for group in found]

    def _sampling_engine(self) -> Engine:
        setup, parts = self._setup, self._parts
        if self._engine is None:
            attention = setup.workload.attention
            self._engine = Engine(parts.graphdefs, setup.model, dtype=setup.dtype, attention=attention)
        self._engine.multiply_in_fp8(parts.executor.fp8_layers)
        return self._engine

    def save(self, path: str | Path) -> Path:
        """Write the adapter, or the whole model, to a folder that PEFT, transformers and `load` read.

        Raises:
            ValueError: the folder is not empty.
        """
        path = Path(path)
        export_result(self._setup, self._state.trainable, path)
        state = jax.tree_util.tree_leaves_with_path(self._state.saved)
        save_tensors(path / _STATE, {jax.tree_util.keystr(key): leaf for key, leaf in state})
        host = {"step": self._state.step, "sampled": self._sampled, "fp8": self._parts.fp8}
        write_json(path / _STATE / "session.json", host)
        return path

    def load(self, path: str | Path, *, optimizer: bool = True) -> None:
        """Continue from a folder of `save`: weights, optimizer and number of steps.

        Args:
            path: the folder.
            optimizer: read its state, too; False begins one anew.

        Raises:
            ValueError: no such folder, or that of another model or optimizer.
        """
        folder = Path(path) / _STATE
        known, tensors = read_json(folder / "session.json"), TensorFiles(sorted(folder.glob("*.safetensors")))
        state = self._state.saved
        wanted = {jax.tree_util.keystr(key): leaf for key, leaf in jax.tree_util.tree_leaves_with_path(state)}
        if wanted.keys() != tensors.tensors.keys():
            raise ValueError(
                f"{folder}: a state of another model or optimizer: use the settings that it was saved with"
            )
        read = {name: tensors.read(name) for name in wanted}
        if wrong := next((name for name, leaf in wanted.items() if read[name].shape != leaf.shape), None):
            raise ValueError(f"{folder}: {wrong} has shape {read[wrong].shape}, expected {wanted[wrong].shape}")
        restored = jax.tree_util.tree_map_with_path(
            lambda key, leaf: jax.device_put(read[jax.tree_util.keystr(key)].astype(leaf.dtype), leaf.sharding), state
        )
        self._state = self._state.restored(restored, known["step"])
        if not optimizer:
            anew = self._parts.optimizer.init(self._state.trainable)
            self._state = self._state._replace(optimizer=anew, step=0)
        multiply_in_fp8(self._parts, known["fp8"])
        self._gradients, self._sampled = None, known["sampled"]

    def as_teacher(self) -> Teacher:
        """Return the model as it is now, for `DistillationLoss`."""
        return Teacher(self._parts.executor, self._state.trainable, self._state.frozen)

    @cached_property
    def _processor(self) -> Processor | None:
        """Return the processor of the model's images; None for a model that sees none."""
        return read_vision(self._setup.base.folder, self.tokenizer, **self._data.image_limits)

    def _prepare(self, config: DataConfig, columns: Columns) -> PreparedData:
        size = self._setup.model.vocab_size
        prepared = prepare_data(config, self.tokenizer, size, columns=columns, processor=self._processor)
        if prepared.readers and self.image_rules is None:
            raise ValueError("the rows have images, and the session has no tower: open it with images=True")
        return prepared

    def _pack(self, rows: Iterable[Mapping[str, Any]], columns: Columns) -> Step:
        """Pack all rows into one step, in as many micro-batches as they need; its shapes only grow."""
        shape = self._setup.rows
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            file = str(write_rows(rows, Path(folder)))
            own = replace(
                self._data, data=(file,), eval_data=(), eval_fraction=0.0, cache_dir=str(Path(folder) / "cache")
            )
            data = self._prepare(own, columns).train
            plan = plan_packing(data.lengths, seq_len=shape.seq_len)
            self._slots = max(self._slots, segment_bucket(plan.max_segments))
            return Steps(
                dataset=data,
                plan=plan,
                seq_len=shape.seq_len,
                max_segments=self._slots,
                batch_size=shape.batch_size,
                gradient_accumulation_steps=-(-plan.rows // shape.batch_size),
                process_index=0,
                process_count=1,
                ahead=RowImages.with_patches,
            )[0]

    def _encode(self, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
        if isinstance(prompt, str):
            return encode_prompt(self.tokenizer, prompt, raw=not self.tokenizer.chat_template)
        return encode_messages(self.tokenizer, [dict(message) for message in prompt])


@jax.jit
def _are_finite(gradients: Params) -> Bool[Array, ""]:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients)]).all()


@jax.jit
def _add(one: Params, other: Params) -> Params:
    return jax.tree.map(jnp.add, one, other)
