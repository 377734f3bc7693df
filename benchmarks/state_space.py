"""Mamba-2 at the heads of Granite 4 H-small and Nemotron 3 Nano: errors, and times beside fla-core and mamba-ssm.

    python benchmarks/state_space.py --json benchmarks/results/state_space.json --peers FOLDER

Errors are relative, of bfloat16 values against the chunked form in float32. The limits are the bytes of arguments and
results, each once, at the rate of a copy, and the FLOPs of the matmuls by chunks of 64 at the rate of a large one.
`--peers` names a folder with fla-core, einops and mamba-ssm's Triton kernels, for `benchmarks/peers/state_space.py`:
fla-core's simple_gla has no groups, so that it reads B and C once for each head.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from delta_rule import MATMUL, copy_rate, relative_error, step_milliseconds
from measure import log_normal_lengths, milliseconds, write_results

from jaxglue.ops.backend import compute_capability
from jaxglue.ops.segments import PackedSegments, pack_segments
from jaxglue.ops.state_space import STATE_STEP, StateHeads, advance_states, gated_group_norm, state_space

MODELS = {"granite-4-h-small": StateHeads(128, 64, 1, 128), "nemotron-3-nano": StateHeads(64, 64, 8, 128)}
CASES = {"30 documents": (16_384, 30), "one document": (16_384, 1)}
NAMES = ("out", "dxbc", "dstep", "dg")


def arguments(heads: StateHeads, tokens: int, dtype=jnp.bfloat16) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Return ((xbc, Δ, g), dout)."""
    keys = jax.random.split(jax.random.key(0), 4)
    xbc = jax.nn.silu(jax.random.normal(keys[0], (1, tokens, heads.width))).astype(dtype)
    step = jnp.exp(jax.random.uniform(keys[1], (1, tokens, heads.values), minval=-6.9, maxval=-2.3))
    g = -step * jax.random.uniform(keys[2], (heads.values,), minval=1.0, maxval=16.0)
    return (xbc, step, g), jax.random.normal(keys[3], (1, tokens, heads.values, heads.value_dim), dtype)


def passes(heads: StateHeads, backend: str, segments: PackedSegments) -> tuple[Callable, Callable]:
    """Return the forward pass, and both passes."""
    skip = jnp.ones(heads.values)

    def forward(*values):
        return state_space(*values, skip, segments, heads, backend=backend)

    def both(values, dout):
        out, pull = jax.vjp(forward, *values)
        return out, *pull(dout)

    return jax.jit(forward), jax.jit(both)


def errors(heads: StateHeads, segments: PackedSegments, tokens: int) -> dict[str, Any]:
    """Return the kernels' relative errors, and whether they give the same bits again."""
    values, dout = arguments(heads, tokens)
    both = passes(heads, "triton", segments)[1]
    got, again = both(values, dout), both(values, dout)
    exact = tuple(x.astype(jnp.float32) for x in values)
    expected = passes(heads, "chunked", segments)[1](exact, dout.astype(jnp.float32))
    found: dict[str, Any] = {name: relative_error(a, b) for name, a, b in zip(NAMES, got, expected, strict=True)}
    return found | {"repeatable": all(bool(jnp.array_equal(a, b)) for a, b in zip(got, again, strict=True))}


def limits(heads: StateHeads, tokens: int) -> dict[str, float]:
    """Return milliseconds of both passes by bytes and by FLOPs."""
    values, dout = arguments(heads, 1)
    token = 2 * sum(x.nbytes for x in values) + 2 * dout.nbytes
    N, P, _, S = heads
    flops = 2 * N * tokens * (8 * S * P + 64 * 4 * P)
    return {"bytes_ms": token * tokens / copy_rate() * 1e3, "flops_ms": flops / MATMUL * 1e3}


def rows(model: str, backends: tuple[str, ...]) -> Iterator[dict]:
    """Yield a row for each case and backend."""
    heads = MODELS[model]
    for name, (tokens, documents) in CASES.items():
        segments = pack_segments([_lengths(tokens, documents)], seq_len=tokens)
        values, dout = arguments(heads, tokens)
        for backend in backends:
            forward, both = passes(heads, backend, segments)
            times = {"forward_ms": milliseconds(forward, *values), "both_ms": milliseconds(both, values, dout)}
            yield {"model": model, "case": name, "by": backend, **times, **limits(heads, tokens)}


