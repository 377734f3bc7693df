"""Measure the KL divergence of a model's GGUF types from the model itself, on rows of text.

    python benchmarks/gguf_quality.py MODEL --text docs/*.md --calibration README.md

Dense models only. The files' values, expanded by the gguf package, are predicted with in float32.
"""

import argparse
import json
import tempfile
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from measure import table, write_results

from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.hf.export_check import ExportRows, folder_parts
from jaxglue.hf.gguf.export import export_gguf
from jaxglue.hf.gguf.importance import measure_importance
from jaxglue.hf.gguf.layout import ARCHITECTURES, interleaved_rows
from jaxglue.hf.loading import load_model
from jaxglue.hf.merge import MergedTensors
from jaxglue.ops.segments import pack_segments

TOKENS, BATCH = 128, 5


def text_rows(tokenizer, paths: list[Path], count: int) -> np.ndarray:
    """Return rows of tokens, spread over the texts."""
    tokens = np.concatenate([np.asarray(tokenizer.encode(path.read_text()), np.int32) for path in paths])
    starts = np.linspace(0, len(tokens) - TOKENS, count).astype(int)
    return np.stack([tokens[start : start + TOKENS] for start in starts])


def read_values(file: Path, folder: Path, config) -> dict[str, np.ndarray]:
    """Return a file's values by Hugging Face's names."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[ARCHITECTURES[config.model_type]], config.num_hidden_layers)
    written = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    found = {}
    for name, spec in MergedTensors(folder).specs.items():
        tensor = written[names.get_name(name, (".weight", ".bias"))]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(spec.shape)
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values[np.argsort(interleaved_rows(len(values), heads))]
        found[name] = values
    return found


@nnx.jit
def log_probabilities(model, tokens):
    return jax.nn.log_softmax(model(tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--calibration", type=Path, nargs="+", help="texts for importance, by default none")
    parser.add_argument("--types", nargs="+", default=["f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0"])
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tokenizer, tensors = load_tokenizer(args.model), MergedTensors(args.model)
    rows = text_rows(tokenizer, args.text, args.rows).reshape(-1, BATCH, TOKENS)
    model = load_model(args.model, dtype=jnp.float32)
    expected = [np.asarray(log_probabilities(model, batch)) for batch in rows]
    importance = {}
    if args.calibration:
        tokens = text_rows(tokenizer, args.calibration, 40)
        own = ExportRows(tokens=tokens, segments=pack_segments([[TOKENS]] * len(tokens), seq_len=TOKENS), source="text")
        parts = folder_parts(args.model, tensors.config, dtype=jnp.float32)
        importance = measure_importance(tensors.config, parts, [own], jnp.float32)
    results = []
    for kind in args.types:
        for weights in [None, importance] if importance and "_k" in kind else [None]:
            with tempfile.TemporaryDirectory() as scratch:
                file = export_gguf(
                    tensors, tensors.config, tokenizer, {0}, kind, Path(scratch) / "out", importance=weights
                )
                size, values = file.stat().st_size, read_values(file, args.model, tensors.config)
            changed = nnx.state(model, nnx.Param)
            for path, variable in nnx.to_flat_state(changed):
                name = ".".join(map(str, path))
                name = name if name.startswith("lm_head") else f"model.{name}"
                variable.set_value(jnp.asarray(values[name]))
            nnx.update(model, changed)
            kls = [
                (np.exp(p) * (p - np.asarray(log_probabilities(model, batch)))).sum(-1)
                for p, batch in zip(expected, rows, strict=True)
            ]
            label = kind if weights is None else f"{kind}, importance"
            results.append({"type": label, "MiB": round(size / 2**20, 1), "KL": float(f"{np.mean(kls):.2e}")})
            print(json.dumps(results[-1]), flush=True)
    print(table(results))
    if args.json:
        write_results(args.json, results)


if __name__ == "__main__":
    main()
