"""Make drafts/: draft heads (multi-token prediction) of families, by transformers' layers and torch.

Run with torch and transformers installed (made with torch 2.13 and transformers 5.24, in float32 on a CPU):

    python tests/goldens/make_drafts.py

No class of transformers has these heads. Their definition (DeepSeek-V3, arXiv 2412.19437, 2.2; published code of
Qwen3-Next) is written out here: fc([norm(embedding of the next token); norm(final state)]), and a model of one layer
without its embedding. The model is that of `make_families.py`, on each document by itself.

    logits [Σ (length − 1), V]   of the head at every token that has a next one
    loss                         mean cross-entropy of the tokens after these
    names, norms, probes         of the gradients to the head, see `drawn.py`; names are ours
"""

from pathlib import Path

import numpy as np
import torch
from drawn import drawn, packed, probes
from make_families import EAGER, MODELS, build, our_name
from make_models import SHAPE, documents
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent / "drafts"
ONE_LAYER = {
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "mlp_only_layers": [],
    "first_k_dense_replace": 0,
}
TYPES = "qwen3_5_moe_text", "qwen3_next", "glm4_moe", "deepseek_v3"


class Head(torch.nn.Module):
    """A head, in the names that ours has but for the layer's."""

    def __init__(self, name: str):
        super().__init__()
        one = HYBRID if name.startswith("qwen") else DENSE_FIRST
        fields = SHAPE | {"pad_token_id": None} | MODELS[name] | one
        self.body = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **fields), **EAGER).model
        del self.body.embed_tokens
        D, norm = SHAPE["hidden_size"], self.body.norm
        eps = getattr(norm, "eps", None) or norm.variance_epsilon
        self.embedding_norm, self.hidden_norm = type(norm)(D, eps=eps), type(norm)(D, eps=eps)
        self.fc = torch.nn.Linear(2 * D, D, bias=False)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the states before the output projection."""
        joined = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1)
        return self.body(inputs_embeds=self.fc(joined)).last_hidden_state

    def named(self) -> dict[str, torch.Tensor]:
        """Return parameters, and the buffers that files hold, by our names."""
        stored = [(name, buffer) for name, buffer in self.named_buffers() if name.endswith("correction_bias")]
        found = {}
        for name, value in [*self.named_parameters(), *stored]:
            found[our_name(name).replace("body.layers.0.", "layer.").replace("body.norm.", "norm.")] = value
        return found


def make(name: str) -> None:
    """Write one family's golden."""
    _, model = build(name, MODELS[name])
    head = Head(name).float().eval()
    with torch.no_grad():
        for path, value in head.named().items():
            value.copy_(torch.from_numpy(drawn(f"draft.{path}", tuple(value.shape))))
    logits, total, count = [], 0.0, 0
    for document in documents(0):
        if len(document) < 2:
            continue
        with torch.no_grad():
            hidden = model.model(document[None]).last_hidden_state[:, :-1]
            embedded = model.get_input_embeddings()(document[None, 1:])
        scores = model.lm_head(head(embedded, hidden))[0]
        logits.append(scores.detach())
        total = total + torch.nn.functional.cross_entropy(scores[:-1], document[2:], reduction="sum")
        count += len(document) - 2
    loss = total / count
    loss.backward()
    tensors = {"logits": torch.cat(logits).numpy(), "loss": loss.detach().numpy()}
    for path, value in head.named().items():
        if isinstance(value, torch.nn.Parameter):
            gradient = value.grad.numpy()
            tensors |= {f"norm.{path}": (gradient**2).sum() ** 0.5, f"probes.{path}": probes(path, gradient)}
    HERE.mkdir(exist_ok=True)
    save_file(packed({key: np.asarray(value) for key, value in tensors.items()}), HERE / f"{name}.safetensors")


if __name__ == "__main__":
    for each in TYPES:
        make(each)
