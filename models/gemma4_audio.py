"""Gemma 4's tower of clips of audio: convolutions over mel bands, and blocks in which a token sees those before it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import PackedContext
from jaxglue.models.gemma4_vision import ClippedLinear, Gemma4TowerConfig, Gemma4Vision, project
from jaxglue.models.linear import Linear
from jaxglue.models.residual import Norm
from jaxglue.models.tower import Angles, Group, Parameter, tower_context
from jaxglue.models.tower_config import tower_sizes
from jaxglue.ops.norm_rope import NormStyle
from jaxglue.ops.segments import PackedSegments
from jaxglue.vision.clips import FRAMES
from jaxglue.vision.rows import Patches

_NORM, _EPS = NormStyle(rounds_first=False), 1e-6
_SIZES = {
    "width": ("hidden_size", 1024),
    "layers": ("num_hidden_layers", 12),
    "heads": ("num_attention_heads", 8),
    "outputs": ("output_proj_dims", 1536),
    "kernel": ("conv_kernel_size", 5),
    "left": ("attention_context_left", 13),
}
_NUMBERS = {
    "eps": ("rms_norm_eps", 1e-6),
    "residual": ("residual_weight", 0.5),
    "cap": ("attention_logit_cap", 50.0),
    "bound": ("gradient_clipping", 1e10),
}
_FIXED = {"hidden_act": "silu", "attention_context_right": 0}


@dataclass(frozen=True, kw_only=True)
class AudioShape:
    """Shape of the tower of clips."""

    width: int
    layers: int
    heads: int
    outputs: int
    """Width of the tower's outputs, which the projector reads."""
    kernel: int
    """Tokens that a block's convolution reads."""
    left: int
    """Tokens that attention reads, and one."""
    channels: tuple[int, int]
    """Outputs of the convolutions over frames and bands."""
    eps: float
    residual: float
    """Factor of feed-forwards' outputs."""
    cap: float
    """Cap of attention's scores, by tanh."""
    bound: float
    """Largest magnitude before norms."""
    clipped: bool
    """Inputs and outputs of linear layers have stored bounds."""


@dataclass(frozen=True, kw_only=True)
class HearingConfig(Gemma4TowerConfig):
    """Shape of the towers of Gemma 4 E2B and E4B, of images and of clips."""

    audio: AudioShape
    roots = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
    projector = ("embed_vision", "embed_audio")

    def make(self, config: DecoderConfig, *, dtype: Any, rngs: nnx.Rngs) -> "Gemma4Hearing":
        """See `TowerConfig`."""
        return Gemma4Hearing(self, config.hidden_size, dtype=dtype, rngs=rngs)

    def initial(self, name: str, spec: jax.ShapeDtypeStruct) -> jax.Array | None:
        """See `Gemma4TowerConfig`."""
        if name.endswith(".per_dim_scale"):
            return jnp.zeros(spec.shape, spec.dtype)
        return super().initial(name, spec)


def with_hearing(raw: Mapping[str, Any], config: DecoderConfig) -> DecoderConfig:
    """Return an architecture that sees with the tower of clips, too; raise ValueError for what is not supported."""
    audio, tower = raw["audio_config"], config.vision
    assert isinstance(tower, Gemma4TowerConfig)
    sizes = tower_sizes(audio, _SIZES, name="audio_config")
    fixed = _FIXED | {"attention_chunk_size": sizes["left"] - 1}
    for name, value in fixed.items():
        if audio.get(name, value) != value:
            raise ValueError(f"audio_config in config.json: {name} {audio[name]!r:.60} is not supported: only {value}")
    numbers: dict[str, Any] = {
        name: default if audio.get(key) is None else audio[key] for name, (key, default) in _NUMBERS.items()
    }
    for name, value in numbers.items():
        if type(value) not in (int, float) or not value > 0:
            raise ValueError(f"audio_config in config.json: {_NUMBERS[name][0]} must be above 0, got {value!r:.60}")
    clipped = audio.get("use_clipped_linears")
    shape = AudioShape(**sizes, **numbers, channels=channels(audio), clipped=clipped is None or bool(clipped))
    own = {field.name: getattr(tower, field.name) for field in fields(tower)}
    return HearingConfig(**own, audio=shape).within(config)


def channels(audio: Mapping[str, Any]) -> tuple[int, int]:
    """Return the outputs of the convolutions of an `audio_config`; raise ValueError for others than two numbers."""
    found = audio.get("subsampling_conv_channels")
    found = (128, 32) if found is None else found
    if not isinstance(found, list | tuple) or len(found) != 2 or not all(type(n) is int and n >= 4 for n in found):
        raise ValueError(
            f"audio_config in config.json: subsampling_conv_channels must be two numbers, got {found!r:.60}"
        )
    return found[0], found[1]


