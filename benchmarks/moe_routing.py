"""One layer of frozen experts: ways to send tokens to experts, forward and with the gradient to x.

python benchmarks/moe_routing.py --json benchmarks/results/moe_routing.json

The limit is the time of the assignments' matmuls at the rate of a large bfloat16 matmul. The slow ways run only for one
number of tokens and an even load.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from expert_loop import looped_mlp
from measure import milliseconds, table, write_results

from jaxglue.ops.moe import moe_mlp, route
from jaxglue.ops.moe.reference import activate

LIMIT = 790e12  # FLOP/s of a large bfloat16 matmul on an H200
CAPACITY = 2  # even loads that the padded way has room for; it drops the rest


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The experts of one layer of a model: E of them, X for each token."""

    D: int
    F: int
    E: int
    X: int
    order: str
    activation: str
    transpose: bool

    def route(self, logits):
        return route(logits, self.X, order=self.order, normalize=True)

    def flops(self, tokens: int) -> int:
        """Return the FLOPs of the forward pass; the gradient to x takes as many again."""
        return 6 * tokens * self.X * self.D * self.F


MODELS = {
    "gpt-oss-20b": Layer(D=2880, F=2880, E=32, X=4, order="topk_softmax", activation="gpt_oss", transpose=False),
    "DeepSeek-V2-Lite": Layer(D=2048, F=1408, E=64, X=6, order="softmax_topk", activation="swiglu", transpose=True),
    "Qwen3-30B-A3B": Layer(D=2048, F=768, E=128, X=8, order="softmax_topk", activation="swiglu", transpose=True),
}


def ours(layer: Layer, x, logits, gate_up, down):
    options = {"activation": layer.activation, "transpose_rhs": layer.transpose}
    return moe_mlp(x, layer.route(logits), gate_up, down, **options)


def ragged_dot(layer: Layer, x, logits, gate_up, down):
    routing, (gate_up, down) = layer.route(logits), _plain(layer, gate_up, down)
    hidden = activate(jax.lax.ragged_dot(x[routing.tokens], gate_up, routing.group_sizes), layer.activation)
    out = jax.lax.ragged_dot(hidden.astype(x.dtype), down, routing.group_sizes)
    out = out.astype(jnp.float32) * routing.row_weights[:, None]
    return out[routing.inverse].sum(1).astype(x.dtype)


def every_expert(layer: Layer, x, logits, gate_up, down):
    """Apply one expert after the other, each to every token."""
    weights = layer.route(logits).dense_weights

    def add(out, expert):
        gate_up, down, weight = expert
        y = _expert(layer, x, gate_up, down)
        return out + y * weight[:, None], None

    experts = (*_plain(layer, gate_up, down), weights.T)
    return jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), experts)[0].astype(x.dtype)


def padded(layer: Layer, x, logits, gate_up, down):
    """Pad each expert to CAPACITY even loads and drop assignments beyond it."""
    routing, (gate_up, down) = layer.route(logits), _plain(layer, gate_up, down)
    room = CAPACITY * x.shape[0] * layer.X // layer.E
    rows = routing.groups.offsets[:-1, None] + jnp.arange(room)
    used = jnp.arange(room) < routing.group_sizes[:, None]
    inputs = jnp.where(used[..., None], x[routing.tokens.at[rows].get(mode="clip")], 0)
    projected = jnp.einsum("ecd,edf->ecf", inputs, gate_up)
    hidden = activate(projected.reshape(-1, projected.shape[-1]), layer.activation).astype(x.dtype)
    out = jnp.einsum("ecf,efd->ecd", hidden.reshape(layer.E, room, -1), down).astype(jnp.float32)
    weights = jnp.where(used, routing.row_weights.at[rows].get(mode="clip"), 0)
    token = jnp.where(used, routing.tokens.at[rows].get(mode="clip"), x.shape[0])
    return jnp.zeros(x.shape, jnp.float32).at[token].add(out * weights[..., None], mode="drop").astype(x.dtype)


def loop(layer: Layer, x, logits, gate_up, down):
    """Apply one expert after the other, each to the tokens that it looks for, as PyTorch models do."""
    options = {"activation": layer.activation, "transpose_rhs": layer.transpose}
    return looped_mlp(x, layer.route(logits), gate_up, down, **options)


def _plain(layer: Layer, gate_up, down):
    return (gate_up.mT, down.mT) if layer.transpose else (gate_up, down)


def _expert(layer: Layer, x, gate_up, down):
    return (activate(x @ gate_up, layer.activation).astype(x.dtype) @ down).astype(jnp.float32)


FAST = ("ours", "padded")
"""Ways measured under several loads, with more repeats."""
PUBLISHED = "23% forward, 13% backward"
"""Published speed-up of a PyTorch layer from grouping tokens once instead of reading each expert's."""
WAYS: dict[str, Callable] = {
    "ours": ours,
    "loop": loop,
    "padded": padded,
    "every expert": every_expert,
    "ragged_dot": ragged_dot,
}
Programs = dict[str, tuple[Callable, ...]]


def random_inputs(layer: Layer, tokens: int):
    """Draw (x, gate_up, down, dout)."""
    shapes = [(tokens, layer.D), (layer.E, layer.D, 2 * layer.F), (layer.E, layer.F, layer.D), (tokens, layer.D)]
    if layer.transpose:
        shapes[1:3] = [(E, columns, rows) for E, rows, columns in shapes[1:3]]
    scales = (1.0, layer.D**-0.5, layer.F**-0.5, 1.0)
    keys = jax.random.split(jax.random.key(0), 4)
    normal = jax.jit(lambda key, scale, shape: scale * jax.random.normal(key, shape, jnp.bfloat16), static_argnums=2)
    return [normal(key, scale, shape) for key, scale, shape in zip(keys, scales, shapes, strict=True)]


