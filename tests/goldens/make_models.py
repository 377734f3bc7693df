"""Make the goldens of the model families: tiny random models in transformers, their logits, loss and gradients.

Run with torch and transformers installed (made with torch 2.13 and transformers 5.17, in float32 on a CPU):

    python tests/goldens/make_models.py

Each folder is what `save_pretrained` writes, and `golden.safetensors`:
    tokens [T], lengths [S]   documents, one after the other
    logits [T, V]             each document on its own
    loss                      mean cross-entropy over all predicted tokens of all documents
    names, norms, probes      of the gradients of that loss, see `drawn.py`
"""

import shutil
from pathlib import Path

import numpy as np
import torch
from drawn import packed, probes
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

HERE = Path(__file__).parent
LENGTHS = (11, 1, 5, 20)
SHAPE = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "qwen3_tied": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "qwen3_window_bias": Qwen3Config(
        **SHAPE, attention_bias=True, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "llama_tied_llama3": LlamaConfig(**SHAPE, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
    "llama_yarn": LlamaConfig(**SHAPE, rope_parameters=YARN_ROPE),
    "llama_bias_no_groups": LlamaConfig(
        **SHAPE | {"num_key_value_heads": 4, "head_dim": None}, attention_bias=True, mlp_bias=True
    ),
}


def randomize(model: PreTrainedModel, seed: int) -> None:
    """Draw weights with non-uniform attention, and non-trivial norms and biases."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.3 * noise)


def documents(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(SHAPE["vocab_size"], (length,), generator=generator) for length in LENGTHS]


def logits_and_loss(model: torch.nn.Module, tokens: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each document's logits and the mean loss over all predicted tokens."""
    logits = [model(document[None]).logits[0] for document in tokens]
    total = sum(
        torch.nn.functional.cross_entropy(scores[:-1], document[1:], reduction="sum")
        for scores, document in zip(logits, tokens, strict=True)
    )
    return torch.cat(logits), total / sum(length - 1 for length in LENGTHS)


def golden(model: torch.nn.Module, tokens: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of `golden.safetensors`, with gradients, whole, of parameters that require them."""
    logits, loss = logits_and_loss(model, tokens)
    if loss.requires_grad:
        loss.backward()
    gradients = {f"grad.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    inputs = {"tokens": torch.cat(tokens).int(), "lengths": torch.tensor(LENGTHS, dtype=torch.int32)}
    return {**inputs, "logits": logits.detach(), "loss": loss.detach(), **gradients}


def probed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a golden's tensors with norms and probes, packed, in place of gradients."""
    kept = {key: tensor.numpy() for key, tensor in tensors.items() if not key.startswith("grad.")}
    for key in tensors.keys() - kept.keys():
        gradient, name = tensors[key].numpy(), key.removeprefix("grad.")
        kept |= {f"norm.{name}": (gradient**2).sum() ** 0.5, f"probes.{name}": probes(name, gradient)}
    return {key: torch.from_numpy(np.array(array)) for key, array in packed(kept).items()}


def make(folder: Path, config: PreTrainedConfig, seed: int) -> None:
    """Write a golden folder."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    randomize(model, seed)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    save_file(probed(golden(model, documents(seed))), folder / "golden.safetensors")


if __name__ == "__main__":
    for seed, (name, config) in enumerate(MODELS.items()):
        make(HERE / name, config, seed)
