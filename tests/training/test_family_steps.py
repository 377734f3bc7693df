"""Ten steps of adapters beside PEFT, for each family; goldens by tests/goldens/make_family_steps.py."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from selection import repeats, repeats_parts_of

from jaxglue.data.batch import Batch
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import parse_policies
from jaxglue.hf.loading import load_model
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.ops.segments import pack_segments
from jaxglue.training.adamw import AdamWOptimizer
from jaxglue.training.config import OptimizerConfig
from tests.goldens.drawn import drawn, probes, unpacked
from tests.models.test_family_goldens import read_golden, write_folder

GOLDENS = Path(__file__).parents[1] / "goldens/family_steps"
NAMES = sorted(path.stem for path in GOLDENS.glob("*.safetensors"))
KEPT = ("gemma3_text",)
"""Those that run in `make test`."""


def batch_of(tokens, lengths):
    """Pack a step's documents into one row, all of whose next tokens count."""
    row = tokens[None]
    segments = pack_segments([lengths.tolist()], seq_len=row.shape[1])
    predicted = segments.ends - 1 > np.arange(row.shape[1])
    targets = np.roll(row, -1, axis=1)
    return Batch(tokens=row, targets=targets, loss_weights=predicted.astype(np.float32), segments=segments)


def drawn_adapters(model, golden):
    """Return graphdefs, adapters as in the golden's beginning, frozen parameters, and the adapters by name."""
    graphdefs, trainable, frozen = split_model(model, nnx.LoRAParam)
    names = iter(flatten_names(trainable))
    first = [
        drawn(path, leaf.shape) * ("lora_A" in path)
        for path, leaf in zip(names, jax.tree.leaves(trainable), strict=True)
    ]
    trainable = jax.tree.unflatten(jax.tree.structure(trainable), [jnp.asarray(leaf) for leaf in first])
    before = flatten_names(jax.tree.map(np.array, trainable))
    assert before.keys() == {key.removeprefix("norm.") for key in golden if key.startswith("norm.")}
    return graphdefs, trainable, frozen, before


@repeats_parts_of("test_losses_norms_and_metrics_are_those_of_sft_trainer")
@pytest.mark.parametrize("name", repeats(NAMES, *(set(NAMES) - set(KEPT))))
def test_adapters_move_in_ten_steps_as_pefts(name, tmp_path):
    golden, (raw, _) = unpacked(load_file(GOLDENS / f"{name}.safetensors")), read_golden(name)
    model = load_model(write_folder(tmp_path, raw), dtype=jnp.float32)
    add_lora(model, LoraConfig(rank=2, alpha=8, targets=("all-linear",)), rngs=nnx.Rngs(0))
    graphdefs, trainable, frozen, before = drawn_adapters(model, golden)
    policies = parse_policies("dots", len(graphdefs.layers))
    executor = Executor(graphdefs, model.config, policy=policies, dtype=jnp.float32)
    rate = float(golden.get("rate", 1e-2))
    settings = OptimizerConfig(learning_rate=rate, clip_norm=0, weight_decay=0, warmup_ratio=0, schedule="constant")
    optimizer = AdamWOptimizer(settings, total_steps=10)
    state, losses = optimizer.init(trainable), []
    for step, tokens in enumerate(golden["tokens"]):
        batch = batch_of(tokens, golden["lengths"])
        loss, gradients = executor.loss_and_gradients(trainable, frozen, [batch], float(batch.loss_weights.sum()))
        losses.append(float(loss))
        trainable, state, _ = optimizer.update(trainable, state, gradients, step)
    np.testing.assert_allclose(losses, golden["losses"], rtol=1e-5)
    moved = {path: np.asarray(leaf) - before[path] for path, leaf in flatten_names(trainable).items()}
    whole = np.sqrt(sum(golden[f"norm.{path}"] ** 2 for path in moved))
    distances = [np.linalg.norm(probes(path, change) - golden[f"probes.{path}"]) for path, change in moved.items()]
    assert np.linalg.norm(distances) <= 1e-4 * whole
