"""Compare each operation of a layer in sampling and in training, on the same inputs: where do bits differ, how far?

    python benchmarks/rl_rounding.py --shape qwen3-8b --json benchmarks/results/rl_rounding.json
    python benchmarks/rl_rounding.py --shape qwen3-8b --exact --forms "without excess precision"

A packed row has documents of equal length. Training computes all their tokens; sampling the last one of each, from
pages that hold the row's keys and values. Its operations get training's inputs, so differences do not add up, but for
`layer`, which is one program. `layout` is training again, on a row of half as many documents. Adapters are random.
Formulas tell where both sides round keys: the share of their values that equals sums of float64, rounded there.
With --exact both sides compute as with exact sampling, whose shares are all 100%.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from measure import table, write_results
from shapes import SHAPES

from jaxglue.engine.compiler import STEP_OPTIONS
from jaxglue.generation.contexts import Cursor, DecodeContext, Places
from jaxglue.generation.pages import PAGE
from jaxglue.hf.loading import random_model
from jaxglue.models import config_from_hf
from jaxglue.models.context import PackedContext
from jaxglue.models.layers import copied
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.vocabulary import output_matrix
from jaxglue.ops.cross_entropy import linear_log_probs, trained_log_probs
from jaxglue.ops.paged_attention import KVPages, append, append_in_order, make_pages, paged_attention
from jaxglue.ops.projection import adapted_projection, project
from jaxglue.ops.projection.fp8_adapters import FP8Rows
from jaxglue.ops.projection.ordered import ordered_products
from jaxglue.ops.segments import pack_segments

FORMS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "without excess precision": {"xla_allow_excess_precision": False},
}


class Layer:
    """A layer with adapters, and the operations of both sides.

    Args:
        shape: config.json of the model.
        sequences, tokens: documents, and tokens in each.
        storage: of the matrices.
        options: of XLA, beside those of either side.
        exact: compute as with exact sampling.
    """

    def __init__(
        self,
        shape: dict[str, Any],
        sequences: int,
        tokens: int,
        storage: Any,
        options: dict[str, Any],
        *,
        exact: bool = False,
    ):
        self.exact = exact
        self.config = config_from_hf(shape | {"num_hidden_layers": 1}).quantized(storage)
        self.tokens, self._options = tokens, options
        model = random_model(self.config)
        add_lora(model, LoraConfig(rank=16, alpha=32), rngs=nnx.Rngs(1))
        self.graphdef, adapters, others = nnx.split(model, nnx.LoRAParam, ...)
        key = jax.random.key(3)
        self.state = nnx.merge_state(
            jax.tree.map(lambda x: x + 0.01 * jax.random.normal(key, x.shape, x.dtype), adapters), others
        )
        self.x = jax.random.normal(key, (1, sequences * tokens, self.config.hidden_size), jnp.bfloat16)

    def context(self, sequences: int) -> PackedContext:
        """Return training's context."""
        segments = pack_segments([[self.tokens] * sequences], seq_len=sequences * self.tokens)
        positions = jnp.asarray(segments.positions)
        rope = self.config.rope_tables(positions)
        return PackedContext(segments=jax.device_put(segments), rope=rope, exact=self.exact)

    def run(self, function: Callable, *arguments: Any, training: bool) -> Any:
        """Compile a function of (model, *arguments) as either side's programs are; return its results."""
        program = jax.jit(lambda state, *arguments: function(nnx.merge(self.graphdef, state), *arguments))
        options = self._options | (STEP_OPTIONS if (training or self.exact) and jax.default_backend() == "gpu" else {})
        return program.lower(self.state, *arguments).compile(compiler_options=options or None)(self.state, *arguments)


def output_of(model) -> jax.Array:
    """Return the output projection."""
    return output_matrix(model.embed_tokens if model.lm_head is None else model.lm_head)


def norm(model, x, context):
    layer = model.layers[0]
    return layer.norm_named(layer.norms.before_attention).fork(x, layer.token_mixer.inputs, context)[1]


def projected(model, normed, context):
    layer = model.layers[0]
    out = adapted_projection(copied(normed), layer.token_mixer.inputs, context)
    return tuple(y.reshape(*y.shape[:2], -1, layer.token_mixer.head_dim) for y in out)


def rotated(model, q, k, context):
    mixer = model.layers[0].token_mixer
    return context.rotate(q, k, mixer.rotary, mixer.head_norms, mixer.query_factor)


