"""Time packing metadata in a training step: rebuilt in every layer, built once, and ours.

python benchmarks/packed_metadata.py --json benchmarks/results/packed_metadata.json
python benchmarks/packed_metadata.py --quantize nf4 --shapes qwen3-14b       # QLoRA, of which the published gain is

Four ways through the same decoder layers (bfloat16 or quantized base, LoRA of rank 16 on all linear layers, full
recomputation in the backward pass, dispatched layer by layer as in training):

- dense, rebuilt: every layer makes a causal T×T mask from the segments and attends under it
- dense, cached:  the same attention, its mask made once per batch
- ours, rebuilt:  our attention, but every layer finds the segments' bounds and the rotary tables again
- ours:           both once per batch

Embedding, output projection and optimizer, the same for all, are left out. The layers of a model share one layer's
weights, which changes neither time nor shapes. The metadata's time is its GPU time once per batch (kernels and copies,
from a profile) plus, where it is rebuilt, the step's time beyond that with cached metadata. Packing in numpy, on the
host while the GPU is busy, has its own column.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool
from measure import device_milliseconds, milliseconds, table, uniform_lengths, write_results
from shapes import SHAPES

from jaxglue.engine import embed_head
from jaxglue.engine.layer import LayerFunctions
from jaxglue.engine.policy import PRESETS
from jaxglue.models import build_model, config_from_hf
from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import PackedContext
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import split_model
from jaxglue.ops.attention import packed_attention
from jaxglue.ops.norm_rope import norm_and_rotate
from jaxglue.ops.quant.formats import FORMATS
from jaxglue.ops.segments import PackedSegments, pack_segments

PUBLISHED = {
    "qwen3-14b": "forward +43.3%, backward +5.8%, batch +14.3% once cached (QLoRA)",
    "llama-3.2-1b": "step −11.5% once cached",
    "qwen3-0.6b": "step −14.8% once cached",
}
CACHED = {"dense, rebuilt": "dense, cached", "ours, rebuilt": "ours"}


def dense_mask(segments: PackedSegments) -> Bool[Array, "B 1 T T"]:
    """Return which keys are visible to each query."""
    index = jnp.arange(segments.starts.shape[1])
    causal = index[None, None, :] <= index[None, :, None]
    return (causal & (index[None, None, :] >= segments.starts[:, :, None]))[:, None]


def bounds_from_ids(segments: PackedSegments) -> PackedSegments:
    """Recompute positions, starts and ends on the device from the segment ids."""
    ids, T = segments.segment_ids, segments.segment_ids.shape[1]
    index = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), ids.shape)
    first = ids != jnp.pad(ids, ((0, 0), (1, 0)))[:, :-1]
    last = ids != jnp.pad(ids, ((0, 0), (0, 1)))[:, 1:]
    starts = jax.lax.cummax(jnp.where(first, index, 0), axis=1)
    ends = jax.lax.cummin(jnp.where(last, index + 1, T), axis=1, reverse=True)
    return replace(segments, positions=index - starts, starts=jnp.where(ids > 0, starts, T), ends=ends)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DenseContext(PackedContext):
    """A layer's context with a T×T mask; None to build it in the layer."""

    mask: Bool[Array, "B 1 T T"] | None

    def attend(self, q, k, v, *, window=None, sinks=None, softcap=None):
        mask = dense_mask(self.segments) if self.mask is None else self.mask
        implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=implementation)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RebuiltContext(PackedContext):
    """A layer's context that recomputes bounds and rotary tables."""

    config: DecoderConfig = field(metadata={"static": True})

    def rotate(self, q, k, rotary, norms=None, factor=1.0, *, at_once=False):
        tables = self.config.rope_tables(bounds_from_ids(self.segments).positions)
        return norm_and_rotate(q, k, tables, rotary, norms=norms, factor=factor)

    def attend(self, q, k, v, *, window=None, sinks=None, softcap=None):
        options = {"window": window, "sinks": sinks, "softcap": softcap, "backend": self.backend}
        return packed_attention(q, k, v, bounds_from_ids(self.segments), **options)


def install(config: DecoderConfig) -> None:
    """Let a model's layers recompute bounds and rotary tables, in this process and from now on."""
    embed_head.PackedContext = partial(RebuiltContext, config=config)  # type: ignore[misc]


