"""Run a stack of layers of any kind as `Executor` runs a language model: by layer, under remat policies, with offload.

A model is four things (see docs/own_layers.md):

    entry(params, batch, key) -> (x, context)       the first layer's input, and arrays that all layers read
    layer(params, x, context, key) -> x             one function for each layer; equal ones are compiled once
    head(params, x, batch) -> loss                  the sum of the batch's losses
    params = {"entry": …, "layers": [… for each layer], "head": …}
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from jaxglue.engine.compiler import jit_step
from jaxglue.engine.executor import LayerExecutor, Update
from jaxglue.engine.layer import add_trees
from jaxglue.engine.policy import RematPolicy, parse_policies
from jaxglue.models.parameters import Params

Entry = Callable[[Any, Any, PRNGKeyArray | None], tuple[Array, Any]]
LayerFunction = Callable[[Any, Array, Any, PRNGKeyArray | None], Array]
Head = Callable[[Any, Array, Any], Array]


class LayerStack:
    """Loss and gradients of a stack of a user's own layers, on one device.

    Args:
        entry: returns the first layer's input and the context of all layers (a tree of arrays, or None), which has no
            gradient.
        layers: a function for each layer, such as `[block] * 12`.
        head: returns the sum of a batch's losses.
        policy: as `--remat` takes it (`offload`, `full`, `10 x full + 2 x none`), or a policy for each layer. A layer
            names values with `jax.ad_checkpoint.checkpoint_name`, by any name of `jaxglue.ops.names`.
        stream_weights: frozen layers' weights are in pinned host memory.
        prefetch_depth: layers by which copies from the host are requested ahead; None chooses.
        layers_per_program: consecutive layers dispatched as one program; for small layers, where everything stays on
            the device.

    Raises:
        ValueError: a bad policy, another number of policies than of layers, or a device without pinned host memory.
    """

    def __init__(
        self,
        entry: Entry,
        layers: Sequence[LayerFunction],
        head: Head,
        *,
        policy: str | Sequence[RematPolicy] = "full",
        stream_weights: bool = False,
        prefetch_depth: int | None = None,
        layers_per_program: int = 1,
    ):
        self._count = len(layers)
        self._executor = LayerExecutor(
            [_Layer(layer) for layer in layers],
            _EntryHead(entry, head, self._count),
            policy=parse_policies(policy, self._count) if isinstance(policy, str) else policy,
            stream_weights=stream_weights,
            prefetch_depth=prefetch_depth,
            layers_per_program=layers_per_program,
        )

    def loss_and_gradients(
        self,
        params: Params,
        batches: Sequence[Any],
        total: float,
        *,
        frozen: Params | None = None,
        key=None,
        into: Params | None = None,
    ) -> tuple[Float[Array, ""], Params]:
        """Return Σ loss / total over micro-batches of one shape, and its gradient to `params`.

        Args:
            params: trees of the entry, of each layer and of the head.
            batches: micro-batches, in any form that the entry and the head read.
            total: number of terms in the sum of losses of all batches, or the sum of their weights.
            frozen: further parameters without gradients, nested dictionaries that are merged with those of `params`.
            key: for dropout; None drops nothing.
            into: gradients of an earlier step, whose memory the new ones take where all layers are one program;
                donated.

        Raises:
            ValueError: other parameters, no list of batches, a total of 0, or functions that return something else.
        """
        _check_batches(batches, total)
        return self._executor.loss_and_gradients(params, self._frozen(params, frozen), batches, total, key, into)

    def loss_and_update(
        self,
        params: Params,
        batches: Sequence[Any],
        total: float,
        update: Update,
        *,
        frozen: Params | None = None,
        key=None,
    ) -> Float[Array, ""]:
        """Return Σ loss / total; pass the gradients of each part (a name, or a layer's index) to `update` when ready.

        With one micro-batch only one layer's gradients exist at a time.
        """
        _check_batches(batches, total)
        return self._executor.loss_and_update(params, self._frozen(params, frozen), batches, total, update, key)

    def loss(self, params: Params, batch: Any, *, frozen: Params | None = None) -> Float[Array, ""]:
        """Return Σ loss of one batch; keep nothing for a backward pass."""
        return self._executor.loss(params, self._frozen(params, frozen), batch)

    def compilations(self) -> int:
        """Return the number of compiled programs, constant after the first step."""
        return self._executor.compilations()

    def _frozen(self, params: Params, frozen: Params | None) -> Params:
        parts = {"entry", "layers", "head"}
        if params.keys() != parts or len(params["layers"]) != self._count:
            raise ValueError(f"params must be entry, head and {self._count} layers; got {_describe(params)}")
        if other := (frozen or {}).keys() - parts:
            raise ValueError(f"frozen has {', '.join(map(repr, sorted(other)))}: its parts are entry, layers and head")
        return {"entry": {}, "layers": [{}] * self._count, "head": {}} | (frozen or {})


def _check_batches(batches: Any, total: float) -> None:
    if not isinstance(batches, list | tuple) or not batches:
        raise ValueError(f"batches must be a list of micro-batches, [batch] if there is one, got {batches!r:.100}")
    if not total > 0:
        raise ValueError(f"total must be the number of terms in the batches' losses, above 0, got {total}")


def _describe(params: Params) -> str:
    return ", ".join(f"{len(tree)} layers" if name == "layers" else name for name, tree in params.items())


def merge_params(trainable: Any, frozen: Any) -> Any:
    """Return the union of two nested dictionaries; without frozen parameters, the trainable ones as they are.

    Raises:
        ValueError: other trees, or both have a parameter of one name.
    """
    if not frozen:
        return trainable
    if not isinstance(trainable, dict) or not isinstance(frozen, dict):
        raise ValueError("frozen and trainable parameters must be nested dictionaries with different keys")
    shared = {name: merge_params(trainable[name], frozen[name]) for name in trainable.keys() & frozen.keys()}
    return trainable | frozen | shared


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Context:
    """Context of one layer: the entry's, and the layer's own dropout key."""

    shared: Any
    dropout_key: PRNGKeyArray | None


@dataclass(frozen=True)
class _Layer:
    """A layer function in the executor's form."""

    function: LayerFunction

    def __call__(self, trainable: Params, frozen: Params, x: Array, context: Any) -> Array:
        result = self.function(merge_params(trainable, frozen), x, context.shared, context.dropout_key)
        if not isinstance(result, Array):
            raise ValueError(f"a layer must return an array, the next one's input, got {type(result).__name__}")
        return result


class _EntryHead:
    """Compiled functions of the entry and the head."""

    entry = "entry"
    loss_shape: tuple[int, ...] = ()
    layers_fed, trains_inputs = 0, False

    def __init__(self, entry: Entry, head: Head, layers: int):
        self._entry, self._head, self._layers = entry, head, layers
        self._embed_program = jit_step(self._embed)
        self._embed_backward_program = jit_step(self._embed_backward, donate_argnames="accumulated")
        self._loss_program = jit_step(self._loss)
        self._head_backward_program = jit_step(self._head_backward, donate_argnames=("x", "accumulated"))
        self.programs = (
            self._embed_program,
            self._embed_backward_program,
            self._loss_program,
            self._head_backward_program,
        )

    def embed(self, trainable: Params, frozen: Params, batch: Any, key: PRNGKeyArray | None, scale=None) -> tuple:
        x, shared, keys = self._embed_program(trainable["entry"], frozen["entry"], batch, key)
        return x, [_Context(shared, layer_key) for layer_key in keys]

    def embed_backward(self, trainable: Params, frozen: Params, batch: Any, key, dx, accumulated):
        return self._embed_backward_program(trainable["entry"], frozen["entry"], batch, key, dx, accumulated)

    def loss(self, trainable: Params, frozen: Params, x: Array, batch: Any, scale) -> Array:
        return self._loss_program(trainable["head"], frozen["head"], x, batch, scale)

    def with_reference(self, trainable: Params, frozen: Params, x: Array, batch: Any) -> Any:
        raise NotImplementedError("a stack of own layers has no reference model")

    def head_backward(self, trainable: Params, frozen: Params, x: Array, batch: Any, scale, sums: Params) -> tuple:
        arguments = trainable["head"], frozen["head"], x, batch, scale, sums["head"]
        loss, dx, gradients = self._head_backward_program(*arguments)
        return loss, dx, {"head": gradients}

    def _embed(self, trainable, frozen, batch, key):
        entry_key, *keys = [None] * (self._layers + 1) if key is None else jax.random.split(key, self._layers + 1)
        result = self._entry(merge_params(trainable, frozen), batch, entry_key)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(
                "entry must return two values, the first layer's input and the layers' context, such as x, None"
            )
        return *result, keys

    def _embed_backward(self, trainable, frozen, batch, key, dx, accumulated):
        _, vjp = jax.vjp(lambda trainable: self._embed(trainable, frozen, batch, key)[0], trainable)
        return add_trees(accumulated, vjp(dx[0])[0])

    def _loss(self, trainable, frozen, x, batch, scale):
        return self._head(merge_params(trainable, frozen), x, batch) * scale

    def _head_backward(self, trainable, frozen, x, batch, scale, accumulated):
        differentiate = jax.value_and_grad(self._loss, argnums=(0, 2))
        loss, (gradients, dx) = differentiate(trainable, frozen, x, batch, scale)
        return loss, dx, add_trees(accumulated, gradients)
