"""Measure sentence-transformers' cached InfoNCE on the texts of `benchmarks/onepass.py --texts-only FILE.npz`.

    python benchmarks/peers/embed.py FILE.npz FOLDER --mini-batch 64 --no-checkpointing --json OUT.json

The model is made from a folder's config.json with random weights; which attention ran is printed: FlashAttention where
flash_attn is installed, else SDPA with padding, to the longest text of a mini-batch.
"""

import argparse
import importlib.util
import json
import time
from pathlib import Path

import engines
import numpy as np
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Tokens(torch.nn.Module):
    """A model as the first module of sentence-transformers: features with the tokens' embeddings."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, features):
        hidden = self.model(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
        return {**features, "token_embeddings": hidden.last_hidden_state}


def columns(lengths: np.ndarray, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Return padded columns of anchors and positives."""
    generator, found = torch.Generator().manual_seed(0), []
    for sizes in lengths.T:
        mask = torch.arange(int(sizes.max())) < torch.tensor(sizes)[:, None]
        ids = torch.randint(100, vocabulary, mask.shape, generator=generator)
        found.append({"input_ids": (ids * mask).to(DEVICE), "attention_mask": mask.long().to(DEVICE)})
    return found


def wait() -> None:
    """Wait for the GPU, if there is one."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling
    from transformers import AutoConfig, AutoModel

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", type=Path)
    parser.add_argument("config", type=Path, help="folder with a config.json")
    parser.add_argument("--mini-batch", type=int, default=64)
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    attention = "flash_attention_2" if importlib.util.find_spec("flash_attn") else "sdpa"
    config = AutoConfig.from_pretrained(args.config)
    options = {"dtype": torch.bfloat16, "attn_implementation": attention}
    model = AutoModel.from_config(config, **options).to(DEVICE).train()
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    encoder = torch.nn.Sequential(Tokens(model), Pooling(config.hidden_size, "lasttoken"))
    lengths = np.load(args.texts)["lengths"]
    loss = CachedMultipleNegativesRankingLoss(encoder, mini_batch_size=args.mini_batch)
    few = columns(lengths[: 2 * args.mini_batch], config.vocab_size)
    loss(few, None).backward()
    features = columns(lengths, config.vocab_size)
    wait()
    begin = time.perf_counter()
    loss(features, None).backward()
    wait()
    seconds = time.perf_counter() - begin
    result = {"engine": "sentence-transformers", "attention": attention, "pairs": len(lengths), "step_s": seconds}
    result |= {"mini_batch": args.mini_batch, "checkpointing": args.checkpointing, "torch": torch.__version__}
    result |= {"tokens_per_s": int(lengths.sum()) / seconds}
    if DEVICE == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps(result))
    if args.json:
        engines.write_results(args.json, result)


if __name__ == "__main__":
    main()
