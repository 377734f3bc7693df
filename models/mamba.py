"""Mamba-2 (arXiv 2405.21060), in place of attention in some layers of a family, or beside it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.models.config import CacheSizes, DecoderConfig, LayerKind, Mixer
from jaxglue.models.context import LayerContext
from jaxglue.models.family import Parts
from jaxglue.models.hf_fields import check_fields
from jaxglue.models.linear import layer_linear
from jaxglue.models.residual import Branch, Norm
from jaxglue.ops import names
from jaxglue.ops.backend import BackendChoice, Capability
from jaxglue.ops.delta_rule import gated_rms_norm
from jaxglue.ops.projection import Projection, adapted_projection
from jaxglue.ops.recurrence import SlotStates
from jaxglue.ops.residual_norm import Normed
from jaxglue.ops.state_space import (
    STATE_SPACE,
    Mamba2Weights,
    StateHeads,
    StateSpaceCall,
    gated_group_norm,
    mamba2,
    why_no_split,
)
from jaxglue.settings.config import PositiveFloat, PositiveInt

GatedNorm = Literal["gate_first", "gate_last", "none"]
"""The output's norm: of the product with its gate, before that, or none."""


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(Mixer):
    """Sizes and factors of Mamba-2."""

    title = "Mamba-2"
    module = "mamba"
    recurrent = True
    record = "mamba"

    heads: StateHeads
    conv_width: int
    """Tokens of the convolution before the recurrence."""
    conv_bias: bool = True
    input_bias: bool = False
    output_bias: bool = False
    limits: tuple[float, float] = (0.0, float("inf"))
    """Of step sizes."""
    norm: GatedNorm = "gate_first"
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Factors of the projections to gate, x, B, C and step sizes."""

    def __post_init__(self) -> None:
        if self.heads.values % self.heads.groups:
            raise ValueError(
                f"Mamba-2's {self.heads.values} heads must be a multiple of its {self.heads.groups} groups"
            )
        if not 0 <= self.limits[0] <= self.limits[1]:
            raise ValueError(f"time_step_limit in config.json: expected [least, most], got {list(self.limits)}")

    @property
    def projected(self) -> int:
        """Return the width of the input's projection: gate, x, B, C, and step sizes."""
        return self.heads.value_width + self.heads.width + self.heads.values

    def make(self, config: DecoderConfig, parts: Parts, kind: LayerKind, *, dtype, rngs: nnx.Rngs) -> "Mamba2":
        """See `Mixer`."""
        return Mamba2(config, kind, self, dtype=dtype, rngs=rngs)

    def weights(self, config: DecoderConfig, kind: LayerKind) -> int:
        """See `Mixer`."""
        return config.hidden_size * (self.projected + self.heads.value_width)

    def attended(self, heads: int, head_dim: int) -> tuple[int, int]:
        """See `Mixer`."""
        return self.heads.values, self.heads.value_dim

    def make_cache(self, kind: LayerKind, sizes: CacheSizes) -> SlotStates:
        """See `Mixer`."""
        inputs = jax.ShapeDtypeStruct((self.conv_width - 1, self.heads.width), sizes.activations)
        states = jax.ShapeDtypeStruct((self.heads.values, self.heads.state_dim, self.heads.value_dim), jnp.float32)
        return SlotStates.empty({"inputs": inputs, "states": states}, sizes.slots, sizes.device)

    def state_bytes(self, dtype) -> int:
        """See `Mixer`."""
        state = 4 * self.heads.value_width * self.heads.state_dim
        return state + (self.conv_width - 1) * self.heads.width * jnp.dtype(dtype).itemsize

    def step_values(self, dtype) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the convolution's input, and that of the step sizes."""
        return (
            jax.ShapeDtypeStruct((self.heads.width,), dtype),
            jax.ShapeDtypeStruct((self.heads.values,), jnp.float32),
        )

    @property
    def prefill_values(self) -> int:
        """Return the convolution's, the recurrence's, and a state before each chunk of 64 tokens, in float32."""
        states = 2 * self.heads.value_width * self.heads.state_dim // 64
        return 3 * self.heads.width + 3 * self.heads.value_width + states

    @property
    def exchanged(self) -> int:
        """See `Mixer`."""
        return self.heads.width + self.heads.value_width

    def why_not_split(self, devices: int) -> str | None:
        """See `Mixer`."""
        reason = why_no_split(self.heads, devices)
        return reason and f"of {self.title}, {reason}"

    def initial(self, name: str, key: jax.Array, spec: jax.ShapeDtypeStruct) -> jax.Array | None:
        """Return decays from slow to fast, step sizes of 0.001 to 0.1, and ones, where these are asked for."""
        part = name.rpartition(f".{self.module}.")[2]
        if part == "A_log":
            return jnp.log(jax.random.uniform(key, spec.shape, minval=1.0, maxval=16.0)).astype(spec.dtype)
        if part == "dt_bias":
            step = jnp.exp(jax.random.uniform(key, spec.shape, minval=jnp.log(0.001), maxval=jnp.log(0.1)))
            return jnp.log(jnp.expm1(step)).astype(spec.dtype)
        return jnp.ones(spec.shape, spec.dtype) if part in ("D", "norm.weight") else None

    def backends(self, capability: Capability | None, dtype) -> dict[str, BackendChoice]:
        """See `Mixer`."""
        return {self.title: STATE_SPACE.choose(capability, StateSpaceCall(dtype=dtype, heads=self.heads))}


