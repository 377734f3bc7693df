"""The interface of the compiled functions around the stack of layers."""

from typing import Any, Protocol

from jaxtyping import Array, PRNGKeyArray

from jaxglue.models.parameters import Params


class EntryHead(Protocol):
    """Compiled functions around the stack of layers; every tree argument is the whole model's."""

    entry: str
    """Key of the entry's parameters."""
    programs: tuple[Any, ...]
    loss_shape: tuple[int, ...]
    """Shape of the losses on one device."""

    def embed(self, trainable: Params, frozen: Params, batch: Any, key: PRNGKeyArray | None, scale=None) -> tuple:
        """Return (the first layer's input, every layer's context)."""

    def embed_backward(
        self, trainable: Params, frozen: Params, batch: Any, key: PRNGKeyArray | None, dx, accumulated: Params | None
    ) -> Params:
        """Return `accumulated` plus the entry's gradients."""

    def loss(self, trainable: Params, frozen: Params, x, batch: Any, scale) -> Array:
        """Return scale · Σ loss of the last layer's output."""

    def with_reference(self, trainable: Params, frozen: Params, x, batch: Any) -> Any:
        """Return the batch with values of a reference's last output for the loss; called with reference layers only."""

    def head_backward(self, trainable: Params, frozen: Params, x, batch: Any, scale, sums: Params) -> tuple:
        """Return (loss, dx, the head's entries of `sums` plus gradients)."""