def router_logits(layer: Layer, tokens: int, load: str):
    """Draw logits; `skewed` makes expert e about e + 1 times rarer than the first, `eight` leaves eight of them."""
    logits = jax.random.normal(jax.random.key(1), (tokens, layer.E))
    if load == "eight":
        return logits.at[:, 8:].add(-100.0)
    return logits - jnp.log(jnp.arange(1.0, layer.E + 1)) if load == "skewed" else logits


def functions(layer: Layer, way: str):
    """Return (forward, step), where the step also computes the gradient to x."""
    function = WAYS[way]

    def step(x, logits, gate_up, down, dout):
        out, pull = jax.vjp(lambda x: function(layer, x, logits, gate_up, down), x)
        return out, pull(dout)[0]

    return jax.jit(lambda *a: function(layer, *a)), jax.jit(step)


def programs_of(model: str, tokens: int, ways: Iterable[str]) -> Programs:
    """Compile each way's `functions` for these shapes; `routing` routes eight times, to amortize the call."""
    layer = MODELS[model]
    x, gate_up, down, dout = jax.eval_shape(partial(random_inputs, layer, tokens))
    logits = jax.ShapeDtypeStruct((tokens, layer.E), jnp.float32)
    several = jax.ShapeDtypeStruct((8, *logits.shape), jnp.float32)
    compiled: Programs = {"routing": (jax.jit(partial(jax.lax.map, layer.route)).lower(several).compile(),)}
    for way in ways:
        forward, step = functions(layer, way)
        step = step.lower(x, logits, gate_up, down, dout).compile()
        compiled[way] = forward.lower(x, logits, gate_up, down).compile(), step
    return compiled


def results_of(model: str, tokens: int, programs: Programs, loads: list[str]) -> Iterator[dict]:
    """Measure the rows of the table."""
    layer = MODELS[model]
    x, gate_up, down, dout = random_inputs(layer, tokens)
    for way in WAYS:
        if way not in programs:
            continue
        forward, step = programs[way]
        for load in loads if way in FAST else loads[:1]:
            logits = router_logits(layer, tokens, load)
            inputs, repeats = (x, logits, gate_up, down), 7 if way in FAST else 3
            times = milliseconds(forward, *inputs, repeats=repeats), milliseconds(step, *inputs, dout, repeats=repeats)
            floor = layer.flops(tokens) / LIMIT * 1e3
            several = jnp.stack([jnp.roll(logits, shift, axis=0) for shift in range(8)])
            sizes = np.asarray(programs["routing"][0](several).group_sizes[0])
            dropped = np.maximum(sizes - CAPACITY * sizes.mean(), 0).sum() / sizes.sum() if way == "padded" else 0.0
            routing = milliseconds(*programs["routing"], several) / 8 if way == "ours" else 0.0
            yield {
                "model": model,
                "tokens": tokens,
                "load": f"{load} (largest {sizes.max() / sizes.mean():.1f} × even)",
                "way": way,
                "forward ms": round(times[0], 3),
                "forward + dx ms": round(times[1], 3),
                "of the limit, forward": f"{floor / times[0]:.0%}",
                "of the limit, both": f"{2 * floor / times[1]:.0%}",
                "routing": f"{routing / times[1]:.1%}" if routing else "",
                "dropped": f"{dropped:.0%}",
            }


def gains(results: list[dict]) -> list[dict]:
    """Compute the speed-up over each loop, beside the published one."""
    rows = []
    for slow in (row for row in results if row["way"] == "loop"):
        same = [
            row
            for row in results
            if row["way"] == "ours" and all(row[k] == slow[k] for k in ("model", "load", "tokens"))
        ]
        for fast in same:
            both = [(row["forward ms"], row["forward + dx ms"] - row["forward ms"]) for row in (slow, fast)]
            forward, backward = (f"{before / after - 1:.0%}" for before, after in zip(*both, strict=True))
            rows.append(
                {
                    "model": slow["model"],
                    "tokens": slow["tokens"],
                    "way": "loop → ours",
                    "forward": forward,
                    "backward": backward,
                    "published": PUBLISHED,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16_384, 4096, 32_768])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--loads", nargs="+", choices=["even", "skewed", "eight"], default=["even", "skewed"])
    parser.add_argument("--slow-tokens", type=int, nargs="*", default=[8192], help="where the slow ways run")
    parser.add_argument("--json", type=Path, help="where to write the results, as they come")
    args = parser.parse_args()
    cases = [(model, tokens) for tokens in args.tokens for model in args.models]
    ways = {tokens: list(WAYS) if tokens in args.slow_tokens else ["ours"] for tokens in args.tokens}
    with ThreadPoolExecutor() as pool:  # before anything is measured
        programs = list(pool.map(lambda case: programs_of(*case, ways[case[1]]), cases))
    results: list[dict] = []
    for (model, tokens), compiled in zip(cases, programs, strict=True):
        for row in results_of(model, tokens, compiled, args.loads):
            results.append(row)
            print(*row.values(), sep="  ", flush=True)
            if args.json:
                in_order = sorted(results, key=lambda row: (MODELS[row["model"]].X, row["tokens"]))
                write_results(args.json, in_order + gains(results))
    print(table(results))
    if published := gains(results):
        print(table(published))


if __name__ == "__main__":
    main()
