"""Families added from outside the library, as tables of parts, against plain definitions."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import repeat

from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import PRESETS
from jaxglue.models import FAMILIES, Family, build_model, config_from_hf, register
from jaxglue.models.config import AttentionOptions, DecoderConfig, Scales
from jaxglue.models.family import NormNames, Parts
from jaxglue.models.hf_fields import decoder_fields
from jaxglue.models.parameters import split_model
from jaxglue.ops.norm_rope import NormStyle
from jaxglue.ops.segments import pack_segments

WINDOW, CAP, SCALE = 3, 4.0, 0.4


def read_toy(raw):
    fields = decoder_fields(raw, partial=0.5, activations=("gelu_pytorch_tanh",))
    layers = raw["num_hidden_layers"]
    return DecoderConfig(
        **fields,
        layer_windows=(None, *(WINDOW,) * (layers - 1)),
        layer_ropes=(fields["rope"], *(replace(fields["rope"], rope_theta=50.0),) * (layers - 1)),
        attention=AttentionOptions(scale=SCALE, softcap=CAP),
        scales=Scales(embedding=raw["hidden_size"] ** 0.5, residual=0.7, logit_divisor=2.0, logit_softcap=CAP),
    )


TOY = Family(
    model_type="toy",
    config_from_hf=read_toy,
    parts=Parts(
        norms=NormNames(
            after_attention="post_attention_layernorm",
            before_mlp="pre_feedforward_layernorm",
            after_mlp="post_feedforward_layernorm",
        ),
        norm=NormStyle(offset=1.0, rounds_first=False),
        head_norms="heads",
    ),
)


def read_after(raw):
    fields = decoder_fields(raw, interleaved=True)
    ropes = (fields["rope"], *(None,) * (raw["num_hidden_layers"] - 1))
    return DecoderConfig(**fields, layer_windows=(None,) * raw["num_hidden_layers"], layer_ropes=ropes)


AFTER = Family(
    model_type="after",
    config_from_hf=read_after,
    parts=Parts(
        norms=NormNames(
            before_attention=None,
            after_attention="post_attention_layernorm",
            before_mlp=None,
            after_mlp="post_feedforward_layernorm",
        ),
        head_norms="full",
    ),
)


@pytest.fixture(params=[pytest.param(TOY, id="toy"), repeat(AFTER, id="after")])
def family(request):
    with FAMILIES.scope():
        yield register(request.param)


@pytest.fixture
def model(family, tiny_config):
    config = config_from_hf({**tiny_config, "model_type": family.model_type, "num_hidden_layers": 2})
    model = build_model(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    noise = np.random.default_rng(0)
    changed = jax.tree.map(lambda x: x + 0.1 * noise.standard_normal(x.shape).astype(x.dtype), nnx.state(model))
    nnx.update(model, changed)
    return model


def norm(x, weight, eps, offset):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * (offset + weight)


def turn(x, theta, dims, interleaved):
    """Rotate heads [T, N, H] as complex numbers."""
    half = dims // 2
    left, right = (x[..., 0:dims:2], x[..., 1:dims:2]) if interleaved else (x[..., :half], x[..., half:dims])
    angles = np.arange(len(x))[:, None] * theta ** (-2 * np.arange(half) / dims)
    turned = (left + 1j * right) * np.exp(1j * angles)[:, None]
    pairs = (turned.real, turned.imag)
    out = np.stack(pairs, -1).reshape(*x.shape[:-1], dims) if interleaved else np.concatenate(pairs, -1)
    return np.concatenate([out, x[..., dims:]], -1)


def cap(x, bound):
    return x if bound is None else bound * np.tanh(x / bound)


def plain_logits(model, tokens):
    """Compute the logits of one document in float64, from the definition of both families."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    c, toy = model.config, model.config.model_type == "toy"
    offset, factor = (1.0, 0.7) if toy else (0.0, 1.0)
    x = p["embed_tokens"]["weight"][tokens] * (c.hidden_size**0.5 if toy else 1.0)
    T, N, K, H = len(tokens), c.num_attention_heads, c.num_key_value_heads, c.head_dim
    q_index, k_index = np.arange(T)[:, None], np.arange(T)
    for index in range(c.num_hidden_layers):
        layer = p["layers"][index]
        attn, mlp = layer["self_attn"], layer["mlp"]
        normed = lambda name, x: norm(x, layer[name]["weight"], c.rms_norm_eps, offset)  # noqa: B023, E731
        h = normed("input_layernorm", x) if toy else x
        q, k, v = (h @ attn[f"{name}_proj"]["weight"].T for name in "qkv")
        shape = (T, -1, H)
        if toy:
            q, k = q.reshape(shape), k.reshape(shape)
        q, k = (norm(y, attn[f"{n}_norm"]["weight"], c.rms_norm_eps, offset) for y, n in ((q, "q"), (k, "k")))
        q, k, v = q.reshape(shape), k.reshape(shape), v.reshape(shape)
        if toy or index == 0:
            theta = 50.0 if toy and index else 10_000.0
            q, k = (turn(y, theta, H // 2 if toy else H, not toy) for y in (q, k))
        k, v = np.repeat(k, N // K, 1), np.repeat(v, N // K, 1)
        scores = cap(np.einsum("qnh,knh->nqk", q, k) * (SCALE if toy else H**-0.5), CAP if toy else None)
        visible = (k_index <= q_index) & (k_index > q_index - (WINDOW if toy and index else T))
        weights = np.exp(scores) * visible
        out = np.einsum("nqk,knh->qnh", weights / weights.sum(-1, keepdims=True), v).reshape(T, -1)
        x = x + factor * normed("post_attention_layernorm", out @ attn["o_proj"]["weight"].T)
        h = normed("pre_feedforward_layernorm", x) if toy else x
        gate, up = (h @ mlp[f"{name}_proj"]["weight"].T for name in ("gate", "up"))
        gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        gate = gelu if toy else gate / (1 + np.exp(-gate))
        x = x + factor * normed("post_feedforward_layernorm", (gate * up) @ mlp["down_proj"]["weight"].T)
    logits = norm(x, p["norm"]["weight"], c.rms_norm_eps, offset) @ p["lm_head"]["weight"].T
    return cap(logits / 2, CAP) if toy else logits


def test_logits_equal_the_definition(model):
    tokens = np.random.default_rng(1).integers(0, model.config.vocab_size, 9)
    got = jax.jit(lambda: model(tokens[None]))()
    np.testing.assert_allclose(got[0], plain_logits(model, tokens), atol=2e-4)


def test_packed_documents_train_as_separate_ones(model, random_batch):
    graphdefs, trainable, frozen = split_model(model, nnx.Param)
    executor = Executor(graphdefs, model.config, policy=PRESETS["full"], dtype=jnp.float32)
    packed = random_batch([[5, 1, 7]], 13)
    bounds = [(0, 5), (5, 6), (6, 13)]

    def row(array):
        rows = np.zeros((3, 7), array.dtype)
        for index, (start, end) in enumerate(bounds):
            rows[index, : end - start] = array[0, start:end]
        return rows

    values = {name: row(getattr(packed, name)) for name in ("tokens", "targets", "loss_weights")}
    separate = replace(packed, **values, segments=pack_segments([[5], [1], [7]], seq_len=7))
    losses = [executor.loss_and_gradients(trainable, frozen, [batch], 9.0) for batch in (packed, separate)]
    chex.assert_trees_all_close(*losses, rtol=1e-4, atol=1e-6)
    logits = np.concatenate([plain_logits(model, packed.tokens[0, start:end]) for start, end in bounds])
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -(log_probs[np.arange(13), packed.targets[0]] * packed.loss_weights[0]).sum() / 9
    np.testing.assert_allclose(losses[0][0], expected, rtol=1e-4)


def test_an_unknown_model_type_names_the_nearest():
    with pytest.raises(
        ValueError, match=r"model_type 'qwen3_moe2' is not supported: known are .*; the nearest is qwen3_moe"
    ):
        config_from_hf({"model_type": "qwen3_moe2"})
