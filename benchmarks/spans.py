"""Time attention whose images' tokens see each other beside attention that is causal alone, per visible pair.

    python benchmarks/spans.py --json benchmarks/results/spans.json

Heads are Gemma-3-12B's, of layers with and without its window. A row holds documents with an image of 256 tokens each,
after a text and before another.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from attention import Heads, random_inputs
from measure import milliseconds, uniform_lengths, write_results

from jaxglue.ops.attention import packed_attention
from jaxglue.ops.segments import PackedSegments, pack_segments
from jaxglue.vision.rows import image_spans

IMAGE = 256
LAYERS = {"full": Heads(N=16, K=8, H=256), "window": Heads(N=16, K=8, H=256, window=1024)}


def segments_of(tokens: int, image: int) -> tuple[PackedSegments, PackedSegments]:
    """Return a row of documents without spans, and with one of an image in each."""
    lengths = uniform_lengths(tokens, 2 * image, 8 * image)
    segments = pack_segments([lengths], seq_len=tokens)
    index, start, counts = np.full((1, tokens), -1, np.int32), 0, []
    for length in lengths:
        if length >= image + 2:
            first = start + (length - image) // 3
            index[0, first : first + image] = np.arange(image) + image * len(counts)
            counts.append(image)
        start += length
    return segments, replace(segments, **image_spans(index, [counts], [sum(lengths)]))


def visible(segments: PackedSegments, window: int | None) -> int:
    """Count the pairs of a query and a key that it sees."""
    token = np.arange(segments.starts.shape[1])
    own = token if segments.own_keys is None else np.asarray(segments.own_keys)[0]
    first = np.asarray(segments.starts)[0]
    first = first if window is None else np.maximum(first, token - window + 1)
    return int(np.maximum(own - first + 1, 0)[np.asarray(segments.segment_ids)[0] > 0].sum())


def measure(heads: Heads, segments: PackedSegments, tokens: int, backend: str) -> dict[str, Any]:
    """Return milliseconds of both passes, and visible pairs."""
    (q, k, v), _, dout = random_inputs(heads, tokens)
    placed = jax.device_put(segments)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return packed_attention(q, k, v, placed, window=heads.window, backend=backend)

    def gradients(q: Any, k: Any, v: Any, dout: Any) -> Any:
        return jax.vjp(attend, q, k, v)[1](dout)

    forward, both = milliseconds(jax.jit(attend), q, k, v), milliseconds(jax.jit(gradients), q, k, v, dout)
    return {"forward_ms": forward, "both_ms": both, "pairs": visible(segments, heads.window)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--image", type=int, default=IMAGE, help="tokens of an image")
    parser.add_argument("--heads", type=int, nargs=3, metavar=("N", "K", "H"), help="in place of Gemma-3-12B's")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    for layer, heads in LAYERS.items():
        if args.heads:
            heads = replace(heads, **dict(zip("NKH", args.heads, strict=True)))
        causal, spans = (measure(heads, s, args.tokens, args.backend) for s in segments_of(args.tokens, args.image))
        pairs = spans["pairs"] / causal["pairs"]
        ratios = {
            f"{name} per pair": spans[f"{name}_ms"] / causal[f"{name}_ms"] / pairs for name in ("forward", "both")
        }
        results.append({"layer": layer, "tokens": args.tokens, "causal": causal, "spans": spans, **ratios})
        print(json.dumps(results[-1]), flush=True)
        if args.json:
            write_results(args.json, results)


if __name__ == "__main__":
    main()