class BiasedConvolution(nnx.Module):
    """Weights and biases of a causal convolution of each channel."""

    def __init__(self, shape: Mamba2Config, *, std: float, dtype, rngs: nnx.Rngs):
        channels = shape.heads.width
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (channels, 1, shape.conv_width), dtype) * std)
        self.bias = nnx.Param(jnp.zeros(channels, dtype)) if shape.conv_bias else None


class Mamba2(nnx.Module):
    """Convolution of x, B and C, the recurrence, and the output times its gate, normed."""

    value_names = (names.DELTA_INPUT, names.DELTA_GATES)
    """Names of `project`'s values, for checkpoint policies."""
    gated = True
    output_name = names.ATTENTION_OUT
    """Of the recurrence's output, likewise."""

    def __init__(self, config: DecoderConfig, kind: LayerKind, shape: Mamba2Config, *, dtype, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        D, heads, path = config.hidden_size, shape.heads, shape.module
        self.shape = shape
        sizes = D, shape.projected
        self.in_proj = layer_linear(config, kind, f"{path}.in_proj", *sizes, bias=shape.input_bias, **options)
        self.conv1d = BiasedConvolution(shape, std=config.initializer_range, **options)
        # In float32, whatever the other weights' dtype: decays multiply over all tokens of a document.
        self.dt_bias = nnx.Param(jnp.ones(heads.values, jnp.float32))
        self.A_log = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (heads.values,), minval=1.0, maxval=16.0)))
        self.D = nnx.Param(jnp.ones(heads.values, jnp.float32))
        self.norm = None if shape.norm == "none" else Norm(heads.value_width, config.rms_norm_eps, dtype=dtype)
        sizes = heads.value_width, D
        self.out_proj = layer_linear(config, kind, f"{path}.out_proj", *sizes, bias=shape.output_bias, **options)

    def __call__(self, normed: Normed, context: LayerContext) -> Branch:
        """Project, mix the tokens of each document, and project back."""
        values, gate = self.project(normed, context)
        return self.output(self.attend(values, context), gate, context)

    def project(self, normed: Normed, context: LayerContext) -> tuple[tuple[Array, ...], Array]:
        """Return (x, B and C in one array, inputs of step sizes), and the output's gate."""
        projected = adapted_projection(normed, self.inputs, context)
        if len(projected) == 1:
            projected = jnp.split(projected[0], self._bounds, axis=-1)
        gate, xbc, dt = projected
        named = zip((xbc, dt), self.value_names, strict=True)
        return tuple(checkpoint_name(y, name) for y, name in named), checkpoint_name(gate, names.OUTPUT_GATE)

    def attend(self, values: tuple[Array, ...], context: LayerContext) -> Float[Array, "B T N P"]:
        """Convolve, and follow the recurrence within the context."""
        xbc, dt = values
        heads, (_, of_x, of_b, of_c, of_dt) = self.shape.heads, self.shape.scales
        taps = self.conv1d.weight[...]
        if (of_x, of_b, of_c) != (1.0, 1.0, 1.0):  # a factor of a channel is one of its taps
            widths = jnp.array([heads.value_width, heads.group_width, heads.group_width])
            factors = jnp.repeat(jnp.array([of_x, of_b, of_c]), widths, total_repeat_length=heads.width)
            taps = taps.astype(jnp.float32) * factors[:, None, None]
        weights = Mamba2Weights(
            convolution=taps,
            bias=None if self.conv1d.bias is None else self.conv1d.bias[...],
            **{"A_log": self.A_log[...], "dt_bias": self.dt_bias[...], "skip": self.D[...]},
        )
        dt = dt if of_dt == 1.0 else dt.astype(jnp.float32) * of_dt
        return context.recur(mamba2(weights, heads, self.shape.limits, self.output_name), xbc, dt)

    def output(self, attended: Array, gate: Array, context: LayerContext) -> Branch:
        """Gate and norm the recurrence's output, and project it back."""
        y, gate = attended.reshape(gate.shape), gate if self.shape.scales[0] == 1.0 else gate * self.shape.scales[0]
        gated = self._gated(y, gate)
        return Branch(lambda x: self.out_proj.add_to(x, gated, context))

    def _gated(self, y: Float[Array, "B T I"], gate: Float[Array, "B T I"]) -> Float[Array, "B T I"]:
        if self.norm is None:
            return (y.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))).astype(y.dtype)
        weight, eps, groups = self.norm.weight[...], self.norm.eps, self.shape.heads.groups
        if self.shape.norm == "gate_first":
            return gated_group_norm(y, gate, weight, eps, groups=groups)
        of_groups = *y.shape[:2], groups, y.shape[-1] // groups
        ones = jnp.ones(of_groups[-1], weight.dtype)
        normed = gated_rms_norm(y.reshape(of_groups), gate.reshape(of_groups), ones, eps)
        return normed.reshape(y.shape) * weight.astype(y.dtype)

    @property
    def _bounds(self) -> tuple[int, int]:
        """Return the ends of gate and xbc in the input's projection."""
        heads = self.shape.heads
        return heads.value_width, heads.value_width + heads.width

    @property
    def inputs(self) -> list[Projection]:
        """Return the readers of the layer's norm: the projections to gate, xbc and step sizes, or one to all."""
        return self.in_proj.projection.split(*self._bounds)


