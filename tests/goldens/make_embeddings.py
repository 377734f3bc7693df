"""Make embeddings.json: losses of sentence-transformers on a tiny model, with their gradients.

Run with torch, transformers and sentence-transformers installed (made with torch 2.13, transformers 5.24 and
sentence-transformers 6.2, in float32 on a CPU), after `make_models.py`:

    python tests/goldens/make_embeddings.py

The model is `qwen3_tied`; each text is read in a row of its own. Contents:
    units             tokens of anchor, positive and two negatives of each pair, and its similarity
    cases.<name>      settings; loss, and (norm, Σ gradient · cos(index / 10)) of parameters
"""

import json

import numpy as np
import torch
from make_models import HERE
from make_reads import gradients, load
from sentence_transformers.sentence_transformer.losses import CoSENTLoss, MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.losses.matryoshka import shrink
from sentence_transformers.sentence_transformer.modules import Pooling

BOTH = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
CASES = {
    "infonce": {"columns": 2},
    "negatives": {"columns": 4},
    "symmetric": {"columns": 2, "symmetric": True},
    "matryoshka": {"columns": 3, "matryoshka_dims": [8, 4]},
    "mean": {"columns": 3, "pooling": "mean", "similarity_scale": 10.0},
    "bidirectional": {"columns": 2, "pooling": "mean", "bidirectional": True},
    "cosent": {"columns": 2, "embed_loss": "cosent"},
}


def make_units() -> list[dict]:
    rng = np.random.default_rng(5)
    return [
        {
            "texts": [rng.integers(3, 24, rng.integers(2, 8)).tolist() for _ in range(4)],
            "score": round(float(rng.integers(0, 4)) / 4, 2),
        }
        for _ in range(6)
    ]


def embed(model, tokens: list[int], settings: dict):
    mask = None
    if settings.get("bidirectional"):
        mask = torch.zeros((1, 1, len(tokens), len(tokens)))
    ids = torch.tensor([tokens])
    hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
    mode = {"last": "lasttoken", "mean": "mean"}[settings.get("pooling", "last")]
    pooling = Pooling(hidden.shape[-1], mode)
    return pooling({"token_embeddings": hidden, "attention_mask": torch.ones_like(ids)})["sentence_embedding"][0]


def case(units: list[dict], settings: dict) -> dict:
    model, settings = load(), dict(settings)
    count = settings.pop("columns")
    columns = [torch.stack([embed(model, unit["texts"][c], settings) for unit in units]) for c in range(count)]
    scale = settings.get("similarity_scale", 20.0)
    labels = torch.tensor([unit["score"] for unit in units])
    if settings.get("embed_loss") == "cosent":
        loss = CoSENTLoss(None, scale=scale)
    else:
        loss = MultipleNegativesRankingLoss(None, scale=scale, **(BOTH if settings.get("symmetric") else {}))
    value = loss.compute_loss_from_embeddings(columns, labels)
    for dim in settings.get("matryoshka_dims", []):
        value = value + loss.compute_loss_from_embeddings([shrink(column, dim) for column in columns], labels)
    value.backward()
    return {"settings": settings, "columns": count, "loss": float(value), "gradients": gradients(model)}


def main() -> None:
    units = make_units()
    found = {"units": units, "cases": {name: case(units, settings) for name, settings in CASES.items()}}
    (HERE / "embeddings.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
