"""Train a small model of bytes on the sources of the installed packages, for comparisons on a trained model.

    python benchmarks/rl_text_model.py --output /tmp/text --steps 800
    python benchmarks/rl_step.py --model /tmp/text/run/model --texts /tmp/text/held_out.jsonl --norm 1

A byte of Python has about one nat for such a model, so it is as sure of its text as published models are of theirs.
"""

import argparse
import json
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

import jaxglue

HELD_OUT = 64
"""Files that are not trained on."""


def write_model(folder: Path, layers: int, width: int) -> None:
    """Write config.json of a Qwen3, and a tokenizer of bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(["<eos>", *letters])}
    tokenizer = Tokenizer(BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 128, "head_dim": 64}
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "vocab_size": 272}
    other = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "eos_token_id": 0}
    kind = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(kind | shape | heads | other))


def write_texts(folder: Path, megabytes: float) -> None:
    """Write files of Python as rows of text, some of them held out."""
    files = sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))
    order, rows, size = np.random.default_rng(0).permutation(len(files)), list[str](), 0
    for index in order.tolist():
        text = files[index].read_text(encoding="utf-8", errors="ignore")
        if 1000 < len(text) < 100_000 and text.isascii():
            rows.append(json.dumps({"text": text}))
            size += len(text)
        if size > megabytes * 1e6:
            break
    for name, part in (("held_out", rows[:HELD_OUT]), ("texts", rows[HELD_OUT:])):
        (folder / f"{name}.jsonl").write_text("\n".join(part) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--row", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=20)
    args = parser.parse_args()
    (args.output / "model").mkdir(parents=True, exist_ok=True)
    write_model(args.output / "model", args.layers, args.width)
    write_texts(args.output, args.megabytes)
    jaxglue.train(
        model=str(args.output / "model"),
        random_weights=True,
        method="full",
        data=(str(args.output / "texts.jsonl"),),
        seq_len=args.row,
        batch_size=args.rows,
        learning_rate=1e-3,
        steps=args.steps,
        log_every=max(1, args.steps // 8),
        output=args.output / "run",
        overwrite=True,
    )


if __name__ == "__main__":
    main()