def attention_output(model, x, attended, context):
    return x + model.layers[0].token_mixer.output(attended, None, context)


def fed_forward(model, x, context):
    layer = model.layers[0]
    normed = layer.norm_named(layer.norms.before_mlp).fork(x, layer.ffn.inputs, context)[1]
    return x + layer.ffn(normed, context)


def training_values(layer: Layer, sequences: int) -> dict[str, Any]:
    """Return the values of all of training's operations on the first documents, one after another."""
    context, x = layer.context(sequences), layer.x[:, : sequences * layer.tokens]

    def run(function: Callable, *arguments: Any) -> Any:
        return layer.run(function, *arguments, training=True)

    found: dict[str, Any] = {"x": x, "norm": run(norm, x, context)}
    found["q"], found["k"], found["v"] = run(projected, found["norm"], context)
    found["rotated q"], found["rotated k"] = run(rotated, found["q"], found["k"], context)
    heads = found["rotated q"], found["rotated k"], found["v"]
    found["attention"] = run(lambda _, *heads: context.attend(*heads), *heads)
    found["attention output"] = run(attention_output, x, found["attention"], context)
    found["feed-forward"] = run(fed_forward, found["attention output"], context)
    found["layer"] = run(lambda model, x, context: model.layers[0](x, context), x, context)
    targets = jnp.arange(x.shape[1]) * 31 % layer.config.vocab_size
    found["log-probabilities"] = run(
        lambda model, x: linear_log_probs(
            model.norm(x[0], exact=layer.exact), output_of(model), targets, jnp.ones(len(targets)), exact=layer.exact
        )[None],
        found["feed-forward"],
    )
    return found


