"""Make the goldens of the objectives: TRL's losses, metrics and gradients on a tiny model, and a curve of 30 DPO steps.

Run with torch, transformers, peft and trl installed (made with torch 2.13, transformers 5.24 and trl 1.16, in float32
on a CPU), after `make_models.py`:

    python tests/goldens/make_preferences.py

The reference is `qwen3_tied`, the model the same with every weight w times 1 + 0.1 cos(index). `preferences.json`:
    pairs                     tokens of prompts, preferred and other answers; of KTO, their label
    cases.<name>              settings; loss, metrics; (norm, Σ gradient · cos(index / 10)) of parameters
    curve                     losses of DPO steps on the pairs, 4 at a time, AdamW with learning rate 1e-3
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

HERE = Path(__file__).parent
FOLDER = HERE / "qwen3_tied"
STEPS = 30
DPO = {
    "dpo": {},
    "dpo, beta 0.5": {"beta": 0.5},
    **{f"dpo, {name}": {"loss_type": name} for name in ("hinge", "nca_pair", "apo_zero", "apo_down", "sigmoid_norm")},
    "dpo, robust": {"loss_type": "robust", "label_smoothing": 0.2},
    "dpo, exo_pair": {"loss_type": "exo_pair", "label_smoothing": 0.1},
    "dpo, smoothed": {"label_smoothing": 0.1},
    "rpo": {"rpo_alpha": 0.7},
    "wpo": {"use_weighting": True},
    "ipo": {"beta": 0.2},
}
ODDS = {"orpo": {"beta": 0.3}, "simpo": {"beta": 2.0, "simpo_gamma": 0.4, "label_smoothing": 0.05}}
KTO = {"kto": {"desirable_weight": 1.5, "undesirable_weight": 0.75}}
METRICS = ("rewards/", "logps/", "kl", "nll_loss", "log_odds")


def make_pairs() -> list[dict]:
    rng = np.random.default_rng(0)
    parts = ("prompt_ids", "chosen_ids", "rejected_ids")
    return [{name: rng.integers(3, 24, rng.integers(2, 9)).tolist() for name in parts} for _ in range(8)]


def load(perturbed: bool):
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation="eager")
    if perturbed:
        with torch.no_grad():
            for parameter in model.parameters():
                wave = np.cos(np.arange(parameter.numel())).reshape(parameter.shape)
                parameter.mul_(torch.tensor(1 + 0.1 * wave, dtype=torch.float32))
    return model


def tokenizer():
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def result(model, loss, metrics: dict) -> dict:
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if "layers.1" in name:
            continue  # the file stays small
        flat = parameter.grad.double().numpy().ravel()
        gradients[name] = [float(np.linalg.norm(flat)), float(flat @ np.cos(np.arange(flat.size) / 10))]
    kept = {name: float(np.mean(value)) for name, value in metrics.items() if name.startswith(METRICS)}
    return {"loss": float(loss.detach()), "metrics": kept, "gradients": gradients}


class Tokens:
    """Data sets of tokens, as the trainers prepare them."""

    def _prepare_dataset(self, dataset, *args, **kwargs):
        return dataset


class PairTrainer(Tokens, DPOTrainer):
    pass


class LabelTrainer(Tokens, KTOTrainer):
    pass


def options() -> dict:
    return {"output_dir": tempfile.mkdtemp(), "report_to": [], "use_cpu": True, "bf16": False, "max_length": None}


def dpo(settings: dict, pairs: list[dict], **more):
    """Return TRL's trainer for our settings."""
    settings = dict(settings)
    alpha, smoothing = settings.pop("rpo_alpha", 0), settings.get("label_smoothing", 0)
    kinds = [settings.pop("loss_type", "sigmoid")]
    if kinds == ["sigmoid"] and smoothing:
        kinds = ["aot_unpaired"]  # of one pair, conservative DPO
    weights = [1.0]
    if alpha:
        kinds, weights = [*kinds, "sft"], [1.0, alpha]
    config = DPOConfig(loss_type=kinds, loss_weights=weights, **settings, **options(), **more)
    shared = {"train_dataset": Dataset.from_list(pairs), "processing_class": tokenizer()}
    return PairTrainer(model=load(True), ref_model=load(False), args=config, **shared)


