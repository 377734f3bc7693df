"""The gated delta rule at the heads of Qwen3.5-9B: errors, and times beside the chunked form and fla-core.

    python benchmarks/delta_rule.py --json benchmarks/results/delta_rule.json --fla FOLDER

Errors are relative, of bfloat16 values against the chunked form in float32. The limits are the bytes of arguments and
results, each once, at the rate of a copy, and the FLOPs of the rule's matmuls by chunks at the rate of a large one.
`--fla` names a folder with fla-core and einops (`pip install --target`), for `benchmarks/peers/delta_rule.py`.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from measure import log_normal_lengths, milliseconds, table, write_results

from jaxglue.ops.backend import compute_capability
from jaxglue.ops.delta_rule import (
    CONVOLUTION_STEP,
    DELTA_RULE,
    DELTA_STEP,
    DeltaCall,
    DeltaHeads,
    advance_rows,
    advance_states,
    causal_convolution,
    convolve_rows,
    delta_rule_and_states,
    gated_delta_rule,
    gated_rms_norm,
)
from jaxglue.ops.delta_rule.chunks import ChunkedDeltaRule
from jaxglue.ops.segments import PackedSegments, pack_segments

HEADS, V = DeltaHeads(16, 32, 128), 128
SHAPE = DeltaCall(dtype=jnp.dtype(jnp.bfloat16), key_dim=128, value_dim=128)
COPIES, MATMUL = {"NVIDIA H200": 4.3e12}, 690e12
"""Bytes/s of a device copy by GPU, an H100's 3.0e12 for others, and FLOP/s of a large matmul."""
CASES = {"30 documents": (16_384, 30), "one document": (16_384, 1), "1,000 documents": (65_536, 1000)}
NAMES = ("out", "dqkv", "dg", "dbeta")


def arguments(tokens: int, dtype=jnp.bfloat16) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Return ((qkv, g, β), dout)."""
    keys = jax.random.split(jax.random.key(0), 4)
    qkv = jax.nn.silu(jax.random.normal(keys[0], (1, tokens, (2 * HEADS.keys + HEADS.values) * V))).astype(dtype)
    g = -jnp.exp(jax.random.uniform(keys[1], (1, tokens, HEADS.values), minval=-6.0, maxval=0.5))
    beta = jax.nn.sigmoid(jax.random.normal(keys[2], g.shape)).astype(dtype)
    return (qkv, g, beta), jax.random.normal(keys[3], (1, tokens, HEADS.values, V), dtype)


def passes(backend: str, segments: PackedSegments) -> tuple[Callable, Callable]:
    """Return the forward pass, and both passes."""

    def rule(*values):
        return gated_delta_rule(*values, segments, HEADS, backend=backend)

    def both(values, dout):
        out, pull = jax.vjp(rule, *values)
        return out, *pull(dout)

    return jax.jit(rule), jax.jit(both)


def errors(segments: PackedSegments, tokens: int) -> dict[str, float]:
    """Return the kernels' relative errors."""
    values, dout = arguments(tokens)
    exact = tuple(x.astype(jnp.float32) for x in values)
    got = passes("triton", segments)[1](values, dout)
    expected = passes("chunked", segments)[1](exact, dout.astype(jnp.float32))
    return {name: relative_error(a, b) for name, a, b in zip(NAMES, got, expected, strict=True)}


def relative_error(got: jax.Array, expected: jax.Array) -> float:
    """Return the norm of the difference over that of the expected."""
    norm = jnp.linalg.norm
    return float(norm((got.astype(jnp.float32) - expected).ravel()) / norm(expected.ravel()))


def copy_rate() -> float:
    """Return the bytes/s of a copy on this GPU."""
    return COPIES.get(jax.devices()[0].device_kind, 3.0e12)


def limits(tokens: int) -> dict[str, float]:
    """Return milliseconds of both passes by bytes and by FLOPs."""
    (qkv, g, beta), dout = arguments(1)
    token = 2 * (qkv.nbytes + g.nbytes + beta.nbytes) + 2 * dout.nbytes
    chunk, H = 64, HEADS.key_dim
    forward = 3 * H * V + chunk * (2 * V + 2 * H + 4 * chunk)
    backward = 3 * H * V + 3 * H * V + chunk * (4 * V + 4 * H)
    flops = 2 * HEADS.values * (forward + backward) * tokens
    return {"bytes_ms": token * tokens / copy_rate() * 1e3, "flops_ms": flops / MATMUL * 1e3}