def _lengths(tokens: int, documents: int) -> list[int]:
    return log_normal_lengths(tokens - 37 * (documents > 1), documents)


def peers(folder: Path, model: str, engine: str, seconds: float) -> Iterator[dict]:
    """Yield a peer's rows, from a process of its own, which ends after so many seconds."""
    cases = {name: (tokens, _lengths(tokens, documents)) for name, (tokens, documents) in CASES.items()}
    script = str(Path(__file__).parent / "peers" / "state_space.py")
    command = sys.executable, script, engine, json.dumps(MODELS[model]), json.dumps(cases)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])  # with our Triton
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, start_new_session=True, **pipes)
    try:
        out, messages = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, messages = process.communicate()
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    last = {row["case"]: row for row in lines}  # a case is printed again once its gradients are timed, too
    for row in last.values() or [{"error": messages[-1000:]}]:
        yield {"model": model, "by": engine, **row}


def norms(model: str) -> Iterator[dict]:
    """Yield the times of the gated norm, by XLA and by kernels."""
    heads = MODELS[model]
    x, weight = jnp.ones((1, 16_384, heads.value_width), jnp.bfloat16), jnp.ones(heads.value_width, jnp.bfloat16)
    for backend in ("reference", "triton"):

        def norm(x, gate, backend=backend):
            return gated_group_norm(x, gate, weight, 1e-5, groups=heads.groups, backend=backend)

        forward = jax.jit(norm)
        backward = jax.jit(lambda x, f=norm: jax.vjp(f, x, x)[1](x))
        times = {"forward_ms": milliseconds(forward, x, x), "backward_ms": milliseconds(backward, x)}
        yield {"model": model, "case": "gated norm", "by": backend, **times}


def steps(model: str, sequences: int, layers: int = 8) -> dict:
    """Return the time of a token's step in a layer."""
    from jaxglue.ops.state_space.triton import TritonStateStep

    heads = MODELS[model]
    (xbc, step, g), _ = arguments(heads, sequences)
    token, slots = (xbc[0], step[0], g[0], jnp.ones(heads.values)), jnp.flip(jnp.arange(sequences))
    begun = jnp.arange(sequences) >= 0

    def advance(all_states, *token):
        with STATE_STEP.using(TritonStateStep.of(compute_capability())):
            return [advance_states(states, slots, begun, *token, heads)[1] for states in all_states]

    stored = jnp.zeros((sequences, heads.values, heads.state_dim, heads.value_dim))
    ms = step_milliseconds(advance, stored, layers, token)
    rate = 2 * stored.nbytes / ms * 1e3
    return {"model": model, "case": f"step of {sequences}", "ms": ms, "of a copy's rate": rate / copy_rate()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--seconds", type=float, default=60, help="that a peer may take for a model")
    parser.add_argument("--kernels", action="store_true", help="do not time what XLA compiles")
    parser.add_argument("--steps", action="store_true", help="only steps of 64 and 256")
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # peers' processes need memory, too
    segments = pack_segments([_lengths(16_384, 30)], seq_len=16_384)
    results: dict[str, Any] = {"errors": {}, "rows": []}

    def add(row: dict) -> None:
        results["rows"].append(row)
        print(json.dumps(row), flush=True)
        if args.json:
            write_results(args.json, results)

    for model in args.models if args.steps else ():
        for sequences in (64, 256):
            add(steps(model, sequences))
    if args.steps:
        return
    for model in args.models:
        results["errors"][model] = errors(MODELS[model], segments, 16_384)
        print(model, results["errors"][model], flush=True)
        for row in (*rows(model, ("triton",) if args.kernels else ("triton", "chunked")), steps(model, 64)):
            add(row)
        for row in () if args.kernels else norms(model):
            add(row)
    for model in args.models if args.peers else ():
        for engine in ("mamba-ssm", "fla-core"):
            for row in peers(args.peers, model, engine, args.seconds):
                add(row)


if __name__ == "__main__":
    main()
