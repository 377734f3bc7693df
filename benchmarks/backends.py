"""Print which backends serve each published shape on a GPU, and why others do not: the table of docs/models.md.

python benchmarks/backends.py --capability 9.0
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace

import jax
from measure import table
from shapes import SHAPES

from jaxglue.models import config_from_hf
from jaxglue.models.config import DecoderConfig
from jaxglue.models.lora_config import LoraConfig
from jaxglue.ops.attention import ATTENTION
from jaxglue.ops.backend import BackendChoice, compute_capability, tracing_for
from jaxglue.ops.cross_entropy import CROSS_ENTROPY, CrossEntropyCall
from jaxglue.ops.moe import GROUPED_MATMUL, GroupedCall
from jaxglue.ops.segments import BatchKind
from jaxglue.planner.attention import attention_shape
from jaxglue.planner.workload import Workload
from jaxglue.training.explain import layer_forms, mixer_choices, rotation_choice

TOKENS = 16_384
BATCHES = {"short documents": BatchKind(False, 64), "one document": BatchKind(True, 1)}


def attention_choices(config: DecoderConfig, dtype) -> Iterator[tuple[str, BackendChoice]]:
    """Yield attention's backends over the kinds of layers, for short documents and for one that fills the row."""
    kinds = {
        (kind.shape.head_dim, kind.shape.kv_heads, kind.window)
        for kind in config.layer_kinds
        if not kind.mixer.recurrent
    }
    for head_dim, kv_heads, window in sorted(kinds, key=str):
        own = replace(config, head_dim=head_dim, num_key_value_heads=kv_heads)
        for documents, batch in BATCHES.items():
            shape = attention_shape(own, dtype, TOKENS, batch, window=window, forked=False)
            layers = f"window {window:,}" if window else f"heads of {head_dim}"
            yield f"{layers}, {documents}", ATTENTION.choose(compute_capability(), shape)


def row(name: str) -> dict:
    """Return a shape's row: backends by operation, and obstacles of those that were barred."""
    config = config_from_hf(SHAPES[name])
    work = Workload(config=config, batch_size=1, seq_len=TOKENS, lora=LoraConfig(), document_lengths=(512,) * 32)
    attention = dict(attention_choices(config, work.dtype))
    forms = layer_forms(work)
    del forms["projections"]  # a backend for FP8 alone
    others = {"rotation": rotation_choice(work), **forms, **mixer_choices(work)}
    if config.moe is not None:
        others["experts"] = GROUPED_MATMUL.choose(compute_capability(), GroupedCall(dtype=work.dtype))
    others["loss"] = CROSS_ENTROPY.choose(
        compute_capability(), CrossEntropyCall(dtype=work.dtype, vocab_size=config.vocab_size)
    )
    plain = {title: choice for title, choice in (attention | others).items() if choice.name == "reference"}
    return {
        "model": name,
        "attention": "; ".join(f"{layers}: {choice.name}" for layers, choice in attention.items()),
        **{title: others[title].name if title in others else "–" for title in ("layers", "rotation", "feed-forward")},
        "experts": others["experts"].name if "experts" in others else "–",
        "loss": others["loss"].name,
        "XLA, because": "; ".join(f"{title}: {choice.reason}" for title, choice in plain.items()) or "–",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", default="9.0", help="of the GPU, which need not be present")
    parser.add_argument("--shapes", nargs="+", default=[name for name in SHAPES if not name.startswith("tiny")])
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    major, minor = map(int, args.capability.split("."))
    with tracing_for((major, minor)):
        print(table([row(name) for name in args.shapes]))


if __name__ == "__main__":
    main()
