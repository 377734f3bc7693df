"""Make the goldens of policy gradients: TRL's advantages, losses, metrics and gradients of given answers, and curves.

Run with torch, transformers, peft and trl installed (made with torch 2.13, transformers 5.24 and trl 1.16, in float32
on a CPU), after `make_models.py`:

    python tests/goldens/make_policy.py

The reference is `qwen3_tied`; the model that wrote the answers has every weight w times 1 + 0.1 cos(index), the model
in training times 1 + 0.02 sin(index) on top, unless a case is "on policy". TRL's own trainers compute everything from
the answers on: `_generate_and_score_completions`, whose `_generate` returns them, and `_compute_loss`. `policy.json`:
    groups                    prompts; four answers each, some not ended; their rewards by two functions, and sampling's
                              log-probabilities
    cases.<name>              settings; advantages, loss, metrics; (norm, Σ gradient · cos(index / 10)) of parameters
    curves.<name>             losses of 15 updates on the answers, AdamW with learning rate 1e-3
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

HERE = Path(__file__).parent
FOLDER = HERE / "qwen3_tied"
EOS, ANSWERS, LONGEST, STEPS = 1, 4, 16, 15
CASES = {
    "dapo": {},
    "dapo, on policy": {"on_policy": True},
    "grpo": {"beta": 0.04, "scale_rewards": "batch"},
    "grpo, plain KL": {"beta": 0.04, "use_bias_correction_kl": False, "temperature": 0.7},
    "dr_grpo": {"scale_rewards": "none", "delta": 1.1},
    "bnpo": {"mask_truncated_completions": True, "epsilon_low": 0.01, "epsilon_high": 0.05},
    "dapo, entropy": {"top_entropy_quantile": 0.4, "multi_objective_aggregation": "normalize_then_sum"},
    "dr_grpo, entropy bonus": {"entropy_coef": 0.1, "mask_truncated_completions": True},
    "grpo, bonus of some entropies": {"entropy_coef": 0.1, "top_entropy_quantile": 0.4, "temperature": 0.7},
    "grpo, off-policy mask": {"off_policy_mask_threshold": 0.01},
    "gspo": {"epsilon_low": 0.003, "epsilon_high": 0.004, "beta": 0.04},
    "cispo": {"epsilon_high": 1.05},
    "dapo, token_truncate": {"importance_sampling_mode": "token_truncate", "importance_sampling_max": 1.02},
    "dapo, token_mask": {"importance_sampling_mode": "token_mask", "importance_sampling_max": 1.02},
    "dapo, sequence_truncate": {"importance_sampling_mode": "sequence_truncate", "importance_sampling_max": 1.02},
    "grpo, sequence_mask": {"importance_sampling_mode": "sequence_mask", "importance_sampling_max": 1.02},
    "sapo": {"sapo_temperature_neg": 1.3, "beta": 0.04},
    "luspo": {"epsilon_low": 0.003, "epsilon_high": 0.004},
    "vespo": {"vespo_k_pos": 1.5},
    "vespo, token_truncate": {"importance_sampling_mode": "token_truncate", "importance_sampling_max": 1.02},
    "rloo": {"beta": 0.05, "epsilon_low": 0.02},
    "rloo, normalized": {"beta": 0.0, "normalize_advantages": True},
}
CURVES = ("dapo", "gspo", "rloo")


def make_groups() -> list[dict]:
    """Return prompts with answers, of which about a third is not ended; rewards, of which one is None."""
    rng, groups = np.random.default_rng(0), []
    for _ in range(3):
        answers = [rng.integers(3, 24, rng.integers(1, 9)).tolist() for _ in range(ANSWERS)]
        answers = [tokens if rng.random() < 0.3 else [*tokens, EOS] for tokens in answers]
        rewards = rng.integers(0, 3, (ANSWERS, 2)).astype(float).tolist()
        prompt = rng.integers(3, 24, rng.integers(2, 6)).tolist()
        noise = [rng.normal(0, 0.02, len(tokens)).tolist() for tokens in answers]
        groups.append({"prompt": prompt, "answers": answers, "rewards": rewards, "noise": noise})
    groups[1]["rewards"][0] = [None, None]
    groups[0]["rewards"][2][1] = None
    return groups


def multiply(model, factor) -> None:
    """Multiply the model's weights by a function of their index."""
    with torch.no_grad():
        for parameter in model.parameters():
            wave = factor(np.arange(parameter.numel())).reshape(parameter.shape)
            parameter.mul_(torch.tensor(wave, dtype=torch.float32))


def tokenizer():
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": EOS}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


class Given:
    """Answers that a trainer is given in place of its own."""

    def _generate(self, prompts):
        ids = [list(group["prompt"]) for group in self.groups for _ in range(ANSWERS)]
        answers = [list(tokens) for group in self.groups for tokens in group["answers"]]
        if isinstance(self, RLOOTrainer):
            return ids, answers, [""] * len(ids)
        return ids, answers, None, [""] * len(ids), self.sampled, {}, None, None


