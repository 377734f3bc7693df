"""Programs lowered from shapes are those that a step runs."""

import jax
import jax.numpy as jnp
import pytest
from selection import repeat, repeats_parts_of

from jaxglue.engine.compiler import Lowering, jit_step, rounding_as_written
from jaxglue.ops.equations import equations
from jaxglue.ops.norm_rope import rms_norm
from jaxglue.ops.rope import apply_rope


@repeats_parts_of("test_compilations_do_not_depend_on_depth")
@pytest.mark.parametrize(
    ("count", "dropout", "layers", "programs"), [repeat(1, 0.0, 1, 6), (2, 0.5, 1, 6), repeat(1, 0.0, 3, 1)]
)
def test_a_step_compiles_no_lowered_program_again(split_parts, random_batch, count, dropout, layers, programs):
    """Embedding, head and two kinds of layers forward and backward, or one program of all."""
    parts, compiled = split_parts("lora", dropout=dropout), []
    batches = [jax.device_put(random_batch([[5, 1, 7], [12]], 14, seed=seed)) for seed in range(count)]
    key = jax.random.key(0) if dropout else None
    executor = parts.executor("1 x full & 2 x dots", layers_per_program=layers)

    def note(event, duration, *, fun_name="", **_):
        compiled.extend([fun_name] if event == "/jax/core/compile/backend_compile_duration" else [])

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        Lowering(executor.trace_step(parts.trainable, parts.frozen, batches, key)).compile()
        lowered = compiled[:]
        executor.loss_and_gradients(parts.trainable, parts.frozen, batches, 30.0, key)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert len(lowered) == programs
    assert not set(lowered) & set(compiled[len(lowered) :])


@pytest.mark.parametrize("nested", [False, True])
def test_programs_round_alike_whatever_they_fuse(nested):
    """Or sampling would compute other log-probabilities than training by the same code."""
    norm = lambda x: rms_norm(x, jnp.full(64, 1.3, jnp.bfloat16), 1e-6)  # noqa: E731
    turn = lambda x: apply_rope(x, jnp.full((1, 9, 32), 0.9), jnp.full((1, 9, 32), 0.4))  # noqa: E731
    x = jax.random.normal(jax.random.key(0), (1, 9, 4, 64), jnp.bfloat16)
    with rounding_as_written():
        parts = [jit_step(part) for part in (norm, turn)]
        whole = jit_step(lambda x: parts[1](parts[0](x)) if nested else turn(norm(x)))
    assert (whole(x) == parts[1](parts[0](x))).all()
    assert not (jit_step(lambda x: turn(norm(x)))(x) == whole(x)).all()  # XLA's default, a bit more exact


def products(executor, parts, batch) -> list:
    """Return the precisions of a step's products of float32."""
    traced = executor.trace_step(parts.trainable, parts.frozen, [batch])
    found = [equation for program in traced for equation, _ in equations(program.jaxpr.jaxpr)]
    found = [each for each in found if each.primitive.name == "dot_general"]
    return [each.params["precision"] for each in found if each.invars[0].aval.dtype == jnp.float32]


@pytest.mark.parametrize("layers", [1, 3])
def test_products_of_a_float32_model_are_not_rounded_to_tf32(split_parts, random_batch, layers):
    """Where JAX's own setting names no precision; models of other dtypes multiply as before."""
    parts, batch = split_parts("lora"), jax.device_put(random_batch([[5, 1, 7], [12]], 14))
    executor = parts.executor("full", layers_per_program=layers)
    whole = products(executor, parts, batch)
    assert len(whole) > 50 and set(whole) == {(jax.lax.Precision.HIGHEST,) * 2}
    with jax.default_matmul_precision("tensorfloat32"):
        assert (jax.lax.Precision.HIGH,) * 2 in products(executor, parts, batch)
    half = parts.executor("full", layers_per_program=layers, dtype=jnp.bfloat16)
    assert None in products(half, parts, batch)