class Stack:
    """One layer's functions and weights, run as many times as the model has layers."""

    def __init__(self, shape: str, layers: int | None, quantize: str = "none"):
        config = config_from_hf({**SHAPES[shape], "num_hidden_layers": 1, "vocab_size": 256}).quantized(quantize)
        model = build_model(config, rngs=nnx.Rngs(0))
        add_lora(model, LoraConfig(rank=16), rngs=nnx.Rngs(1))
        graphdefs, trainable, frozen = split_model(model, nnx.LoRAParam)
        self.config, self.depth = config, layers or SHAPES[shape]["num_hidden_layers"]
        self._functions = LayerFunctions(graphdefs.layers[0], PRESETS["full"])
        self._weights = trainable["layers"][0], frozen["layers"][0]

    def forward(self, x, context):
        """Return the last layer's output, and each layer's input and residuals."""
        kept = []
        for _ in range(self.depth):
            y, residuals, _ = self._functions.forward(*self._weights, x, context)
            kept.append((x, residuals))
            x = y
        return x, kept

    def step(self, x, make_context):
        """Run metadata, forward and backward; return the sum of the layers' gradients."""
        context = make_context()
        y, kept = self.forward(x, context)
        dx, gradients = jnp.ones_like(y), None
        while kept:
            x, residuals = kept.pop()
            dx, gradients, *_ = self._functions.backward(residuals, *self._weights, x, context, dx, gradients)
        return dx, gradients


def contexts(config: DecoderConfig, segments: PackedSegments) -> dict:
    """Return, for each way, a function that builds the layers' context from numpy metadata once per batch.

    Ways that rebuild metadata come after those that they are compared with.
    """
    rope = jax.jit(config.rope_tables)
    mask = jax.jit(dense_mask)

    def shared() -> dict:
        on_device = jax.device_put(segments)
        return {"segments": on_device, "rope": rope(on_device.positions)}

    def cached() -> DenseContext:
        parts = shared()
        return DenseContext(**parts, mask=mask(parts["segments"]))

    return {
        "ours": lambda: PackedContext(**shared()),
        "ours, rebuilt": lambda: RebuiltContext(**shared(), config=config),
        "dense, cached": cached,
        "dense, rebuilt": lambda: DenseContext(**shared(), mask=None),
    }


def measure(shape: str, tokens: int, layers: int | None, quantize: str = "none") -> Iterator[dict]:
    """Yield a row for each way."""
    stack, lengths = Stack(shape, layers, quantize), uniform_lengths(tokens)
    pack = partial(pack_segments, [lengths], seq_len=tokens)
    x = jax.random.normal(jax.random.key(0), (1, tokens, stack.config.hidden_size), jnp.bfloat16)
    times, host = {}, milliseconds(pack)
    for way, make in contexts(stack.config, pack()).items():
        forward = milliseconds(lambda make=make: stack.forward(x, make())[0], repeats=3)
        times[way] = forward, milliseconds(stack.step, x, make, repeats=3), device_milliseconds(make)
        yield {**row(shape, tokens, way, times, host), "base": quantize}


def row(shape: str, tokens: int, way: str, times: dict[str, tuple[float, float, float]], host: float) -> dict:
    """Return a row of the table from all ways' (forward, step, metadata once per batch) in ms."""
    forward, step, metadata = times[way]
    if way in CACHED:
        metadata += step - times[CACHED[way]][1]
    return {
        "model": shape,
        "tokens": tokens,
        "metadata": way,
        "forward ms": round(forward, 2),
        "backward ms": round(step - forward, 2),
        "step ms": round(step, 2),
        "metadata ms": round(metadata, 3),
        "metadata's share": f"{metadata / step:.2%}",
        "host ms": round(host, 3),
        "published": PUBLISHED.get(shape, "-"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(PUBLISHED))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, help="layers, by default the model's")
    parser.add_argument("--quantize", choices=FORMATS, default="none", help="the base's storage")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    results = []
    for shape in args.shapes:
        for result in measure(shape, args.tokens, args.layers, args.quantize):
            results.append(result)
            print(*result.values(), sep="  ", flush=True)
            if args.json:
                write_results(args.json, results)
    print(table(results))


if __name__ == "__main__":
    main()