class GRPO(Given, GRPOTrainer):
    pass


class RLOO(Given, RLOOTrainer):
    pass


def function(number: int):
    def reward(prompts, completions, rewards, **columns):
        return [None if row[number] is None else float(row[number]) for row in rewards]

    reward.__name__ = f"reward{number}"
    return reward


def trainer_of(name: str, settings: dict, groups: list[dict]):
    """Return TRL's trainer for our settings, before its answers are scored."""
    settings = {key: value for key, value in settings.items() if key != "on_policy"}
    mode, largest = settings.pop("importance_sampling_mode", None), settings.pop("importance_sampling_max", 3.0)
    objective = name.split(",")[0]
    settings["epsilon"] = settings.pop("epsilon_low", 0.2)
    rows = len(groups) * ANSWERS
    common = {
        **{
            "output_dir": tempfile.mkdtemp(),
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "reward_weights": [1, 0.5],
        },
        **{"per_device_train_batch_size": rows, "num_generations": ANSWERS, "max_completion_length": LONGEST},
        **{"gradient_checkpointing": False, "num_iterations": 2},
    }
    if objective == "rloo":
        config, cls = RLOOConfig(**common, **settings), RLOO
    else:
        kind = {"loss_type": "grpo" if objective == "gspo" else objective}
        if objective in ("gspo", "luspo"):
            kind["importance_sampling_level"] = "sequence"
        config, cls = GRPOConfig(**common, **kind, **settings), GRPO
    data = Dataset.from_list([{"prompt": "a"}] * rows)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation="eager")
    functions = [function(0), function(1)]
    trainer = cls(model=model, reward_funcs=functions, args=config, train_dataset=data, processing_class=tokenizer())
    multiply(trainer.model.train(), lambda index: 1 + 0.1 * np.cos(index))
    trainer.groups, trainer.sampled = groups, None
    if mode:
        trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
        trainer.vllm_importance_sampling_mode, trainer.vllm_importance_sampling_clip_max = mode, largest
        trainer.sampled = [row for group in groups for row in group["sampled"]]
    return trainer


def scored(trainer, groups: list[dict], settings: dict) -> dict:
    """Return TRL's inputs of the loss."""
    rows = [{"prompt": "a", "rewards": rewards} for group in groups for rewards in group["rewards"]]
    inputs = trainer._generate_and_score_completions(rows)
    if not settings.get("on_policy"):
        multiply(trainer.model, lambda index: 1 + 0.02 * np.sin(index))
    trainer.current_gradient_accumulation_steps = 1
    return inputs


def case(name: str, settings: dict, groups: list[dict]) -> dict:
    trainer = trainer_of(name, settings, groups)
    inputs = scored(trainer, groups, settings)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = {}
    for parameter_name, parameter in trainer.model.named_parameters():
        if "layers.1" in parameter_name or not parameter_name.endswith(
            ("embed_tokens.weight", "q_proj.weight", "down_proj.weight")
        ):
            continue  # the file stays small
        flat = parameter.grad.double().numpy().ravel()
        gradients[parameter_name] = [float(np.linalg.norm(flat)), float(flat @ np.cos(np.arange(flat.size) / 10))]
    metrics = {
        key: float(np.mean(value)) for key, value in trainer._metrics["train"].items() if key not in ("num_tokens",)
    }
    return {
        "settings": settings,
        "advantages": inputs["advantages"].tolist(),
        "loss": float(loss.detach()),
        "metrics": metrics,
        "gradients": gradients,
    }


def curve(name: str, groups: list[dict]) -> list[float]:
    trainer = trainer_of(name, CASES[name], groups)
    inputs = scored(trainer, groups, {"on_policy": True})
    optimizer, losses = torch.optim.AdamW(trainer.model.parameters(), lr=1e-3, weight_decay=0.0, eps=1e-8), []
    for _ in range(STEPS):
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def sample(groups: list[dict]) -> None:
    """Add sampling's log-probabilities: those of the model that wrote the answers, and noise."""
    trainer = trainer_of("dapo", {}, groups)
    inputs = scored(trainer, groups, {"on_policy": True})
    known = inputs["old_per_token_logps"].tolist()
    for group in groups:
        rows = [known.pop(0)[: len(tokens)] for tokens in group["answers"]]
        noise = group.pop("noise")
        group["sampled"] = [[a + b for a, b in zip(*both, strict=True)] for both in zip(rows, noise, strict=True)]
    groups[0]["sampled"] = rounded(groups[0]["sampled"])


def rounded(value):
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def main() -> None:
    groups = make_groups()
    sample(groups)
    groups = rounded(groups)
    cases = {name: case(name, settings, groups) for name, settings in CASES.items()}
    golden = {"groups": groups, "cases": cases, "curves": {name: curve(name, groups) for name in CURVES}}
    (HERE / "policy.json").write_text(json.dumps(rounded(golden), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