class AudioBlock(nnx.Module):
    """Half a feed-forward, attention, a convolution along the tokens, and half a feed-forward, each added to x."""

    def __init__(self, shape: AudioShape, *, std: float, dtype: Any, rngs: nnx.Rngs):
        W, H = shape.width, shape.width // shape.heads
        linear = partial(ClippedLinear, clipped=shape.clipped, std=std, dtype=dtype, rngs=rngs)
        norm = partial(Norm, W, style=_NORM, dtype=dtype)

        def feed_forward() -> Group:
            norms = {"pre_layer_norm": norm(_EPS), "post_layer_norm": norm(_EPS)}
            return Group(ffw_layer_1=linear(W, 4 * W), ffw_layer_2=linear(4 * W, W), **norms)

        self.feed_forward1, self.feed_forward2 = feed_forward(), feed_forward()
        self.self_attn = Group(
            **{name: linear(W, W) for name in ("q_proj", "k_proj", "v_proj", "post")},
            relative_k_proj=Linear(W, W, bias=False, std=std, dtype=dtype, rngs=rngs),
            per_dim_scale=nnx.Param(jnp.zeros(H, dtype)),
        )
        self.lconv1d = Group(
            linear_start=linear(W, 2 * W),
            linear_end=linear(W, W),
            depthwise_conv1d=Parameter((W, 1, shape.kernel), std, dtype=dtype, rngs=rngs),
            pre_layer_norm=norm(shape.eps),
            conv_norm=norm(shape.eps),
        )
        self.norm_pre_attn, self.norm_post_attn, self.norm_out = norm(_EPS), norm(_EPS), norm(_EPS)
        self.shape = shape

    def __call__(self, x: Float[Array, "B P W"], angles: Angles | None, context: PackedContext) -> Array:
        """Let each token of a clip see the ones before it, up to a distance."""
        x = self._feed(self.feed_forward1, x, context)
        attended = self._attend(self.norm_pre_attn(self._bounded(x)), context)
        x = x + self.norm_post_attn(self._bounded(attended))
        x = self._feed(self.feed_forward2, self._convolve(x, context), context)
        return self.norm_out(self._bounded(x))

    def _bounded(self, x: Array) -> Array:
        bound = min(self.shape.bound, float(jnp.finfo(x.dtype).max))
        return jnp.clip(x, -bound, bound)

    def _feed(self, part: Group, x: Float[Array, "B P W"], context: PackedContext) -> Float[Array, "B P W"]:
        hidden = _silu(part.ffw_layer_1(part.pre_layer_norm(self._bounded(x)), context))
        y = part.post_layer_norm(self._bounded(part.ffw_layer_2(hidden, context)))
        return x + (y * self.shape.residual).astype(x.dtype)

    def _attend(self, normed: Float[Array, "B P W"], context: PackedContext) -> Float[Array, "B P W"]:
        attention, shape, segments = self.self_attn, self.shape, context.segments
        H, cap = shape.width // shape.heads, shape.cap
        projected = (getattr(attention, name)(normed, context) for name in ("q_proj", "k_proj", "v_proj"))
        q, k, v = (y.astype(jnp.float32).reshape(*y.shape[:2], -1, H) for y in projected)
        q = q * (H**-0.5 / math.log(2)) * jax.nn.softplus(attention.per_dim_scale[...].astype(jnp.float32))
        k = k * (math.log(1 + math.e) / math.log(2))
        distances = range(shape.left - 1)
        waves = _waves(len(distances), shape.width)[None].astype(normed.dtype)
        relative = attention.relative_k_proj(waves, context)[0].astype(jnp.float32).reshape(len(distances), -1, H)
        scores = jnp.stack([(q * (_earlier(k, d, segments) + relative[d])).sum(-1) for d in distances], axis=-1)
        sees = segments.positions[:, :, None, None] >= jnp.arange(len(distances))
        weights = jax.nn.softmax(jnp.where(sees, cap * jnp.tanh(scores / cap), -1e9), axis=-1)
        attended: Any = sum(weights[..., d, None] * _earlier(v, d, segments) for d in distances)
        return attention.post(attended.reshape(normed.shape).astype(normed.dtype), context)

    def _convolve(self, x: Float[Array, "B P W"], context: PackedContext) -> Float[Array, "B P W"]:
        part, kernel = self.lconv1d, self.shape.kernel
        value, gate = jnp.split(part.linear_start(part.pre_layer_norm(x), context), 2, axis=-1)
        y = value.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))
        weight = part.depthwise_conv1d.weight[...].astype(jnp.float32)[:, 0]
        sums: Any = sum(weight[:, kernel - 1 - d] * _earlier(y, d, context.segments) for d in range(kernel))
        normed = part.conv_norm(self._bounded(sums.astype(x.dtype)))
        return x + part.linear_end(_silu(normed), context)


