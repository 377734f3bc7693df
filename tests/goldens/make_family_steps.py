"""Make family_steps/: ten steps of AdamW on PEFT's adapters of all linear layers and experts in each family's layers.

Run with torch, transformers and peft installed (made with torch 2.13, transformers 5.24 and peft 0.21.2):

    python tests/goldens/make_family_steps.py [TYPE …]

Weights and first adapters are those of `drawn.py`, B zero; the documents of step i are those of seed i. Each file has
losses, the steps' tokens, and of each matrix the norm and `probes` of its movement, `packed`.
"""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from drawn import drawn, packed, probes
from make_families import MODELS, build
from make_models import LENGTHS, documents, logits_and_loss
from make_peft_adapters import our_name
from peft import LoraConfig, get_peft_model
from peft.tuners import tuners_utils
from peft.tuners.lora.layer import ParamWrapper
from peft.utils import transformers_weight_conversion
from safetensors.numpy import save_file

HERE = Path(__file__).parent / "family_steps"
STEPS, RATE = 10, 1e-2
RATES = dict.fromkeys(("qwen3_next", "olmo_hybrid_nope", "kimi_linear", "bailing_hybrid"), 1e-3)
"""Of those that at `RATE` part from themselves after a change of 1e-7."""
LORA = {"r": 2, "lora_alpha": 8}
LINEARS = r"\w+_proj", "w[123]", r"in_proj_\w+", "shared_expert_gate", "per_layer_input_gate", "per_layer_projection"
LINEARS += "input_linear", "output_linear", "kv_a_proj_with_mqa"
TARGETS = rf".*\.layers\.\d+\.(.+\.)?({'|'.join(LINEARS)})"
EXPERTS = "experts.gate_up_proj", "experts.up_proj", "experts.down_proj"


class Matrix(NamedTuple):
    """A trained matrix, and its values in the layout that ours has."""

    parameter: torch.nn.Parameter
    ours: Callable[[torch.Tensor], torch.Tensor]
    theirs: Callable[[torch.Tensor], torch.Tensor]


def same(values: torch.Tensor) -> torch.Tensor:
    """Return the values."""
    return values


def matrices(model: torch.nn.Module) -> Iterator[tuple[str, Matrix]]:
    """Yield our names of an adapter's matrices; experts' are [E, R, in] and [E, out, R] here.

    PEFT's are [E·R, in] and [out, R·E].
    """
    R = LORA["r"]
    for path, module in model.named_modules():
        if not isinstance(module, ParamWrapper):
            continue
        E = module.num_experts
        name = f"{our_name(path).replace('.base_layer', '')}.{module.parameter_name}"
        A, B = module.lora_A["default"].weight, module.lora_B["default"].weight
        yield f"{name}.lora_A", Matrix(A, lambda x, E=E: x.view(E, R, -1), lambda x: x.flatten(0, 1))
        yield (
            f"{name}.lora_B",
            Matrix(B, lambda x, E=E: x.view(-1, R, E).permute(2, 0, 1), lambda x: x.permute(1, 2, 0).flatten(1)),
        )
    for path, parameter in model.named_parameters():
        if parameter.requires_grad and not re.search(r"\.experts\.(base_layer\.)*lora_", path):
            yield our_name(path), Matrix(parameter, same, same)


def make(name: str) -> None:
    """Write one family's steps."""
    torch.manual_seed(0)
    # It takes names of a shared expert's projections for those of experts in older files, and doubles their ranks.
    transformers_weight_conversion._convert_peft_config_moe = lambda *_: None
    # It refuses Mamba-2's out_proj, whose adapter the fused kernel ignores, which is not here.
    tuners_utils._check_lora_target_modules_mamba = lambda *_: None
    _, model = build(name, MODELS[name])
    paths = [path for path, _ in model.named_parameters()]
    experts = [part for part in EXPERTS if any(path.endswith(part) for path in paths)]
    config = LoraConfig(**LORA, target_modules=TARGETS, target_parameters=experts or None)
    model = get_peft_model(model, config).eval()
    trained = dict(matrices(model))
    with torch.no_grad():
        for path, (parameter, ours, theirs) in trained.items():
            values = torch.from_numpy(drawn(path, tuple(ours(parameter).shape))) * ("lora_A" in path)
            parameter.copy_(theirs(values))
    before = {path: matrix.parameter.detach().clone() for path, matrix in trained.items()}
    rate = RATES.get(name, RATE)
    optimizer = torch.optim.AdamW(
        [matrix.parameter for matrix in trained.values()], lr=rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    )
    losses = []
    for step in range(STEPS):
        _, loss = logits_and_loss(model, documents(step))
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tensors = {"losses": torch.stack(losses).numpy(), "lengths": np.array(LENGTHS, np.int32)}
    if name in RATES:
        tensors["rate"] = np.array(rate, np.float32)
    tensors["tokens"] = torch.stack([torch.cat(documents(step)) for step in range(STEPS)]).int().numpy()
    for path, (parameter, ours, _) in trained.items():
        moved = ours(parameter.detach() - before[path]).numpy()
        tensors[f"norm.{path}"] = (moved**2).sum() ** 0.5
        tensors[f"probes.{path}"] = probes(path, moved)
    HERE.mkdir(exist_ok=True)
    save_file(packed(tensors), HERE / f"{name}.safetensors")


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS.keys() - {"cohere"}:
        make(name)
