"""A format of frozen weights from outside the library: one file that registers itself."""

import json
from dataclasses import dataclass, field

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from selection import repeats_parts_of

from jaxglue.hf.adapter import load_adapter
from jaxglue.hf.checkpoint import read_config, save_tensors
from jaxglue.hf.export import quantize_folder
from jaxglue.hf.loading import load_model, random_model
from jaxglue.hf.merge import export_adapter
from jaxglue.models import abstract_model, config_from_hf
from jaxglue.models.parameters import flatten_names, quantized_names, set_parameters, split_model
from jaxglue.ops.choices import QUANTIZE
from jaxglue.ops.quant import dequantize
from jaxglue.ops.quant.formats import FORMATS, Quantized, Stored, WeightFormat, register
from jaxglue.ops.segments import pack_segments
from jaxglue.planner.memory import resident_bytes
from jaxglue.planner.workload import parameter_counts
from jaxglue.training.setup import resolve
from jaxglue.training.train import train

BLOCK = 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Toy4(Quantized):
    """Codes from −7 to 8 in blocks of 32 with a largest magnitude each, two codes in a byte."""

    codes: jax.Array
    absmax: jax.Array
    dtype: jnp.dtype = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], 2 * self.codes.shape[1]

    def dequantize(self, dtype):
        codes = jnp.stack([self.codes & 15, self.codes >> 4], axis=-1).astype(jnp.float32) - 7
        values = codes.reshape(*self.absmax.shape, BLOCK) * (self.absmax / 8)[..., None]
        return values.astype(dtype).reshape(self.shape)


