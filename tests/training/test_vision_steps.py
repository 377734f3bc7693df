"""Ten steps of adapters on texts, towers and projectors beside PEFT; goldens by tests/goldens/make_vision_steps.py."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from selection import repeats_parts_of

from jaxglue.data.batch import Batch
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import parse_policies
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import flatten_names
from jaxglue.training.adamw import AdamWOptimizer
from jaxglue.training.config import OptimizerConfig
from tests.goldens.drawn import probes, unpacked
from tests.models.test_vision import documents_of, drawn_model, packed, read_golden
from tests.training.test_family_steps import drawn_adapters

GOLDENS = Path(__file__).parents[1] / "goldens/vision_steps"
NAMES = sorted(path.stem for path in GOLDENS.glob("*.safetensors"))


@repeats_parts_of("test_logits_loss_and_gradients_match_transformers")
@pytest.mark.parametrize("name", NAMES)
def test_adapters_move_in_ten_steps_as_pefts(name):
    golden, (raw, first) = unpacked(load_file(GOLDENS / f"{name}.safetensors")), read_golden(name)
    model = drawn_model(raw, trains="all")
    add_lora(model, LoraConfig(rank=2, alpha=8, targets=("all-linear",)), rngs=nnx.Rngs(0))
    graphdefs, trainable, frozen, before = drawn_adapters(model, golden)
    policies = parse_policies("dots", len(graphdefs.layers))
    executor = Executor(graphdefs, model.config, policy=policies, dtype=jnp.float32)
    rate = float(golden.get("rate", 1e-2))
    settings = OptimizerConfig(learning_rate=rate, clip_norm=0, weight_decay=0, warmup_ratio=0, schedule="constant")
    optimizer = AdamWOptimizer(settings, total_steps=10)
    state, losses = optimizer.init(trainable), []
    for step in range(10):
        processor, documents = documents_of(raw, first, 100 * step)
        tokens, segments, images = packed(raw, processor, documents)
        same = segments.segment_ids[:, :-1] == segments.segment_ids[:, 1:]
        weights = np.pad(same & (segments.segment_ids[:, :-1] > 0), ((0, 0), (0, 1))).astype(np.float32)
        targets = np.zeros_like(tokens)
        targets[0, : len(first["tokens"]) - 1] = first["tokens"][1:]
        batch = Batch(tokens=tokens, targets=targets, loss_weights=weights, segments=segments, images=images)
        loss, gradients = executor.loss_and_gradients(trainable, frozen, [batch], float(weights.sum()))
        losses.append(float(loss))
        trainable, state, _ = optimizer.update(trainable, state, gradients, step)
    # Of goldens in float64, twice PyTorch's own distance from them in float32.
    loss_error, error = np.maximum((1e-5, 1e-4), 2 * golden.get("error", np.zeros(2)))
    np.testing.assert_allclose(losses, golden["losses"], rtol=loss_error)
    moved = {path: np.asarray(leaf) - before[path] for path, leaf in flatten_names(trainable).items()}
    whole = np.sqrt(sum(golden[f"norm.{path}"] ** 2 for path in moved))
    distances = [np.linalg.norm(probes(path, change) - golden[f"probes.{path}"]) for path, change in moved.items()]
    assert np.linalg.norm(distances) <= error * whole