def rows(names: Sequence[str], fla: Path | None, seconds: float, backends: tuple[str, ...]) -> Iterator[dict]:
    """Yield a row for each case and implementation."""
    cases = {}
    for name, (tokens, documents) in ((name, CASES[name]) for name in names):
        cases[name] = tokens, log_normal_lengths(tokens - 37 * (documents > 1), documents)
    for name, (tokens, lengths) in cases.items():
        segments, (values, dout) = pack_segments([lengths], seq_len=tokens), arguments(tokens)
        for backend in backends:
            if backend == "chunked" and tokens > 16_384:
                continue
            forward, both = passes(backend, segments)
            times = {"forward_ms": milliseconds(forward, *values), "both_ms": milliseconds(both, values, dout)}
            yield {"case": name, "by": backend, **times, **limits(tokens)}
    for name, times in (_fla(fla, seconds, cases) if fla else {}).items():
        yield {"case": name, "by": "fla-core", **times}


def _fla(folder: Path, seconds: float, cases: dict[str, tuple[int, list[int]]], tuning: float = 120) -> dict[str, dict]:
    """Return fla-core's times by case, from a process of its own.

    It compiles its kernels for so many seconds, and ends `tuning` s after.
    """
    script = str(Path(__file__).parent / "peers" / "delta_rule.py")
    command = sys.executable, script, json.dumps(cases), "--seconds", str(seconds)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])  # with our Triton
    environment = os.environ | {"PYTHONPATH": path}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    try:
        out, errors = process.communicate(timeout=seconds + tuning)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes that compile for it
        out, errors = process.communicate()
    lines = [line for line in out.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"all": {"error": errors[-1000:]}}


def around() -> Iterator[dict]:
    """Yield the times of convolution and gated norm, by XLA and by kernels."""
    (x, *_), dout = arguments(16_384)
    segments, weight = pack_segments([[16_384]], seq_len=16_384), jnp.ones(V, jnp.bfloat16)
    taps = jax.random.normal(jax.random.key(5), (x.shape[-1], 1, 4), jnp.bfloat16)
    functions = {
        "convolution": (lambda x, backend: causal_convolution(x, taps, segments, backend=backend), x),
        "gated norm": (lambda x, backend: gated_rms_norm(x, dout, weight, 1e-6, backend=backend), dout + 1),
    }
    for name, (function, value) in functions.items():
        for backend in ("reference", "triton"):
            forward = jax.jit(lambda x, f=function, b=backend: f(x, b))
            backward = jax.jit(lambda x, f=forward: jax.vjp(f, x)[1](x))
            times = {"forward_ms": milliseconds(forward, value), "backward_ms": milliseconds(backward, value)}
            yield {"case": name, "by": backend, **times}


def steps(sequences: int, layers: int = 8) -> dict:
    """Return errors of the states behind documents and of a token's step from them, and the step's time in a layer."""
    from jaxglue.ops.delta_rule.triton import TritonDeltaStep

    (qkv, g, beta), _ = arguments(4096)
    lengths = log_normal_lengths(4096, sequences)
    segments, slots = pack_segments([lengths], seq_len=4096), jnp.flip(jnp.arange(sequences))
    # Every third sequence is new, and its slot holds another's state, which must not reach it.
    token, begun = (qkv[0, :sequences], g[0, :sequences], beta[0, :sequences]), jnp.arange(sequences) % 3 > 0

    def states(*values):
        with DELTA_RULE.using(ChunkedDeltaRule() if values[0].dtype == jnp.float32 else DELTA_RULE.load(SHAPE)):
            return delta_rule_and_states(*values, segments, HEADS)[1][0, :sequences]

    exact, got = jax.jit(states)(*(x.astype(jnp.float32) for x in (qkv, g, beta))), jax.jit(states)(qkv, g, beta)
    expected = advance_states(exact, slots, begun, *(x.astype(jnp.float32) for x in token), HEADS, backend="reference")

    def advance(all_states, *token):
        with DELTA_STEP.using(TritonDeltaStep.of(compute_capability())):
            return [advance_states(states, slots, begun, *token, HEADS) for states in all_states]

    one = jax.jit(advance, donate_argnums=0)([jnp.copy(exact)], *token)[0]
    ms = step_milliseconds(lambda *values: [states for _, states in advance(*values)], exact, layers, token)
    rate = 2 * exact.nbytes / ms * 1e3
    found = zip(("states", "out", "states after"), (got, *one), (exact, *expected), strict=True)
    return {
        "case": f"step of {sequences}",
        "ms": ms,
        "of a copy's rate": rate / copy_rate(),
        "errors": {name: relative_error(a, b) for name, a, b in found},
    }


