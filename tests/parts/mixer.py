"""A recurrent layer: means of a text's values that forget earlier ones, each channel at a rate of its own."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxglue.models import Family, register
from jaxglue.models.config import ATTENTION, DecoderConfig, Mixer
from jaxglue.models.hf_fields import decoder_fields
from jaxglue.models.linear import layer_linear
from jaxglue.models.residual import Branch
from jaxglue.ops.recurrence import Recurrence, SlotStates


def means(rates):
    def joined(first, second):
        return second[0] * first[0], second[0] * first[1] + second[1]

    def whole(segments, x):
        keeps = jnp.where((jnp.asarray(segments.positions) > 0)[..., None], rates, 0.0)
        return jax.lax.associative_scan(joined, (keeps, (1 - rates) * x), axis=1)[1]

    def last(segments, x):
        ends = jnp.maximum(jnp.asarray(segments.cu_seqlens)[:, 1:] - 1, 0)
        return jnp.take_along_axis(whole(segments, x), ends[..., None], axis=1)

    def step(states, x):
        out = rates * states + (1 - rates) * x
        return out, out

    return Recurrence(whole, last, step)


@dataclass(frozen=True)
class MeansConfig(Mixer):
    width: int
    title, module, recurrent = "means", "means", True

    def make(self, config, parts, kind, *, dtype, rngs):
        return Means(config, kind, dtype=dtype, rngs=rngs)

    def weights(self, config, kind):
        return 2 * self.width**2

    def attended(self, heads, head_dim):
        return 1, self.width

    def make_cache(self, kind, sizes):
        return SlotStates.empty(jax.ShapeDtypeStruct((self.width,), jnp.float32), sizes.slots, sizes.device)

    def state_bytes(self, dtype):
        return 4 * self.width


class Means(nnx.Module):
    value_names, gated = ("value",), False

    def __init__(self, config, kind, *, dtype, rngs):
        linear = partial(layer_linear, config, kind, bias=False, dtype=dtype, rngs=rngs)
        self.in_proj = linear("means.in_proj", config.hidden_size, config.hidden_size)
        self.rates = nnx.Param(jnp.zeros(config.hidden_size, dtype))
        self.out_proj = linear("means.out_proj", config.hidden_size, config.hidden_size)

    def __call__(self, normed, context):
        values, gate = self.project(normed, context)
        return self.output(self.attend(values, context), gate, context)

    def project(self, normed, context):
        return (self.in_proj(normed, context),), None

    def attend(self, values, context):
        rates = jax.nn.sigmoid(self.rates[...].astype(jnp.float32))
        return context.recur(means(rates), values[0].astype(jnp.float32)).astype(values[0].dtype)

    def output(self, attended, gate, context):
        return Branch(lambda x: self.out_proj.add_to(x, attended.reshape(*x.shape[:2], -1), context))

    @property
    def inputs(self):
        return [self.in_proj.projection]


def read_config(raw):
    layers = raw["num_hidden_layers"]
    mixers = tuple(ATTENTION if layer % 2 else MeansConfig(raw["hidden_size"]) for layer in range(layers))
    return DecoderConfig(**decoder_fields(raw), layer_windows=(None,) * layers, mixers=mixers)


register(Family(model_type="means", config_from_hf=read_config, linears=("means.in_proj", "means.out_proj")))
