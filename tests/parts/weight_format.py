"""A format of frozen weights: codes from −7 to 8 in blocks of 16 with a largest magnitude each, two codes in a byte."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from jaxglue.ops.quant.formats import Quantized, Stored, WeightFormat, register

BLOCK = 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Int4(Quantized):
    """A matrix in the format."""

    codes: jax.Array
    largest: jax.Array
    dtype: jnp.dtype = field(metadata={"static": True})

    @property
    def shape(self):
        return self.codes.shape[0], 2 * self.codes.shape[1]

    def dequantize(self, dtype):
        codes = jnp.stack([self.codes & 15, self.codes >> 4], axis=-1).astype(jnp.float32) - 7
        values = codes.reshape(*self.largest.shape, BLOCK) * (self.largest / 8)[..., None]
        return values.astype(dtype).reshape(self.shape)


class Int4Format(WeightFormat):
    """Makes, writes and reads such matrices."""

    name, label, flag, description = "int4", "int4", "--quantize int4", "in int4"
    weight, offered, few_values = Int4, True, True

    def quantize(self, matrix):
        blocks = matrix.astype(jnp.float32).reshape(matrix.shape[0], -1, BLOCK)
        largest = jnp.maximum(jnp.abs(blocks).max(axis=-1), 1e-12)
        codes = jnp.clip(jnp.round(blocks / largest[..., None] * 8), -7, 8).astype(jnp.int8) + 7
        pairs = codes.astype(jnp.uint8).reshape(matrix.shape[0], -1, 2)
        return Int4(codes=pairs[..., 0] | pairs[..., 1] << 4, largest=largest, dtype=matrix.dtype)

    def reads(self, config):
        return config.get("quant_method") == "int4"

    def config(self, unquantized=("lm_head",)):
        return {"quant_method": "int4"}

    def specs(self, name, shape):
        rows, columns = shape
        return {
            name: jax.ShapeDtypeStruct((rows, columns // 2), jnp.uint8),
            f"{name}_largest": jax.ShapeDtypeStruct((rows, columns // BLOCK), jnp.float32),
        }

    def tensors(self, name, weight):
        return {name: np.asarray(weight.codes), f"{name}_largest": np.asarray(weight.largest)}

    def find(self, files, name, shape):
        if f"{name}_largest" not in files.tensors:
            return None
        names = [*self.specs(name, shape)]
        shapes = {part: spec.shape for part, spec in self.specs(name, shape).items()}

        def read(files):
            codes, largest = map(files.read, names)
            return Int4(codes=codes, largest=largest, dtype=jnp.dtype(jnp.bfloat16))

        return Stored(shapes, read)


register(Int4Format())