def logged(trainer) -> dict:
    """Return the metrics of a trainer whose model is as loaded, in evaluation mode."""
    assert not trainer.model.training
    return trainer._metrics["eval"]


def dpo_case(name: str, settings: dict, pairs: list[dict]) -> dict:
    settings = {"loss_type": "ipo", **settings} if name == "ipo" else settings
    trainer = dpo(settings, pairs)
    batches = [[pair] for pair in pairs] if trainer.loss_types == ["aot_unpaired"] else [pairs]
    losses = [trainer.compute_loss(trainer.model, trainer.data_collator(batch)) for batch in batches]
    return result(trainer.model, sum(losses) / len(losses), logged(trainer))


def kto_case(settings: dict, pairs: list[dict]) -> dict:
    completions = [pair["chosen_ids"] if index % 3 else pair["rejected_ids"] for index, pair in enumerate(pairs)]
    rows = [
        {
            "prompt_ids": pair["prompt_ids"],
            "completion_ids": completions[index],
            "KL_completion_ids": completions[index - 1],
            "label": bool(index % 3),
        }
        for index, pair in enumerate(pairs)
    ]
    config = KTOConfig(**settings, **options(), per_device_train_batch_size=len(rows))
    shared = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer()}
    trainer = LabelTrainer(model=load(True), ref_model=load(False), args=config, **shared)
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(rows))
    return result(trainer.model, loss, logged(trainer))


def odds_case(name: str, settings: dict, pairs: list[dict]) -> dict:
    """Return a result of the trainers without a reference, made without their set-up."""
    cls = ORPOTrainer if name == "orpo" else CPOTrainer
    trainer = cls.__new__(cls)
    more = {"loss_type": "simpo", "cpo_alpha": 0.0, "alpha": 0.0, "label_smoothing": 0.0, "simpo_gamma": 0.0}
    fixed = {"is_encoder_decoder": False, "padding_value": 0, "pad_token_id": 0, "label_pad_token_id": -100}
    trainer.__dict__ |= {**more, **fixed, **settings, "aux_loss_enabled": False, "accelerator": Accelerator(cpu=True)}
    batch = {}
    for kind in ("chosen", "rejected"):
        rows = [(pair["prompt_ids"], pair[f"{kind}_ids"]) for pair in pairs]
        longest = max(len(prompt) + len(answer) for prompt, answer in rows)
        pad = [longest - len(prompt) - len(answer) for prompt, answer in rows]
        both = list(zip(rows, pad, strict=True))
        batch[f"{kind}_input_ids"] = torch.tensor([p + a + [0] * n for (p, a), n in both])
        batch[f"{kind}_attention_mask"] = torch.tensor([[1] * len(p + a) + [0] * n for (p, a), n in both])
        batch[f"{kind}_labels"] = torch.tensor([[-100] * len(p) + a + [-100] * n for (p, a), n in both])
    model = load(True)
    return result(model, *trainer.get_batch_loss_metrics(model, batch))


def curve(pairs: list[dict]) -> list[float]:
    trainer = dpo({}, pairs)
    optimizer, losses = torch.optim.AdamW(trainer.model.parameters(), lr=1e-3, weight_decay=0.0, eps=1e-8), []
    for step in range(STEPS):
        batch = trainer.data_collator(pairs[4 * (step % 2) :][:4])
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def rounded(value):
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def main() -> None:
    pairs = make_pairs()
    cases = {name: dpo_case(name, settings, pairs) | {"settings": settings} for name, settings in DPO.items()}
    cases |= {name: odds_case(name, settings, pairs) | {"settings": settings} for name, settings in ODDS.items()}
    cases |= {name: kto_case(settings, pairs) | {"settings": settings} for name, settings in KTO.items()}
    golden = {"pairs": pairs, "cases": cases, "curve": curve(pairs)}
    (HERE / "preferences.json").write_text(json.dumps(rounded(golden), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