def sampling_values(layer: Layer, known: dict[str, Any], sequences: int) -> dict[str, Any]:
    """Return the values of sampling's operations on the last tokens, from training's values before them."""
    T, P = layer.tokens, -(-layer.tokens // PAGE)
    last = np.arange(sequences) * T + T - 1
    positions = jnp.full(sequences, T - 1, jnp.int32)
    tables = jnp.arange(1, 1 + sequences * P, dtype=jnp.int32).reshape(sequences, P)
    K, H = known["k"].shape[2:]

    def paged(values):
        own = values[0].reshape(sequences, T, K, H)
        own = jnp.pad(own, ((0, 0), (0, P * PAGE - T), (0, 0), (0, 0)))
        return own.reshape(sequences * P, PAGE, K, H).swapaxes(1, 2)

    empty = make_pages(1 + sequences * P, K, PAGE, H, jnp.bfloat16)
    cache = KVPages(
        keys=empty.keys.at[1:].set(paged(known["rotated k"])), values=empty.values.at[1:].set(paged(known["v"]))
    )
    rope = layer.config.rope_tables(positions[None])
    windows = tuple(dict.fromkeys(kind.window for kind in layer.config.layer_kinds))
    pages = tables[jnp.arange(sequences), positions // PAGE]
    places = Places(pages=(pages,), offsets=positions % PAGE, slots=jnp.arange(sequences), windows=windows)
    forks = jnp.full(sequences, T, jnp.int32) if layer.exact else None  # documents without continuations
    at: dict[str, Any] = {"slots": jnp.arange(sequences), "positions": positions, "rope": rope, "forks": forks}
    cursor = Cursor(places=places, tables=(tables,), **at)
    few = {name: tokens_of(values, last) for name, values in known.items()}

    def decoding():
        return DecodeContext(cache, cursor)

    def run(function: Callable, *arguments: Any) -> Any:
        return layer.run(function, *arguments, training=False)

    mixer_of = lambda model: model.layers[0].token_mixer  # noqa: E731
    found: dict[str, Any] = {"norm": run(lambda model, x: norm(model, x, decoding()), few["x"])}
    found["q"], found["k"], found["v"] = run(lambda model, x: projected(model, x, decoding()), few["norm"])

    def written(model, q, k, v):
        mixer = mixer_of(model)
        turned = mixer.rotary, mixer.head_norms, mixer.query_factor
        if layer.exact:
            rotated, after = append_in_order(q[0], k[0], v[0], cache, pages, places.offsets, rope, *turned)
            return rotated, after.keys[pages, :, places.offsets]
        return append(q[0], k[0], v[0], cache, pages, places.offsets, rope, *turned)[:2]

    found["rotated q"], found["rotated k"] = (x[None] for x in run(written, few["q"], few["k"], few["v"]))
    found["attention"] = run(
        lambda _, q: paged_attention(q[0], cache, tables, positions, forks=forks)[None], few["rotated q"]
    )
    found["attention output"] = run(
        lambda model, x, attended: attention_output(model, x, attended, decoding()), few["x"], few["attention"]
    )
    found["feed-forward"] = run(lambda model, x: fed_forward(model, x, decoding()), few["attention output"])
    found["layer"] = run(lambda model, x: model.layers[0](x, decoding()), few["x"])
    targets = jnp.asarray(last) * 31 % layer.config.vocab_size

    def log_probs(model, x):
        hidden, matrix = model.norm(x[0], exact=layer.exact), output_of(model)
        if layer.exact:
            return trained_log_probs(hidden, matrix, ordered_products(hidden, [matrix], jnp.float32)[0], targets)[None]
        logits = project(hidden, matrix, jnp.float32)
        return (logits[jnp.arange(len(targets)), targets] - jax.nn.logsumexp(logits, -1))[None]

    found["log-probabilities"] = run(log_probs, few["feed-forward"])
    return found


def formulas(layer: Layer, known: dict[str, Any], few: dict[str, Any], last: np.ndarray) -> list[dict[str, str]]:
    """Compare both sides' keys with sums of float64 that are rounded in several places."""
    part = nnx.merge(layer.graphdef, layer.state).layers[0].token_mixer.inputs[1]
    exact = lambda array: np.asarray(jnp.asarray(array).astype(jnp.float32), np.float64)  # noqa: E731
    rounded = lambda array: exact(jnp.asarray(array, jnp.float32).astype(jnp.bfloat16))  # noqa: E731
    x = exact(known["norm"][0, last])
    product = x @ exact(part.weight).T
    adapted = rounded(x @ rounded(part.adapter.A).T) @ rounded(part.adapter.up).T
    places = {
        "the sum": rounded(product + adapted),
        "adapter's product, sum": rounded(product + rounded(adapted)),
        "product, sum": rounded(rounded(product) + adapted),
        "both products, sum": rounded(rounded(product) + rounded(adapted)),
    }
    sides = {"training": known["k"][0, last], "sampling": few["k"][0]}
    found = {side: exact(values).reshape(len(last), -1) for side, values in sides.items()}
    return [
        {"rounded": name} | {side: f"{(values == want).mean():.3%}" for side, values in found.items()}
        for name, want in places.items()
    ]


def tokens_of(values: Any, tokens: Any) -> Any:
    """Return the values [1, T, …] of some tokens, of e4m3 rows too."""
    if not isinstance(values, FP8Rows):
        return values[:, tokens]
    return values._replace(**{name: x[:, tokens] for name, x in values._asdict().items() if name != "weight"})


def compare(got: Any, want: Any) -> tuple[str, str]:
    """Return the share of equal values, and the relative difference."""
    got, want = (
        np.float64(x.fp8_values) * np.asarray(x.scales) if isinstance(x, FP8Rows) else np.float64(x)
        for x in (got, want)
    )
    return f"{(got == want).mean():.3%}", f"{np.linalg.norm(got - want) / np.linalg.norm(want):.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--config", type=Path, help="config.json of another shape")
    parser.add_argument("--matmul", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=[*FORMS])
    parser.add_argument("--exact", action="store_true", help="compute both sides as with exact sampling")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    for form in args.forms:
        options = FORMS[form]
        layer = Layer(
            json.loads(args.config.read_text()) if args.config else SHAPES[args.shape],
            args.sequences,
            args.tokens,
            "fp8" if args.matmul == "fp8" else "none",
            options,
            exact=args.exact,
        )
        many = training_values(layer, args.sequences)
        few = sampling_values(layer, many, args.sequences)
        half = args.sequences // 2
        layout = training_values(layer, half)
        last = np.arange(args.sequences) * args.tokens + args.tokens - 1
        for name, values in few.items():
            (equal, far), (same, moved) = (
                compare(values, tokens_of(many[name], last)),
                compare(layout[name], tokens_of(many[name], slice(half * args.tokens))),
            )
            sides = {"equal": equal, "difference": far, "layout: equal": same, "layout: difference": moved}
            results.append({"XLA": form, "operation": name} | sides)
        print(table(results[-len(few) :]), flush=True)
        if args.matmul == "bf16":
            print(table(formulas(layer, many, few, last)), flush=True)
        if args.json:
            write_results(args.json, results)


if __name__ == "__main__":
    main()
