"""Differentiation rule of the fused backends."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from jaxglue.ops.attention.vjp import FlashSpec, flash_attention
from jaxglue.ops.names import ATTENTION_LSE, ATTENTION_OUT
from jaxglue.ops.segments import pack_segments

FORWARD_PRIMITIVE = "erf"  # stands for the forward kernel: nothing else in these programs uses it


@dataclass(frozen=True)
class Marked:
    """A backend with a countable forward pass in a traced program."""

    def forward(self, q, k, v, sinks, segments, *, window, softcap):
        return jax.lax.erf(q), q.sum(-1)

    def backward(self, q, k, v, sinks, segments, out, lse, dout, *, window, softcap):
        return dout * out, k * lse.sum(), v, None


def count(jaxpr, primitive: str) -> int:
    """Count a primitive in a program and all programs inside it."""
    inner = sum(count(sub, primitive) for eqn in jaxpr.eqns for sub in jaxprs_in_params(eqn.params))
    return inner + sum(eqn.primitive.name == primitive for eqn in jaxpr.eqns)


@pytest.fixture
def loss():
    segments = pack_segments([[5, 3]], seq_len=8)
    spec = FlashSpec(backend=Marked(), window=None)
    return lambda q, k, v: jnp.sin(flash_attention(spec, q, k, v, None, segments)).sum()


@pytest.fixture
def qkv():
    return [jax.random.normal(jax.random.key(i), (1, 8, 2, 4)) for i in range(3)]


@pytest.mark.parametrize(
    ("policy", "forward_passes"),
    [
        (jax.checkpoint_policies.save_only_these_names(ATTENTION_OUT, ATTENTION_LSE), 1),
        (jax.checkpoint_policies.nothing_saveable, 2),
    ],
)
def test_saved_residuals_run_the_forward_kernel_once(loss, qkv, policy, forward_passes):
    step = jax.grad(jax.checkpoint(loss, policy=policy), (0, 1, 2))
    program = jax.jit(step).trace(*qkv).jaxpr
    assert count(program.jaxpr, FORWARD_PRIMITIVE) == forward_passes


def test_checkpointing_keeps_the_gradients(loss, qkv):
    policy = jax.checkpoint_policies.save_only_these_names(ATTENTION_OUT, ATTENTION_LSE)
    plain = jax.grad(loss, (0, 1, 2))(*qkv)
    saved = jax.grad(jax.checkpoint(loss, policy=policy), (0, 1, 2))(*qkv)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, plain, saved))
