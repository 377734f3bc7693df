"""Divergences between the distributions of a student and a teacher, token by token, in chunks."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxglue.ops.cross_entropy.chunks import extend, split_chunks, times_transposed
from jaxglue.ops.cross_entropy.reference import cap_logits

LogProbs = Float[Array, "M V"]


def chunked_divergences(
    x: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    teacher_x: Float[Array, "M E"],
    teacher_weight: Float[Array, "V E"],
    counted: Float[Array, " M"],
    *,
    chunk: int,
    beta: float,
    top_k: int | None,
    temperature: float,
    softcap: float | None,
    teacher_softcap: float | None,
) -> Float[Array, " M"]:
    """See `linear_divergences`."""
    w, teacher_w = extend(weight, None, x.dtype), lax.stop_gradient(extend(teacher_weight, None, teacher_x.dtype))
    V = len(weight)

    # Logits are computed again in the backward pass, so that one chunk's exist at a time.
    @jax.checkpoint
    def step(_, inputs):
        x_chunk, teacher_chunk, count = inputs
        student, teacher = (
            jax.nn.log_softmax(cap_logits(times_transposed(rows, matrix)[:, :V], cap, temperature))
            for rows, matrix, cap in ((x_chunk, w, softcap), (teacher_chunk, teacher_w, teacher_softcap))
        )
        if top_k is not None:
            student, teacher = most_likely(student, teacher, top_k)
        return None, count * divergences(student, teacher, beta)

    chunks = split_chunks(chunk, x, lax.stop_gradient(teacher_x), counted)
    return lax.scan(step, None, chunks)[1].ravel()[: len(x)]


def most_likely(student: LogProbs, teacher: LogProbs, count: int) -> tuple[LogProbs, LogProbs]:
    """Return both log-probabilities of the teacher's most likely tokens, and of all others together.

    Without the others, moving probability out of the tokens that count would lower the reverse divergence.
    """
    top, ids = lax.top_k(teacher, count)
    of_student = jnp.take_along_axis(student, ids, axis=-1)

    def with_rest(log_probs: LogProbs) -> LogProbs:
        rest = jnp.log(jnp.maximum(1 - jnp.exp(log_probs).sum(-1, keepdims=True), 1e-10))
        return jnp.concatenate([log_probs, rest], axis=-1)

    return with_rest(of_student), with_rest(top)


@partial(jax.named_call, name="divergences")
def divergences(student: LogProbs, teacher: LogProbs, beta: float) -> Float[Array, " M"]:
    """Return KL(teacher‖student) for β = 0, KL(student‖teacher) for β = 1, else their generalized Jensen-Shannon one.

    The mixture is M = β·teacher + (1 − β)·student, the divergence β·KL(teacher‖M) + (1 − β)·KL(student‖M).
    """

    def kl(p: LogProbs, q: LogProbs) -> Float[Array, " M"]:
        return jnp.sum(jnp.exp(p) * (p - q), axis=-1)

    if beta in (0, 1):
        return kl(student, teacher) if beta else kl(teacher, student)
    mixture = jnp.logaddexp(teacher + jnp.log(beta), student + jnp.log1p(-beta))
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)