@dataclass(frozen=True, kw_only=True)
class _Fields:
    mamba_n_heads: PositiveInt
    mamba_n_groups: PositiveInt
    mamba_d_state: PositiveInt
    mamba_d_conv: PositiveInt
    mamba_d_ssm: PositiveInt
    mamba_expand: PositiveFloat
    mamba_conv_bias: bool
    mamba_proj_bias: bool


def mamba_sizes(raw: Mapping[str, Any], *, width: int | None = None) -> dict[str, Any]:
    """Read the fields `mamba_*` of a config.json as those of `Mamba2Config`.

    Args:
        raw: config.json.
        width: of x; None for `mamba_expand` times the model's.

    Raises:
        ValueError: a value of another type, or sizes that do not fit.
    """
    check_fields(raw, _Fields)
    defaults: dict[str, Any] = {
        "n_heads": 128,
        "n_groups": 1,
        "d_state": 256,
        "d_conv": 4,
        "expand": 2,
        "d_head": "auto",
    }
    defaults |= {"conv_bias": True, "proj_bias": False}
    read = {key: raw[f"mamba_{key}"] for key in defaults if raw.get(f"mamba_{key}") is not None}
    n = defaults | read
    width = int(n["expand"] * raw["hidden_size"]) if width is None else width
    value_dim = width // n["n_heads"] if n["d_head"] == "auto" else n["d_head"]
    if not isinstance(value_dim, int) or value_dim * n["n_heads"] != width:
        raise ValueError(
            f"mamba_d_head={n['d_head']!r:.100} in config.json: {n['n_heads']} heads (mamba_n_heads) must have {width} "
            "values together"
        )
    return {
        "heads": StateHeads(n["n_heads"], value_dim, n["n_groups"], n["d_state"]),
        "conv_width": n["d_conv"],
        "conv_bias": n["conv_bias"],
        "input_bias": n["proj_bias"],
        "output_bias": n["proj_bias"],
    }


def read_limits(raw: Mapping[str, Any]) -> tuple[float, float]:
    """Read `time_step_limit` of a config.json, where infinity may be a string, or an object as of transformers 5.

    Raises:
        ValueError: other values than two numbers.
    """
    if (value := raw.get("time_step_limit")) is None:
        return 0.0, float("inf")
    items = value if isinstance(value, list | tuple) else ()
    try:
        least, most = (float(item["__float__"] if isinstance(item, Mapping) else item) for item in items)
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"time_step_limit in config.json: expected two numbers, got {value!r:.100}") from None
    return least, most