class Toy4Format(WeightFormat):
    name, label, flag, description = "toy4", "toy4", "--quantize toy4", "in toy4"
    weight, offered, few_values = Toy4, True, True

    def check(self, widths):
        if odd := [name for name, width in widths.items() if width % BLOCK]:
            raise ValueError(f"--quantize toy4 needs multiples of {BLOCK} for {odd[0]}")

    def quantize(self, matrix):
        blocks = matrix.astype(jnp.float32).reshape(matrix.shape[0], -1, BLOCK)
        absmax = jnp.abs(blocks).max(axis=-1)
        codes = jnp.clip(jnp.round(blocks / absmax[..., None] * 8), -7, 8).astype(jnp.int8) + 7
        pairs = codes.astype(jnp.uint8).reshape(matrix.shape[0], -1, 2)
        return Toy4(codes=pairs[..., 0] | pairs[..., 1] << 4, absmax=absmax, dtype=matrix.dtype)

    def reads(self, config):
        return config.get("quant_method") == "toy4"

    def config(self, unquantized=("lm_head",)):
        return {"quant_method": "toy4"}

    def specs(self, name, shape):
        out, columns = shape
        return {
            name: jax.ShapeDtypeStruct((out, columns // 2), jnp.uint8),
            f"{name}_absmax": jax.ShapeDtypeStruct((out, columns // BLOCK), jnp.float32),
        }

    def tensors(self, name, weight):
        return {name: np.asarray(weight.codes), f"{name}_absmax": np.asarray(weight.absmax)}

    def find(self, files, name, shape):
        if f"{name}_absmax" not in files.tensors:
            return None
        shapes = {part: spec.shape for part, spec in self.specs(name, shape).items()}
        return Stored(shapes, lambda files: Toy4(**dict(zip(("codes", "absmax"), map(files.read, shapes), strict=True)),
                                                 dtype=jnp.dtype(jnp.bfloat16)))  # fmt: skip


@pytest.fixture
def toy4():
    with FORMATS.scope():
        yield register(Toy4Format())
    QUANTIZE.remove("toy4")


@pytest.fixture
def folder(model_folder):
    """Give the model folder weights, of sizes that blocks divide."""
    path = model_folder / "config.json"
    raw = json.loads(path.read_text()) | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    path.write_text(json.dumps(raw))
    model = random_model(config_from_hf(raw), dtype=jnp.float32)
    save_tensors(model_folder / "weights", flatten_names(split_model(model, nnx.Param)[1]))
    (model_folder / "weights" / "model.safetensors").rename(model_folder / "model.safetensors")
    return model_folder


def test_values_are_within_half_a_step_of_the_original(toy4):
    matrix = jax.random.normal(jax.random.key(0), (64, 128))
    weight = toy4.quantize(matrix)
    steps = jnp.repeat(weight.absmax / 8, BLOCK, axis=1)
    # −8/8 has no code.
    assert (
        jnp.abs(dequantize(weight, jnp.float32) - matrix) <= jnp.where(matrix / steps < -7.5, 1.001, 0.501) * steps
    ).all()


@repeats_parts_of("test_quantized_folder_trains_like_the_flag")
def test_its_flag_trains_and_its_folder_is_written_and_read(toy4, make_config, folder, tmp_path):
    quantize_folder(folder, tmp_path / "stored", "toy4")
    assert read_config(tmp_path / "stored")["quantization_config"] == {"quant_method": "toy4"}
    stored = load_model(tmp_path / "stored", dtype=jnp.float32)
    quantized = load_model(folder, dtype=jnp.float32, quantize="toy4")
    assert len(quantized_names(stored)) == 2 * 7
    weights = (model.layers[1].mlp.down_proj.weight.get_value() for model in (stored, quantized))
    first, second = weights
    chex.assert_trees_all_equal(first.codes, second.codes)
    options = {"steps": 8, "random_weights": False}
    flagged = train(make_config(**options, quantize="toy4", output=tmp_path / "flagged"))
    assert flagged.last_loss < flagged.first_loss - 0.2
    config = make_config(**options, model=str(tmp_path / "stored"), output=tmp_path / "from_stored")
    assert resolve(config).model.quantize == "toy4"
    assert train(config).last_loss == flagged.last_loss

    adapter = load_adapter(tmp_path / "flagged/adapter")
    assert adapter.storage == "toy4"
    check = export_adapter(adapter.folder, folder, tmp_path / "merged")
    assert check.storage == "toy4" and check.kl <= check.limit
    name = "model.layers.0.mlp.down_proj"
    base = dequantize(quantized.layers[0].mlp.down_proj.weight.get_value(), jnp.float32)
    low_rank = adapter.config.scale * adapter.tensors[f"{name}.lora_B"] @ adapter.tensors[f"{name}.lora_A"]
    merged = load_file(tmp_path / "merged/model.safetensors")[f"{name}.weight"]
    np.testing.assert_allclose(merged, base + low_rank, rtol=1e-2, atol=1e-2)


def test_the_planner_counts_its_bytes(toy4, make_config, folder):
    plain, stored = (resolve(make_config(quantize=how)).workload for how in ("none", "toy4"))
    assert parameter_counts(plain) == parameter_counts(stored)
    linears = 2 * 64 * (2 * 64 + 2 * 32 + 3 * 128)
    saved = resident_bytes(plain).total() - resident_bytes(stored).total()
    assert saved == linears * (4 - 0.5 - 4 / BLOCK)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ToyExperts(Quantized):
    """Experts [E, out, in] in int8, with a scale for each row."""

    codes: jax.Array
    absmax: jax.Array
    dtype = jnp.dtype(jnp.bfloat16)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def dequantize(self, dtype):
        return (self.codes.astype(jnp.float32) * (self.absmax / 127)[..., None]).astype(dtype)


class ToyExpertsFormat(WeightFormat):
    name, label, flag, description = "toy_experts", "toy_experts", "toy experts in the model folder", "in toy_experts"
    weight, parts = ToyExperts, {"codes": 1, "absmax": 0}

    def reads(self, config):
        return config.get("quant_method") == "toy_experts"

    def part_specs(self, shape):
        return {"codes": jax.ShapeDtypeStruct(shape, jnp.int8), "absmax": jax.ShapeDtypeStruct(shape[:2], jnp.float32)}

    def random_part(self, part, key, spec, std):
        if part == "codes":
            return jax.random.randint(key, spec.shape, -127, 128).astype(spec.dtype)
        return jnp.full(spec.shape, 3**0.5 * std)

    def join(self, parts):
        return ToyExperts(**parts)


@pytest.fixture
def sparse_folder(model_folder):
    """Give the model folder experts in the toy format."""
    path = model_folder / "config.json"
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    raw = json.loads(path.read_text()) | experts | {"model_type": "qwen3_moe"}
    path.write_text(json.dumps(raw | {"quantization_config": {"quant_method": "toy_experts"}}))
    with FORMATS.scope():
        register(ToyExpertsFormat())
        yield model_folder


@repeats_parts_of("test_quantized_folder_trains_like_the_flag")
def test_a_format_of_experts_is_read_and_trains_adapters(sparse_folder, make_config):
    raw = read_config(sparse_folder)
    config = config_from_hf(raw)
    drawn = flatten_names(split_model(random_model(config, dtype=jnp.float32), nnx.Param)[1])
    name = "model.layers.1.mlp.experts.down_proj"
    assert drawn[f"{name}_codes"].dtype == jnp.int8 and name not in drawn
    save_tensors(sparse_folder / "weights", drawn)
    (sparse_folder / "weights" / "model.safetensors").rename(sparse_folder / "model.safetensors")
    model = load_model(sparse_folder, dtype=jnp.float32)
    plain = dict(drawn)
    for stem in [name.removesuffix("_codes") for name in drawn if name.endswith("_codes")]:
        plain[stem] = ToyExperts(codes=plain.pop(f"{stem}_codes"), absmax=plain.pop(f"{stem}_absmax"))
        plain[stem] = plain[stem].dequantize(jnp.float32)
    expanded = set_parameters(abstract_model(config.expanded, dtype=jnp.float32), plain)
    tokens, segments = jnp.arange(16)[None], pack_segments([[10, 6]], seq_len=16)
    np.testing.assert_allclose(model(tokens, segments), expanded(tokens, segments), rtol=0, atol=1e-5)
    config = make_config(steps=6, random_weights=False)
    assert parameter_counts(resolve(config).workload)[0] > sum(array.size for array in plain.values())
    summary = train(config)
    assert summary.last_loss < summary.first_loss - 0.1


def test_its_errors_are_those_of_other_formats(toy4, make_config, folder):
    with pytest.raises(ValueError, match="--quantize toy4 is not for --method full"):
        make_config(quantize="toy4", method="full")
    with pytest.raises(ValueError, match=r"expected none \| nf4 \| int8 \| toy4, got 'toy5'"):
        make_config(quantize="toy5")
    raw = read_config(folder)
    with pytest.raises(ValueError, match="--quantize toy4 needs multiples of 32 for intermediate_size"):
        config_from_hf(raw | {"intermediate_size": 48}).quantized("toy4")
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "toy4"}}))
    message = r"says toy4 in its quantization_config, but model\.layers\..* is float32: take quantization_config out"
    with pytest.raises(ValueError, match=message):
        load_model(folder)
    for method in ("lora", "full"):
        with pytest.raises(ValueError, match=message):
            resolve(make_config(random_weights=False, method=method))
