"""Loss and gradients of an output projection, of published sizes: milliseconds of 16,384 tokens.

python benchmarks/loss.py --json benchmarks/results/loss.json

Vocabularies that are no multiples of 8 are measured with rows padded once, and as XLA pads them in every chunk;
capped logits by our kernels and by XLA.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from measure import milliseconds, table, write_results

from jaxglue.engine.compiler import jit_step
from jaxglue.ops.cross_entropy import chunks, linear_cross_entropy

TOKENS = 16_384


class Head(NamedTuple):
    """An output projection."""

    model: str
    V: int
    D: int
    softcap: float | None = None
    trained: bool = False


HEADS = {
    Head("Granite-3.3-8B", 49_159, 4096): ("kernels", "padded by XLA"),
    Head("Granite-3.3-8B", 49_159, 4096, trained=True): ("kernels", "padded by XLA"),
    Head("OLMo-3-7B", 100_278, 4096, trained=True): ("kernels", "padded by XLA"),
    Head("Qwen3-0.6B and a token", 151_937, 1024): ("kernels", "padded by XLA"),
    Head("Gemma-2-9B", 256_000, 3584, softcap=30.0): ("kernels",),
    Head("Gemma-2-9B", 256_000, 3584, softcap=30.0, trained=True): ("kernels", "XLA"),
}


def arguments(head: Head) -> tuple:
    """Return (hidden states, weight, targets, loss weights) of random values."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = 4 * jax.random.normal(keys[0], (TOKENS, head.D), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (head.V, head.D), jnp.bfloat16) * head.D**-0.5
    targets, weights = jax.random.randint(keys[2], (TOKENS,), 0, head.V), jax.random.uniform(keys[3], (TOKENS,))
    return x, weight.astype(jnp.float32) if head.trained else weight, targets, weights


def step_milliseconds(head: Head, by: str) -> float:
    """Return the time of the loss with its gradients."""
    loss = partial(linear_cross_entropy, softcap=head.softcap, backend="reference" if by == "XLA" else "triton")
    step = jit_step(jax.value_and_grad(loss, (0, 1) if head.trained else 0))
    padded = chunks.with_whole_rows if by != "padded by XLA" else lambda weight, itemsize: weight
    with mock.patch.object(chunks, "with_whole_rows", padded):
        return milliseconds(step, *arguments(head), budget=300, repeats=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    results = []
    for head, by in ((head, by) for head, forms in HEADS.items() for by in forms):
        results.append({**head._asdict(), "by": by, "ms": round(step_milliseconds(head, by), 2)})
        print(*results[-1].values(), flush=True)
    print(table(results))
    if args.json:
        write_results(args.json, results)


if __name__ == "__main__":
    main()
