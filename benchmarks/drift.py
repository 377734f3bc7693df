"""Train Qwen3-0.6B's shape by our kernels in bf16 beside the same in float32 without them; print losses as JSON.

    python benchmarks/drift.py --steps 30
    python benchmarks/drift.py --tokens 4096 --document 4096 --window 1024

Adapters start at B = 0, on random weights that bf16 holds: small values added to large ones have no bits in bf16, which
random adapters do not show. Rows are packed with Python's own sources, two bytes a token. The references, in bf16 too,
are plain JAX with full precision in float32's matmuls. Without a GPU the shape is a tiny one.
"""

import argparse
import json
import sysconfig
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from measure import uniform_lengths
from sft_ours import make_batch
from shapes import SHAPES

from jaxglue.data.batch import Batch
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import parse_policy
from jaxglue.hf.loading import random_model
from jaxglue.models import config_from_hf
from jaxglue.models.config import DecoderConfig
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import split_model
from jaxglue.ops.adam import ADAM
from jaxglue.ops.attention import ATTENTION
from jaxglue.ops.cross_entropy import CROSS_ENTROPY
from jaxglue.ops.delta_rule import DELTA_ROWS, DELTA_RULE
from jaxglue.ops.delta_rule.chunks import ChunkedDeltaRule
from jaxglue.ops.gated_mlp.swiglu import LORA_SWIGLU
from jaxglue.ops.norm_rope import NORM_ROPE
from jaxglue.ops.projection.lora import LORA
from jaxglue.ops.segments import segment_bucket
from jaxglue.ops.small_layer import SMALL_LAYER
from jaxglue.training.adamw import AdamWOptimizer
from jaxglue.training.config import OptimizerConfig

OPERATIONS = ADAM, ATTENTION, CROSS_ENTROPY, DELTA_ROWS, LORA, LORA_SWIGLU, NORM_ROPE, SMALL_LAYER
"""Operations of a Qwen3 or Qwen3.5 that have kernels, but for the delta rule."""


def source_batches(count: int, tokens: int, vocabulary: int, document: int | None = None) -> list[Batch]:
    """Return rows of consecutive documents of so many tokens, or of 64–1,024, from Python's standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files)[: 2 * count * tokens], np.uint16)
    low, high = (document, document) if document else (64, 1024)
    lengths = [uniform_lengths(tokens, low, high, seed=row) for row in range(count)]
    slots = segment_bucket(max(map(len, lengths)))
    rows = text.reshape(count, tokens).astype(np.int32) % vocabulary
    return [make_batch(row, np.array(sizes), slots) for row, sizes in zip(rows, lengths, strict=True)]


def train(
    parts: tuple, config: DecoderConfig, batches: list[Batch], dtype, rate: float, *, reference: bool
) -> list[float]:
    """Return the loss of every batch, with AdamW between them."""
    graphdefs, trainable, frozen = parts
    trainable, frozen = jax.tree.map(jnp.copy, trainable), jax.tree.map(lambda x: x.astype(dtype), frozen)
    optimizer = AdamWOptimizer(OptimizerConfig(learning_rate=rate, schedule="constant", warmup_ratio=0.0), len(batches))
    # As planned for a small model; the reference keeps less.
    settings: dict[str, Any] = {"policy": parse_policy("dots" if reference else "none"), "dtype": dtype}
    settings["layers_per_program"] = 1 if reference else len(graphdefs.layers)
    executor, state = Executor(graphdefs, config, **settings), optimizer.init(trainable)
    losses = []
    with ExitStack() as plain:
        if reference:
            plain.enter_context(jax.default_matmul_precision("highest"))
            for operation in OPERATIONS:
                plain.enter_context(operation.using(None))
            plain.enter_context(DELTA_RULE.using(ChunkedDeltaRule()))  # a scan by tokens would take minutes
        for step, batch in enumerate(batches):
            weight = float(batch.loss_weights.sum())
            loss, gradients = executor.loss_and_gradients(trainable, frozen, [jax.device_put(batch)], weight)
            trainable, state, _ = optimizer.update(trainable, state, gradients, step)
            losses.append(loss)
    return [float(loss) for loss in losses]


def drift(losses: list[float], truth: list[float]) -> float:
    """Return the largest relative difference of losses, NaN if one is NaN."""
    return float(np.max(np.abs(np.subtract(losses, truth)) / truth))


def measure(
    shape: str,
    steps: int,
    tokens: int,
    rate: float,
    *,
    document: int | None = None,
    window: int | None = None,
    layers: int | None = None,
) -> dict[str, Any]:
    """Return the losses of the three runs, and the drift of those in bf16; a window is every layer's."""
    config = config_from_hf({**SHAPES[shape], **({"num_hidden_layers": layers} if layers else {})})
    if window:
        config = replace(config, layer_windows=(window,) * config.num_hidden_layers)
    model = random_model(config, dtype=jnp.bfloat16)
    add_lora(model, LoraConfig(rank=16), rngs=nnx.Rngs(0))
    parts = split_model(model, nnx.LoRAParam)
    batches = source_batches(steps, tokens, config.vocab_size, document)
    runs = {"float32": (jnp.float32, True), "reference": (jnp.bfloat16, True), "kernels": (jnp.bfloat16, False)}
    losses = {
        name: train(parts, config, batches, dtype, rate, reference=reference)
        for name, (dtype, reference) in runs.items()
    }
    found = {name: drift(losses[name], losses["float32"]) for name in ("reference", "kernels")}
    return {"shape": shape, "layers": config.num_hidden_layers, "drift": found, "losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape, tokens = ("tiny", 512) if jax.default_backend() == "cpu" else ("qwen3-0.6b", 2048)
    parser.add_argument("--shape", choices=SHAPES, default=shape)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=tokens, help="of a step's row")
    parser.add_argument("--document", type=int, help="tokens of a document; by default any from 64 to 1,024")
    parser.add_argument("--window", type=int, help="tokens that a query sees; by default its document's")
    parser.add_argument("--layers", type=int, help="of the model; by default the shape's")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    args = parser.parse_args()
    sizes = {"document": args.document, "window": args.window, "layers": args.layers}
    print(json.dumps(measure(args.shape, args.steps, args.tokens, args.learning_rate, **sizes)))


if __name__ == "__main__":
    main()