def _silu(x: Array) -> Array:
    return jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype)


def _earlier(x: Float[Array, "B P *rest"], distance: int, segments: PackedSegments) -> Float[Array, "B P *rest"]:
    """Return the values of the token so far before each; zeros before a clip's first."""
    padded = jnp.pad(x, ((0, 0), (distance, 0), *[(0, 0)] * (x.ndim - 2)))[:, : x.shape[1]]
    inside = segments.positions >= distance
    return jnp.where(inside.reshape(*inside.shape, *[1] * (x.ndim - 2)), padded, 0)


def _waves(distances: int, width: int) -> Float[Array, "distances width"]:
    """Return sines, then cosines of distances, at frequencies from 1 to a ten-thousandth."""
    half = width // 2
    steps = jnp.exp(jnp.arange(half, dtype=jnp.float32) * (-math.log(1e4) / max(half - 1, 1)))
    turned = jnp.arange(distances, dtype=jnp.float32)[:, None] * steps
    return jnp.concatenate([jnp.sin(turned), jnp.cos(turned)], axis=1)


class Gemma4Hearing(Gemma4Vision):
    """Towers and projectors of images and of clips."""

    def __init__(self, config: HearingConfig, width: int, *, dtype: Any, rngs: nnx.Rngs):
        super().__init__(config, width, dtype=dtype, rngs=rngs)
        shape, std = config.audio, config.initializer_range
        first, second = shape.channels
        own: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        linear = partial(Linear, std=std, dtype=dtype, rngs=rngs)
        self.audio_tower = Group(
            subsample_conv_projection=Group(
                **{
                    name: Group(
                        conv=Parameter((outputs, inputs, 3, 3), std, **own),
                        norm=Norm(outputs, shape.eps, style=_NORM, dtype=dtype),
                    )
                    for name, inputs, outputs in (("layer0", 1, first), ("layer1", first, second))
                },
                input_proj_linear=linear(first // 4 * second, shape.width, bias=False),
            ),
            layers=nnx.List([AudioBlock(shape, std=std, **own) for _ in range(shape.layers)]),
            output_proj=linear(shape.width, shape.outputs, bias=True),
        )
        self.embed_audio = Group(embedding_projection=linear(shape.outputs, width, bias=False))
        self.shape = shape

    def __call__(self, patches: Patches, dtype: Any, *, backend: str = "auto") -> Float[Array, "B I D"]:
        """See `Vision`."""
        if not patches.are_clips:
            return super().__call__(patches, dtype, backend=backend)
        tower, context = self.audio_tower, tower_context(patches, backend)
        x = self._subsample(patches, dtype, context)
        x = self.run_blocks(tower.layers, x, None, context)
        return project(self.embed_audio, tower.output_proj(x, context), self.shape.eps, context)

    def _subsample(self, patches: Patches, dtype: Any, context: PackedContext) -> Float[Array, "B P W"]:
        """Return the tokens of frames: two convolutions, whose steps of two leave one of four frames and bands."""
        parts, segments, count = self.audio_tower.subsample_conv_projection, patches.segments, patches.places[..., 1]
        x = patches.values.reshape(*count.shape, FRAMES, -1, 1).astype(dtype)
        x = self._convolve(parts.layer0, jnp.concatenate([_earlier(x[:, :, -1:], 1, segments), x], axis=2), dtype)
        there = count[..., None] > 2 * jnp.arange(2)  # frames behind the clip's last are none
        x = jnp.where(there[..., None, None], x, 0)
        x = self._convolve(parts.layer1, jnp.concatenate([_earlier(x[:, :, -1:], 1, segments), x], axis=2), dtype)
        return parts.input_proj_linear(x.reshape(*count.shape, -1), context)

    def _convolve(self, part: Group, x: Float[Array, "B P S F C"], dtype: Any) -> Float[Array, "B P s f c"]:
        """Return a convolution of three steps and bands, by steps of two, normed and rectified."""
        weight = part.conv.weight[...].astype(dtype)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (1, 1), (0, 0)))
        steps, bands = ((size - 3) // 2 * 2 + 1 for size in x.shape[2:4])
        taps = ((x[:, :, i : i + steps : 2, j : j + bands : 2], weight[:, :, i, j]) for i in range(3) for j in range(3))
        product = partial(jnp.einsum, "bpsfc,oc->bpsfo", preferred_element_type=jnp.float32)
        summed: Any = sum(product(*tap) for tap in taps)
        y = summed.astype(dtype).astype(jnp.float32)
        y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + self.shape.eps)
        return jax.nn.relu(y * part.norm.weight[...].astype(jnp.float32)).astype(dtype)
