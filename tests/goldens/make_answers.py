"""Make answers.json: greedy answers to the documents of `make_families.py`'s goldens, by transformers.

Run with torch and transformers installed (made with torch 2.13 and transformers 5.24, in float32 on a CPU):

    python tests/goldens/make_answers.py

Each token follows a forward pass over all before it, without a cache.
"""

import json
from pathlib import Path

import torch
from make_families import MODELS, build
from make_models import documents

TOKENS = 12
TYPES = (
    *("cohere2", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma4_unified_text", "hunyuan_v1_dense", "lfm2", "lfm2_moe"),
    *("lfm3", "minimax_m2", "muse_glimmer_text", "qwen3_next", "seed_oss"),
    *("falcon_h1", "granitemoehybrid", "nemotron_h", "olmo_hybrid", "kimi_linear", "bailing_hybrid"),
)


@torch.no_grad()
def answer(model: torch.nn.Module, tokens: torch.Tensor) -> list[int]:
    """Return the tokens behind a prompt."""
    for _ in range(TOKENS):
        tokens = torch.cat([tokens, model(tokens[None]).logits[0, -1:].argmax(-1)])
    return tokens[-TOKENS:].tolist()


def main() -> None:
    models = {name: build(name, MODELS[name])[1] for name in TYPES}
    answers = {name: [answer(model, document) for document in documents(0)] for name, model in models.items()}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(tokens)}" for name, tokens in answers.items())
    (Path(__file__).parent / "answers.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
