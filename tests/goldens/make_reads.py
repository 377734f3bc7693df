"""Make reads.json: decisions and rerankers in plain PyTorch, by the losses that the public trainers of them compute.

Run with torch and transformers installed (made with torch 2.13 and transformers 5.24, in float32 on a CPU), after
`make_models.py`:

    python tests/goldens/make_reads.py

The model is `qwen3_tied`; each part is read in a row of its own, behind a copy of its beginning. Contents:
    decide.units         tokens of a state; of each question tokens, type, tokens of its options and gold
    decide.cases.<name>  settings; loss, a mean over all questions, and (norm, Σ gradient · cos(index / 10))
    rerank.units         tokens of a query; of each document tokens and label
    rerank.cases.<name>  settings; loss and gradients
"""

import json

import numpy as np
import torch
from make_models import HERE
from torch.nn import functional
from transformers import AutoModelForCausalLM

YES, NO = ([1, 2], [3])
LETTERS, DIGITS = [10, 11, 12, 13], [4, 5, 6]


def load():
    return AutoModelForCausalLM.from_pretrained(HERE / "qwen3_tied", dtype=torch.float32, attn_implementation="eager")


def gradients(model) -> dict:
    found = {}
    for name, parameter in model.named_parameters():
        values = parameter.grad.double().flatten()
        projection = values @ torch.cos(torch.arange(len(values)).double() / 10)
        found[name] = [float(values.norm()), float(projection)]
    return found


def decision_units() -> list[dict]:
    rng, units = np.random.default_rng(3), []
    for number in range(5):
        questions = []
        for kind in rng.permutation([0, 1, 2, 1])[: 2 + number % 3]:
            count = {0: 2, 1: int(rng.integers(2, 5)), 2: 3}[int(kind)]
            gold = rng.dirichlet(np.ones(count)) if rng.random() < 0.6 else np.eye(count)[rng.integers(count)]
            tokens = rng.integers(7, 24, rng.integers(2, 6)).tolist()
            questions.append({"tokens": tokens, "kind": int(kind), "gold": gold.astype(np.float32).tolist()})
        units.append({"state": rng.integers(7, 24, rng.integers(2, 9)).tolist(), "questions": questions})
    return units


def log_probabilities(model, tokens: list[int], kind: int, count: int):
    logits = model(input_ids=torch.tensor([tokens])).logits[0, -1]
    groups = {0: [YES, NO], 1: [[t] for t in LETTERS[:count]], 2: [[t] for t in DIGITS[:count]]}[kind]
    own = torch.stack([torch.logsumexp(logits[group], 0) for group in groups])
    return functional.log_softmax(own, -1), torch.logsumexp(own, 0) - torch.logsumexp(logits, 0)


def decision_loss(model, units: list[dict], settings: dict):
    losses = []
    for unit in units:
        for question in unit["questions"]:
            gold = torch.tensor(question["gold"])
            count, kind = len(gold), question["kind"]
            log_p, log_mass = log_probabilities(model, unit["state"] + question["tokens"], kind, count)
            p, smoothing = log_p.exp(), settings.get("label_smoothing", 0.0)
            loss = -(((1 - smoothing) * gold + smoothing / count) * log_p).sum()
            loss = loss + settings.get("brier_weight", 0.0) * ((p - gold) ** 2).sum()
            if kind == 2:
                levels = torch.arange(count)
                distance = (levels[:, None] - levels).abs() / (count - 1)
                loss = loss + settings.get("ordinal_weight", 0.0) * (p @ distance @ gold)
                loss = loss + settings.get("rps_weight", 0.0) * ((p.cumsum(0) - gold.cumsum(0)) ** 2).sum()
            losses.append(loss - settings.get("vocabulary_weight", 0.0) * log_mass)
    return torch.stack(losses).mean()


def rerank_units() -> list[dict]:
    rng, units = np.random.default_rng(4), []
    for number in range(4):
        count = 3 + number % 3
        labels = np.zeros(count)
        labels[rng.integers(count)] = 1.0
        documents = [
            {"tokens": rng.integers(7, 24, rng.integers(2, 6)).tolist(), "label": float(label)} for label in labels
        ]
        units.append({"query": rng.integers(7, 24, rng.integers(2, 9)).tolist(), "documents": documents})
    return units


def rerank_loss(model, units: list[dict], settings: dict):
    losses = []
    for unit in units:
        labels = torch.tensor([document["label"] for document in unit["documents"]])
        scores = []
        for document in unit["documents"]:
            logits = model(input_ids=torch.tensor([unit["query"] + document["tokens"]])).logits[0, -1]
            scores.append(torch.logsumexp(logits[YES[:1]], 0) - torch.logsumexp(logits[NO], 0))
        scores = torch.stack(scores)
        match settings["rerank_loss"]:
            case "pointwise":
                losses += list(functional.binary_cross_entropy_with_logits(scores, labels, reduction="none"))
            case "listwise":
                losses.append(-(labels / labels.sum() * functional.log_softmax(scores, -1)).sum())
            case "pairwise":
                pairs = [
                    -functional.logsigmoid(scores[i] - scores[j])
                    for i in range(len(labels))
                    for j in range(len(labels))
                    if labels[i] > labels[j]
                ]
                losses.append(torch.stack(pairs).mean())
    return torch.stack(losses).mean()


DECISIONS = {
    "soft": {},
    "smoothed": {"label_smoothing": 0.1},
    "whole vocabulary": {"vocabulary_weight": 1.0},
    "proper": {"brier_weight": 0.5, "rps_weight": 0.5, "ordinal_weight": 0.3},
}
RERANKERS = {name: {"rerank_loss": name} for name in ("pointwise", "pairwise", "listwise")}


def cases(loss, units: list[dict], named: dict) -> dict:
    found = {}
    for name, settings in named.items():
        model = load()
        value = loss(model, units, settings)
        value.backward()
        found[name] = {"settings": settings, "loss": float(value), "gradients": gradients(model)}
    return found


def main() -> None:
    decisions, rerankers = decision_units(), rerank_units()
    found = {
        "labels": {"noul": [YES, NO], "choice": [[t] for t in LETTERS], "score": [[t] for t in DIGITS]},
        "decide": {"units": decisions, "cases": cases(decision_loss, decisions, DECISIONS)},
        "rerank": {"units": rerankers, "cases": cases(rerank_loss, rerankers, RERANKERS)},
    }
    (HERE / "reads.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
