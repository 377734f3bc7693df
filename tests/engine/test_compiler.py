"""Programs lowered from shapes are those that a step runs."""

import jax
import pytest
from selection import repeat

from jaxglue.engine.compiler import Lowering


@pytest.mark.parametrize(
    ("count", "dropout", "layers", "programs"), [repeat(1, 0.0, 1, 6), (2, 0.5, 1, 6), (1, 0.0, 3, 1)]
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