TILES = {"step": [(32, 4), (16, 1), (32, 1)], "rows": [(32, 4), (16, 1), (8, 1), (32, 1), (16, 2)]}
"""Columns and warps of a program."""


def steps_by_tiles(sequences: int, tokens: int = 2, layers: int = 8) -> Iterator[dict]:
    """Yield times of a layer's step: of a token, of several behind as many kept ones, and of their convolution."""
    from jaxglue.ops.delta_rule.triton import DeltaKernelTiles, TritonConvolutionStep, TritonDeltaStep

    count, capability = 2 * sequences * tokens, compute_capability()
    values = tuple(x[0].reshape(2, sequences, tokens, -1) for x in arguments(count)[0])
    kept, new = (tuple(x[index] for x in values) for index in (0, 1))
    at = jnp.flip(jnp.arange(sequences)), jnp.arange(sequences) >= 0
    counts, C = jnp.arange(sequences) % (tokens + 1), new[0].shape[2]
    N, (H, V) = new[1].shape[2], (HEADS.key_dim, HEADS.value_dim(C))
    taps = jnp.ones((C, 1, 4), new[0].dtype)
    states, inputs = jnp.ones((sequences, N, H, V)), jnp.ones((sequences, 3, C), new[0].dtype)

    def one(x, *tokens):
        return advance_states(x, *at, *(of[:, 0] for of in tokens), HEADS)[1]

    def several(x, *tokens):
        return advance_rows(x, *at, kept, counts, tokens, HEADS)[1]

    def convolve(x, qkv, g, beta):
        return convolve_rows(x, *at, qkv, taps, kept=kept[0], counts=counts)[1]

    steps = {"step": (one, "one"), "rows": (several, "several")}
    cases: list[tuple] = [
        (name, call, {field: tiles}, "{} columns by {} warps".format(*tiles))
        for name, (call, field) in steps.items()
        for tiles in TILES[name]
    ]
    for name, call, tiles, label in [
        *cases,
        *(("convolution", convolve, None, way) for way in ("reference", "triton")),
    ]:
        operation, stored = (CONVOLUTION_STEP, inputs) if tiles is None else (DELTA_STEP, states)
        if tiles is not None:
            of = {field: DeltaKernelTiles(columns=c, num_warps=w) for field, (c, w) in tiles.items()}
            kernel: Any = TritonDeltaStep.of(capability, **of)
        else:
            kernel = None if label == "reference" else TritonConvolutionStep.of(capability)

        def advance(all_states, *tokens, operation=operation, kernel=kernel, call=call):
            with operation.using(kernel):
                return [call(states, *tokens) for states in all_states]

        yield {
            "case": name,
            "sequences": sequences,
            "tiles": label,
            "ms": step_milliseconds(advance, stored, layers, new),
        }


def step_milliseconds(advance: Callable, stored: jax.Array, layers: int, tokens: tuple[jax.Array, ...]) -> float:
    """Return the time of a layer's part of a program that replaces the states of all."""
    program, states, times = jax.jit(advance, donate_argnums=0), [stored + layer for layer in range(layers)], []
    for _ in range(12):
        begin = time.perf_counter()
        for _ in range(10):
            states = program(states, *tokens)
        jax.block_until_ready(states)
        times.append((time.perf_counter() - begin) / 10 / layers * 1e3)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--fla", type=Path)
    parser.add_argument("--fla-seconds", type=float, default=240, help="that compilation of its kernels may take")
    parser.add_argument("--kernels", action="store_true", help="do not time what XLA compiles")
    parser.add_argument("--tiles", action="store_true", help="time steps by tiles alone")
    args = parser.parse_args()
    if args.tiles:
        found = [row for sequences in (64, 256) for row in steps_by_tiles(sequences)]
        print(table(found), flush=True)
        return write_results(args.json, {"tiles": found}) if args.json else None
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # fla-core's processes need memory, too
    segments = pack_segments([log_normal_lengths(16_347, 30)], seq_len=16_384)
    results: dict[str, Any] = {"errors": errors(segments, 16_384), "steps": [steps(64), steps(256)], "rows": []}
    print(results["errors"], *results["steps"], sep="\n", flush=True)
    if not args.kernels:
        results["around"] = list(around())
        print(table(results["around"]), flush=True)
    backends = ("triton",) if args.kernels else ("triton", "chunked")
    for row in rows(args.cases, args.fla, args.fla_seconds, backends):  # fla-core's, which take minutes, come last
        results["rows"].append(row)
        print(json.dumps(row), flush=True)
        if args.json:
            write_results(args.json, results)


if __name__ == "__main__":
    main()
