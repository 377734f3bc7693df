"""What packing metadata costs in a training step: rebuilt in every layer, built once, and ours.

python benchmarks/packed_metadata.py --json benchmarks/results/packed_metadata.json

Three ways through the same decoder layers (bfloat16 base, LoRA of rank 16 on all linear layers, every layer's
activations kept, dispatched layer by layer as in training):

- rebuilt: every layer makes a dense causal mask from the segments and attends under it
- cached:  the same attention, its dense mask made once per batch
- ours:    `PackedSegments` once per batch, attention that never has a dense mask

Embedding, output projection and optimiser are left out: they are the same. The layers of a model share one layer's
weights, which changes neither time nor shapes. Metadata's share of a step is, for rebuilt, what cached saves of it;
for cached, the mask; for ours, segments to the device and rotary tables. The numpy part of ours runs on the host
while the device is busy, and has a column of its own.
"""

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from inputs import SHAPES
from jaxtyping import Array, Bool, Float
from measure import milliseconds, table, uniform_lengths, write_results

from jaxglue.lora import LoraConfig, add_lora
from jaxglue.memory.layer import LayerFunctions
from jaxglue.memory.policy import PRESETS
from jaxglue.models import build_model, config_from_hf
from jaxglue.models.context import PackedContext
from jaxglue.parameters import split_model
from jaxglue.rope import apply_rope, rope_tables
from jaxglue.segments import PackedSegments, pack_segments

PUBLISHED = {
    "qwen3-14b": "forward +43.3%, backward +5.8%, batch +14.3% once cached (QLoRA)",
    "llama-3.2-1b": "step −11.5% once cached",
    "qwen3-0.6b": "step −14.8% once cached",
}


def dense_mask(segments: PackedSegments) -> Bool[Array, "B 1 T T"]:
    """Which keys each query sees."""
    index = jnp.arange(segments.starts.shape[1])
    causal = index[None, None, :] <= index[None, :, None]
    return (causal & (index[None, None, :] >= segments.starts[:, :, None]))[:, None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DenseContext:
    """A layer's context with a dense mask; None to make it in the layer."""

    segments: PackedSegments
    cos: Float[Array, "B T half"]
    sin: Float[Array, "B T half"]
    mask: Bool[Array, "B 1 T T"] | None
    dropout_key: None = None

    def rotate(self, x):
        return apply_rope(x, self.cos, self.sin)

    def attend(self, q, k, v, *, window=None, sinks=None, scale=None):
        mask = dense_mask(self.segments) if self.mask is None else self.mask
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=_dense_implementation())


def _dense_implementation() -> str:
    return "cudnn" if jax.default_backend() == "gpu" else "xla"


class Stack:
    """One layer's functions and weights, run as many times as the model has layers."""

    def __init__(self, shape: str, layers: int | None):
        config = config_from_hf({**SHAPES[shape], "num_hidden_layers": 1, "vocab_size": 256})
        model = build_model(config, rngs=nnx.Rngs(0))
        add_lora(model, LoraConfig(rank=16), rngs=nnx.Rngs(1))
        structure, trainable, frozen = split_model(model, nnx.LoRAParam)
        self.config, self.depth = config, layers or SHAPES[shape]["num_hidden_layers"]
        self._functions = LayerFunctions(structure.layers[0], PRESETS["none"])
        self._weights = trainable["layers"][0], frozen["layers"][0]

    def forward(self, x, context):
        """The last layer's output, and what each layer keeps."""
        kept = []
        for _ in range(self.depth):
            y, residuals = self._functions.forward(*self._weights, x, context)
            kept.append((x, residuals))
            x = y
        return x, kept

    def step(self, x, make_context):
        """Metadata, forward and backward; the sum of the layers' gradients."""
        context = make_context()
        y, kept = self.forward(x, context)
        dx, gradients = jnp.ones_like(y), None
        while kept:
            x, residuals = kept.pop()
            dx, gradients, _ = self._functions.backward(residuals, *self._weights, x, context, dx, gradients)
        return dx, gradients


def contexts(config, segments: PackedSegments) -> dict:
    """For each way a function that makes the layers' context from numpy metadata: what is done once per batch."""
    rope = jax.jit(lambda positions: rope_tables(positions, config.rope, config.head_dim))
    mask = jax.jit(dense_mask)

    def make(way: str):
        on_device = jax.device_put(segments)
        cos, sin = rope(on_device.positions)
        shared = {"segments": on_device, "cos": cos, "sin": sin}
        if way == "ours":
            return PackedContext(**shared)
        return DenseContext(**shared, mask=None if way == "rebuilt" else mask(on_device))

    return {way: partial(make, way) for way in ("rebuilt", "cached", "ours")}


def measure(shape: str, tokens: int, layers: int | None) -> list[dict]:
    """A row for each way."""
    stack, lengths = Stack(shape, layers), uniform_lengths(tokens)
    pack = partial(pack_segments, [lengths], seq_len=tokens)
    x = jax.random.normal(jax.random.key(0), (1, tokens, stack.config.hidden_size), jnp.bfloat16)
    rows, host = [], milliseconds(pack)
    for way, make in contexts(stack.config, pack()).items():
        forward = milliseconds(lambda make=make: stack.forward(x, make())[0])
        step = milliseconds(stack.step, x, make)
        row = {"model": shape, "tokens": tokens, "metadata": way, "forward ms": forward, "backward ms": step - forward}
        rows.append(row | {"step ms": step, "metadata ms": milliseconds(make), "host ms": host})
    rows[0]["metadata ms"] += rows[0]["step ms"] - rows[1]["step ms"]
    for row in rows:
        share = row["metadata ms"] / row["step ms"]
        row.update({key: round(value, 3) for key, value in row.items() if isinstance(value, float)})
        row |= {"share of the step": f"{share:.2%}", "published": PUBLISHED.get(shape, "-")}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(PUBLISHED))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, help="layers, by default the model's")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    results = []
    for shape in args.shapes:
        results += measure(shape, args.tokens, args.layers)
        print(table(results[-3:]), flush=True)
    if args.json:
        write_results(args.json, results)


if __name__ == "__main__":
    main()
