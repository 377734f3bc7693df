"""Make drafts/eagle.safetensors: an EAGLE-3 head beside a small Llama, by transformers' layers and torch.

Run with torch and transformers installed (made with torch 2.13 and transformers 5.24, in float32 on a CPU):

    python tests/goldens/make_eagle.py

No class of transformers has these heads. Their definition (arXiv 2503.01840, 3.1 and 3.2; published code of its authors
and of vLLM) is written out here over Llama's attention, feed-forward and norms. Each step of drafts is computed for a
text at a time: token t's k-th draft attends to what the head read of tokens up to t, and to its own drafts before.

    tokens [T], lengths [S]          documents, one after the other
    logits.K [Σ (length − 1), W]     of step K at every token that has a next one, for both ways of the residual stream
    fed.K                            tokens that step K reads there
"""

from pathlib import Path

import numpy as np
import torch
from drawn import drawn
from make_models import LENGTHS, SHAPE, documents
from safetensors.numpy import save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaForCausalLM,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

HERE = Path(__file__).parent / "drafts"
FIELDS = SHAPE | {"num_hidden_layers": 4, "rope_theta": 100.0, "rms_norm_eps": 1e-5}
TAPS, WORDS, STEPS = (0, 2, 3), (1, 2, 5, 6, 7, 11, 12, 13, 17, 20, 23), 3


class Head(torch.nn.Module):
    """A head, in the names of its authors' folders."""

    def __init__(self, config: LlamaConfig, *, before: bool):
        super().__init__()
        D, N, K, H = SHAPE["hidden_size"], 4, 2, SHAPE["head_dim"]
        norm = lambda: LlamaRMSNorm(D, eps=config.rms_norm_eps)  # noqa: E731
        linear = lambda *sizes: torch.nn.Linear(*sizes, bias=False)  # noqa: E731
        self.fc, self.norm, self.lm_head = linear(3 * D, D), norm(), linear(D, len(WORDS))
        self.layer = torch.nn.Module()
        self.layer.input_layernorm, self.layer.hidden_norm, self.layer.post_attention_layernorm = norm(), norm(), norm()
        self.layer.mlp, attention = LlamaMLP(config), torch.nn.Module()
        attention.q_proj, attention.k_proj = linear(2 * D, N * H), linear(2 * D, K * H)
        attention.v_proj, attention.o_proj = linear(2 * D, K * H), linear(N * H, D)
        self.layer.self_attn, self.rope = attention, LlamaRotaryEmbedding(config)
        self.before, self.group = before, N // K

    def step(self, embedded, hidden, keys, values, step):
        """Return the layer's output [T, D] of one step, after adding its keys and values to those of earlier steps."""
        layer, T = self.layer, len(hidden)
        normed = layer.hidden_norm(hidden)
        joined = torch.cat([layer.input_layernorm(embedded), normed], -1)
        heads = [
            getattr(layer.self_attn, f"{name}_proj")(joined).reshape(T, -1, SHAPE["head_dim"]).transpose(0, 1)[None]
            for name in "qkv"
        ]
        cos, sin = self.rope(joined, torch.arange(T)[None] + step)
        q, k = apply_rotary_pos_emb(*heads[:2], cos, sin)
        keys.append(k.repeat_interleave(self.group, 1)[0])
        values.append(heads[2].repeat_interleave(self.group, 1)[0])
        scores = q[0] @ keys[0].transpose(1, 2)
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
        own = torch.stack([(q[0] * later).sum(-1) for later in keys[1:]], -1) if step else scores[..., :0]
        weights = (torch.cat([scores, own], -1) / SHAPE["head_dim"] ** 0.5).softmax(-1)
        out = weights[..., :T] @ values[0]
        for index, later in enumerate(values[1:]):
            out = out + weights[..., T + index, None] * later
        stream = (normed if self.before else hidden) + layer.self_attn.o_proj(out.transpose(0, 1).reshape(T, -1))
        return stream + layer.mlp(layer.post_attention_layernorm(stream))


def main() -> None:
    """Write the golden."""
    torch.manual_seed(0)
    config = LlamaConfig(**FIELDS)
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(torch.from_numpy(drawn(name, tuple(value.shape))))
    tensors = {"tokens": torch.cat(documents(0)).numpy(), "lengths": np.array(LENGTHS)}
    for before in (False, True):
        head = Head(config, before=before).float()
        with torch.no_grad():
            for name, value in head.named_parameters():
                value.copy_(torch.from_numpy(drawn(f"eagle.{name}", tuple(value.shape))))
            for key, value in run(model, head).items():
                tensors[f"{key}.{'before' if before else 'after'}"] = value
    save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, HERE / "eagle.safetensors")


def run(model, head) -> dict[str, np.ndarray]:
    """Return the logits of each step, and the tokens that it read."""
    found: dict[str, list] = {}
    for document in documents(0):
        if len(document) < 2:
            continue
        states = model.model(document[None], output_hidden_states=True).hidden_states
        hidden = head.fc(torch.cat([states[tap][0, :-1] for tap in TAPS], -1))
        fed, keys, values = document[1:], [], []
        for step in range(STEPS):
            hidden = head.step(model.model.embed_tokens(fed), hidden, keys, values, step)
            logits = head.lm_head(head.norm(hidden))
            found.setdefault(f"logits.{step}", []).append(logits)
            found.setdefault(f"fed.{step}", []).append(fed)
            fed = torch.tensor(WORDS)[logits.argmax(-1)]
    return {key: torch.cat(values).numpy() for key, values in found.items()}


if __name__ == "__main__":
    main()
