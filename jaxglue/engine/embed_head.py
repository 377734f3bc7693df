"""Compiled programs around the layers: embedding and rotary tables; final norm, projection, loss, log-probabilities."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.stages import Traced
from jaxtyping import Array, Float, PRNGKeyArray

from jaxglue.data.batch import PROMPT, Batch, sum_labels, sum_parts
from jaxglue.engine import transfer
from jaxglue.engine.compiler import jit_step, on_devices
from jaxglue.engine.head_values import HeadValues
from jaxglue.engine.host_table import TableRows, needed_rows, without_own_table
from jaxglue.engine.layer import add_trees
from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import PackedContext, RouterLosses
from jaxglue.models.noise import add_noise
from jaxglue.models.parameters import ModelGraphDefs, Params, merge_module
from jaxglue.models.vocabulary import extended_matrix, with_low_rank
from jaxglue.objectives.config import SUPERVISED
from jaxglue.objectives.objective import Objective
from jaxglue.ops.collectives import BATCH_AXES, TOKEN_AXES, divide_equally, per_device, psum
from jaxglue.ops.cross_entropy import linear_log_probs
from jaxglue.ops.rope import RopeTables
from jaxglue.ops.row_split import CONTEXT
from jaxglue.sharding.gather import gather, reduce_scatter_grads, stack
from jaxglue.sharding.rules import SINGLE_DEVICE, Layout
from jaxglue.vision.rows import Patches, token_positions


class EmbedHead:
    """Compiled functions of the embedding and the head; every tree argument is the whole model's."""

    entry = "embed_tokens"

    def __init__(
        self,
        graphdefs: ModelGraphDefs,
        config: DecoderConfig,
        *,
        dtype,
        attention: str,
        tile: int | None = None,
        exact: bool = False,
        router_losses: RouterLosses | None = None,
        objective: Objective = SUPERVISED,
        neftune_alpha: float = 0.0,
        layout: Layout = SINGLE_DEVICE,
    ):
        self.exact = exact
        self._neftune_alpha = neftune_alpha
        self._graphdefs, self.config, self._dtype, self._attention = graphdefs, config, dtype, attention
        if tile is not None and router_losses is not None and router_losses.balance:
            raise ValueError(
                "--router-balance-loss is a mean over whole rows, which --tile cuts: leave one out, or lower --seq-len"
            )
        self._tile, self._router_losses, self._objective, self._layout = tile, router_losses, objective, layout
        self.loss_shape, vision = objective.shape, config.vision
        trains = vision is not None and vision.trains != "none"
        self.layers_fed = vision.layers_seen if vision is not None and trains else 0
        self.trains_inputs = trains and config.per_layer is not None
        self._repeating = ("tensor",) if objective.answers is None else ("tensor", CONTEXT)
        """Axes whose devices compute the same sums: units of answers are of whole rows."""
        self._head_parts = ("norm", graphdefs.output_name)
        self.fp8_layers, self.fp8_head = [True] * len(graphdefs.layers), config.fp8_head
        self._embed_program = jit_step(self._embed)
        self._embed_backward_program = jit_step(self._embed_backward, donate_argnames="accumulated")
        self._image_features_program = jit_step(self._image_features)
        self._loss_program = jit_step(self._loss, static_argnames="fp8")
        self._log_probs_program = jit_step(self._log_probs)
        self._token_log_probs_program = jit_step(self._token_log_probs)
        self._read_program = jit_step(self._read)
        self._head_backward_program = jit_step(
            self._head_backward, donate_argnames=("x", "accumulated"), static_argnames="fp8"
        )
        self.programs = (
            self._embed_program,
            self._embed_backward_program,
            self._image_features_program,
            self._loss_program,
            self._log_probs_program,
            self._token_log_probs_program,
            self._read_program,
            self._head_backward_program,
        )

    def embed(
        self, trainable: Params, frozen: Params, batch: Batch, key: PRNGKeyArray | None, scale=None
    ) -> tuple[Float[Array, "B T D"], list[PackedContext]]:
        """Embed the tokens and build every layer's context; contexts differ in their dropout key only.

        Args:
            trainable, frozen: parameters.
            batch: micro-batch.
            key: for dropout; None drops nothing.
            scale: factor of the loss, for the routers' auxiliary losses; None without a backward pass.
        """
        table, rows = needed_rows(frozen["embed_tokens"], batch.tokens)
        weights = trainable["embed_tokens"], table
        x, *shared = self._embed_program(*weights, rows, batch.without_lengths(), key, scale)
        return x, self._contexts(batch, *shared)

    def trace_embed(
        self, trainable: Params, frozen: Params, batch: Batch, key: PRNGKeyArray | None, scale=None
    ) -> tuple[Traced, Any, list[PackedContext]]:
        """Trace `embed` on `ShapeDtypeStruct`s of parameters; return the shapes of its results, too."""
        weights = trainable["embed_tokens"], frozen["embed_tokens"]
        layer_tokens = None if self.config.per_layer is None else batch.tokens
        traced = self._embed_program.trace(
            *weights, TableRows(batch.tokens, layer_tokens), batch.without_lengths(), key, scale
        )
        x, *shared = on_devices(self._layout, traced.out_info, self._embedded_specs)
        return traced, x, self._contexts(batch, *shared)

    def _contexts(
        self, batch: Batch, rope: RopeTables, keys: list, router_losses: RouterLosses | None, layer_inputs: list
    ) -> list[PackedContext]:
        """Return every layer's context; they differ in dropout key, own embeddings, and where FP8 is used."""
        return [
            PackedContext(
                segments=segments,
                rope=rope,
                router_losses=router_losses,
                backend=self._attention,
                tile=self._tile,
                exact=self.exact,
                ranks=batch.ranks,
                dropout_key=layer_key,
                fp8=fp8,
                layer_input=layer_input,
                trains_input=self.trains_inputs,
            )
            for layer_key, fp8, layer_input, segments in zip(
                keys,
                self.fp8_layers,
                layer_inputs,
                self.config.layer_segments(batch.segments, batch.images),
                strict=True,
            )
        ]

    def embed_backward(
        self,
        trainable: Params,
        frozen: Params,
        batch: Batch,
        key: PRNGKeyArray | None,
        dx: list[Float[Array, "B T D"]],
        accumulated: Params | None,
    ) -> Params:
        """Return `accumulated` of the embedding plus its gradient; empty when the embedding is frozen."""
        read = {"vision": frozen["embed_tokens"]["vision"]} if "vision" in frozen["embed_tokens"] else {}
        if self.trains_inputs:
            own = frozen["embed_tokens"]["per_layer"]
            read["per_layer"] = {name: part for name, part in own.items() if name != "embedding"}
        arrays = batch.without_lengths(), dx, accumulated
        return self._embed_backward_program(trainable["embed_tokens"], read, *arrays)

    def loss(
        self, trainable: Params, frozen: Params, x: Float[Array, "B T D"], batch: Batch, scale
    ) -> Float[Array, "..."]:
        """Return scale · Σ loss of the last layer's output; on a mesh, every device's share of it."""
        parts = self.parts(trainable), self.parts_on_device(frozen)
        return self._loss_program(*parts, x, batch.without_lengths(), scale, self.fp8_head)

    def answer_log_probs(
        self, trainable: Params, frozen: Params, x: Float[Array, "B T D"], batch: Batch
    ) -> Float[Array, "B U parts"]:
        """Return the log-probabilities, or scores, of a batch's answers from the last layer's output.

        A classifier's are its scores of the first answers, [B, U, C].
        """
        return self._log_probs_program(self.parts(trainable), self.parts_on_device(frozen), x, batch.without_lengths())

    def log_probs(
        self, trainable: Params, frozen: Params, x: Float[Array, "B T D"], batch: Batch
    ) -> Float[Array, "B T"]:
        """Return log-probabilities of a batch's targets, at the objective's temperature; 0 where they do not count."""
        parts = self.parts(trainable), self.parts_on_device(frozen)
        return self._token_log_probs_program(*parts, x, batch.targets, batch.loss_weights, batch.ranks)

    def read(self, trainable: Params, frozen: Params, x: Float[Array, "B T D"], batch: Batch) -> Float[Array, "B A *K"]:
        """Return what the objective's model gives for each part of a batch (`ReadObjective.outputs`)."""
        return self._read_program(self.parts(trainable), self.parts_on_device(frozen), x, batch.without_lengths())

    def with_reference(self, trainable: Params, frozen: Params, x: Float[Array, "B T D"], batch: Batch) -> Batch:
        """Return the batch with the answers' log-probabilities under a reference model, from its last output."""
        assert batch.answers is not None
        reference = self.answer_log_probs(trainable, frozen, x, batch)
        return replace(batch, answers=replace(batch.answers, reference=reference))

    def head_backward(
        self, trainable: Params, frozen: Params, x: Float[Array, "B T D"], batch: Batch, scale, sums: Params
    ) -> tuple[Float[Array, "..."], Float[Array, "B T D"], Params]:
        """Return (loss, dx, the head's entries of `sums` plus gradients); x is donated."""
        frozen = self.parts_on_device(frozen)
        return self._head_backward_program(*self._head_arguments(trainable, frozen, x, batch, scale, sums))

    def trace_head_backward(
        self, trainable: Params, frozen: Params, x: Any, batch: Batch, scale, sums: Params
    ) -> Traced:
        """Trace `head_backward` on arrays or `ShapeDtypeStruct`s."""
        return self._head_backward_program.trace(*self._head_arguments(trainable, frozen, x, batch, scale, sums))

    def trace_answer_log_probs(self, trainable: Params, frozen: Params, x: Any, batch: Batch) -> Traced:
        """Trace `answer_log_probs` on arrays or `ShapeDtypeStruct`s."""
        return self._log_probs_program.trace(self.parts(trainable), self.parts(frozen), x, batch.without_lengths())

    def _head_arguments(self, trainable: Params, frozen: Params, x, batch: Batch, scale, sums: Params) -> tuple:
        inputs = x, batch.without_lengths(), scale
        return self.parts(trainable), self.parts(frozen), *inputs, self.parts(sums), self.fp8_head

    def parts(self, tree: Params) -> Params:
        """Return the final norm's and the output projection's entries, tied or not."""
        return {name: tree[name] for name in self._head_parts}

    def parts_on_device(self, tree: Params) -> Params:
        """Return the head's entries; start copying those still in host memory."""

        def on_device(name: str, part: Params) -> Params:
            if name == "embed_tokens":
                return without_own_table(part)
            return transfer.to_device(part) if transfer.is_on_host(part) else part

        return {name: on_device(name, part) for name, part in self.parts(tree).items()}

    def _embed(self, trainable: Params, frozen: Params, rows: TableRows, batch: Batch, key, scale):
        layout, stored = self._layout, self._layout.param_specs((trainable, frozen), "embed_tokens")

        def program(weights, rows, batch, key, scale):
            embed_tokens = merge_module(self._graphdefs.embed_tokens, *gather(layout, weights, stored))
            lengths = batch.segments.ends - batch.segments.starts
            rope = self.config.rope_tables(token_positions(batch.segments, batch.images), lengths)
            count = len(self._graphdefs.layers)
            keys = [None] * count if key is None else list(jax.random.split(key, count))
            x = embed_tokens(rows.tokens, self._dtype, batch.tokens)
            if key is not None and self._neftune_alpha:
                D = self.config.hidden_size
                noisy = add_noise(x[..., :D], batch.segments, self._neftune_alpha, key)
                x = jnp.concatenate([noisy, x[..., D:]], axis=-1) if x.shape[-1] > D else noisy
            x, seen = embed_tokens.see(x, batch.images, backend=self._attention)
            layer_inputs = embed_tokens.layer_inputs(rows.own, x) or [*seen, *[None] * (count - len(seen))]
            return x, rope, keys, self._scaled_router_losses(batch, scale), layer_inputs

        split, replicated = layout.batch_spec, PartitionSpec()
        specs = stored, split, layout.batch_specs(batch), replicated, replicated
        return per_device(program, layout.mesh, specs, self._embedded_specs)(
            (trainable, frozen), rows, batch, key, scale
        )

    @property
    def _embedded_specs(self) -> tuple[PartitionSpec, ...]:
        """Return the specs of hidden states, rotary tables, keys, router losses and layers' own embeddings."""
        split, replicated = self._layout.batch_spec, PartitionSpec()
        return split, split, replicated, replicated, split

    def image_features(self, trainable: Params, frozen: Params, patches: Patches) -> Float[Array, "B I D"]:
        """Return the features of rows of patches, in the activations' dtype.

        Args:
            trainable, frozen: parameters of the embedding's part, with the tower.
            patches: on the devices.
        """
        trees = trainable, frozen
        towers = tuple({name: part for name, part in tree.items() if name == "vision"} for tree in trees)
        others = ({name: part for name, part in tree.items() if name != "vision"} for tree in trees)
        unread = tuple(jax.tree.map(lambda _: np.zeros(()), tree) for tree in others)
        return self._image_features_program(*towers, unread, patches)

    def _image_features(self, trainable: Params, frozen: Params, unread: tuple[Params, Params], patches: Patches):
        layout, stored = self._layout, self._layout.param_specs((trainable, frozen), "embed_tokens")
        stand_ins = jax.tree.map(lambda _: jnp.zeros(()), unread)  # of the tables, which would be copied

        def program(weights, patches):
            towers = gather(layout, weights, stored)
            trees = [tower | others for tower, others in zip(towers, stand_ins, strict=True)]
            embed_tokens = merge_module(self._graphdefs.embed_tokens, *trees)
            return embed_tokens.vision(patches, self._dtype, backend=self._attention)

        specs = stored, jax.tree.map(lambda _: layout.row_spec, patches)
        return per_device(program, layout.mesh, specs, layout.row_spec)((trainable, frozen), patches)

    def _scaled_router_losses(self, batch: Batch, scale) -> RouterLosses | None:
        """Scale the coefficients for one layer: the mean over layers, and over micro-batches by their targets."""
        moe = self.config.moe
        if self._router_losses is None or moe is None or scale is None:
            return None
        terms = batch.loss_weights if batch.answers is None else batch.answers.used
        axes = TOKEN_AXES if batch.answers is None else BATCH_AXES
        share = scale * psum(terms.sum(), *axes) / sum(moe.sparse_layers)
        return RouterLosses(*(share * coefficient for coefficient in self._router_losses))

    def _embed_backward(self, trainable: Params, read: Params, batch: Batch, dx, accumulated: Params | None) -> Params:
        if not trainable:
            return {}
        layout, name = self._layout, "embed_tokens"
        stored, grad_specs = layout.param_specs(trainable, name), layout.grad_specs(trainable, name)

        # The gradient to trained rows does not depend on the frozen table: any row stands for it.
        frozen = {} if "weight" in trainable else {"weight": jnp.zeros((1, self.config.hidden_size))}
        read_specs = layout.param_specs(read, name)

        def program(trainable, read, batch, dx, accumulated):
            others = frozen | read
            if "per_layer" in read:  # whose table's rows are added
                own = gather(layout, read["per_layer"], read_specs["per_layer"])
                others["per_layer"] = {**own, "embedding": {"weight": jnp.zeros((1, 1))}}

            def embed(trainable):
                embed_tokens = merge_module(self._graphdefs.embed_tokens, trainable, others)
                x = embed_tokens(batch.tokens, self._dtype)
                x, seen = embed_tokens.see(x, batch.images, backend=self._attention)
                own = embed_tokens.per_layer.projected(x[..., : self.config.hidden_size]) if self.trains_inputs else []
                return [x, *seen, *own][: len(dx)]

            # The table's values do not matter, its dtype does: gradients of frequent tokens are long sums.
            table = gather(Layout(layout.mesh, jnp.float32), trainable, stored)
            embedded, pull = jax.vjp(embed, table)
            (gradients,) = pull(dx[: len(embedded)])
            return add_trees(accumulated, reduce_scatter_grads(layout, gradients, stored, name))

        sums = None if accumulated is None else grad_specs
        of_dx = [layout.batch_spec] * len(dx)
        specs = (stored, read_specs, layout.batch_specs(batch), of_dx, sums)
        return per_device(program, layout.mesh, specs, grad_specs)(trainable, read, batch, dx, accumulated)

    def _loss(self, trainable: Params, frozen: Params, x, batch: Batch, scale, fp8: bool):
        layout, stored = self._layout, self._layout.param_specs((trainable, frozen))

        def program(weights, x, batch, scale):
            trainable, frozen = gather(layout, weights, stored)
            _, values = self.local_loss(trainable, frozen, x, batch, scale, fp8=fp8)
            return stack(layout, divide_equally(values, *self._repeating))

        specs = (stored, layout.batch_spec, layout.batch_specs(batch), PartitionSpec())
        return per_device(program, layout.mesh, specs, layout.device_spec)((trainable, frozen), x, batch, scale)

    def _head_backward(self, trainable: Params, frozen: Params, x, batch: Batch, scale, accumulated: Params, fp8: bool):
        layout, stored = self._layout, self._layout.param_specs((trainable, frozen))
        grad_specs = layout.grad_specs(trainable)

        def program(weights, x, batch, scale, accumulated):
            differentiate = jax.value_and_grad(partial(self.local_loss, fp8=fp8), argnums=(0, 2), has_aux=True)
            (_, values), (gradients, dx) = differentiate(*gather(layout, weights, stored), x, batch, scale)
            gradients = reduce_scatter_grads(layout, gradients, stored[0])
            values = stack(layout, divide_equally(values, *self._repeating))
            return values, dx, {name: add_trees(accumulated[name], gradients[name]) for name in self._head_parts}

        sum_specs = {name: None if accumulated[name] is None else grad_specs[name] for name in self._head_parts}
        specs = (stored, layout.batch_spec, layout.batch_specs(batch), PartitionSpec(), sum_specs)
        results = (layout.device_spec, layout.batch_spec, grad_specs)
        arguments = (trainable, frozen), x, batch, scale, accumulated
        return per_device(program, layout.mesh, specs, results)(*arguments)

    def _log_probs(self, trainable: Params, frozen: Params, x, batch: Batch):
        layout, stored = self._layout, self._layout.param_specs((trainable, frozen))

        def program(weights, x, batch):
            trainable, frozen = gather(layout, weights, stored)
            hidden, output = self.normed_output(trainable, frozen, x, batch.ranks)
            values = HeadValues(hidden, output, batch, softcap=self.config.scales.logit_softcap)
            if self.config.labels > 1:
                return sum_labels(values.class_scores, batch.answers)
            return sum_parts(values.scores if self.config.scores else values.log_probs, batch.answers)[..., :PROMPT]

        specs = (stored, layout.batch_spec, layout.batch_specs(batch))
        return per_device(program, layout.mesh, specs, layout.row_spec)((trainable, frozen), x, batch)

    def _token_log_probs(self, trainable: Params, frozen: Params, x, targets, counted, ranks):
        layout, stored = self._layout, self._layout.param_specs((trainable, frozen))
        softcap, temperature = self.config.scales.logit_softcap, self._objective.temperature

        def program(weights, x, targets, counted, ranks):
            trainable, frozen = gather(layout, weights, stored)
            hidden, output = self.normed_output(trainable, frozen, x, ranks)
            tokens = hidden, extended_matrix(output), targets.ravel(), counted.ravel()
            options: dict[str, Any] = {"softcap": softcap, "temperature": temperature}
            log_probs = linear_log_probs(*tokens, **options, exact=self.exact)
            return log_probs.reshape(targets.shape)

        rows = layout.batch_spec
        specs = (stored, rows, rows, rows, rows)
        return per_device(program, layout.mesh, specs, rows)((trainable, frozen), x, targets, counted, ranks)

    def _read(self, trainable: Params, frozen: Params, x, batch: Batch):
        layout, stored = self._layout, self._layout.param_specs((trainable, frozen))
        objective: Any = self._objective

        def program(weights, x, batch):
            trainable, frozen = gather(layout, weights, stored)
            hidden, output = self.normed_output(trainable, frozen, x, batch.ranks)
            sizes: dict[str, Any] = {"softcap": self.config.scales.logit_softcap, "width": self.config.hidden_size}
            return objective.outputs(HeadValues(hidden, output, batch, **sizes), batch.reads)

        specs = (stored, layout.batch_spec, layout.batch_specs(batch))
        return per_device(program, layout.mesh, specs, layout.row_spec)((trainable, frozen), x, batch)

    def output(self, trainable: Params, frozen: Params) -> Any:
        """Return the output projection's module."""
        name = self._graphdefs.output_name
        return merge_module(self._graphdefs.output, trainable[name], frozen[name])

    def normed_output(self, trainable: Params, frozen: Params, x, ranks: Any = None) -> tuple[Float[Array, "M W"], Any]:
        """Return all tokens' normed hidden states, `with_low_rank` for the output projection, and its module.

        Args:
            trainable, frozen: parameters of the head's parts.
            x: the last layer's output.
            ranks: of a batch; None for all.
        """
        ranks = None if ranks is None else ranks.reshape(-1, ranks.shape[-1])
        graphdefs = {"norm": self._graphdefs.norm, self._head_parts[1]: self._graphdefs.output}
        norm, output = (merge_module(graphdefs[name], trainable[name], frozen[name]) for name in self._head_parts)
        normed = norm(x, exact=self.exact)
        return with_low_rank(output, normed.reshape(-1, self.config.hidden_size), ranks), output

    def local_loss(self, trainable: Params, frozen: Params, x, batch: Batch, scale, fp8: bool) -> tuple[Array, Array]:
        """Return scale · Σ loss of this device's rows, and the same followed by the objective's further sums."""
        hidden, output = self.normed_output(trainable, frozen, x, batch.ranks)
        softcap = self.config.scales.logit_softcap
        targets = HeadValues(
            hidden,
            output,
            batch,
            fp8=fp8,
            softcap=softcap,
            temperature=self._objective.temperature,
            width=self.config.hidden_size,
            exact=self.exact,
        )
        values = self._objective(targets, batch) * scale
        return self._objective.loss(values), values
