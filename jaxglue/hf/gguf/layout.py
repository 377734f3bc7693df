"""The tensors of a GGUF file, and the checkpoint's that each is made of."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from threading import Lock
from typing import Any, Protocol

import jax
import numpy as np

from jaxglue.hf.gguf import mamba
from jaxglue.hf.gguf.architectures import architecture_of
from jaxglue.hf.gguf.linear_attention import in_file, module_in_file, moves_columns, shape_in_file
from jaxglue.hf.gguf.package import load_gguf
from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import find_family
from jaxglue.models.latent import LatentConfig
from jaxglue.ops.quant.mxfp4 import BLOCK
from jaxglue.ops.rope import inverse_frequencies

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_NEXTN = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<part>nextn\..+)")
_EXPERT = re.compile(
    r"(?P<experts>.+\.(mlp|feed_forward|mixer)\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)\.weight"
)
_STACK = re.compile(
    r"(?P<experts>.+\.(mlp|feed_forward|block_sparse_moe|mixer)\.experts)"
    r"\.(?P<projection>gate_up_proj|up_proj|down_proj)(?P<part>|_bias|_blocks)"
)
_PERMUTED = re.compile(r".+\.self_attn\.(?P<projection>[qk])_proj\.(weight|bias)")
KEYS_AND_VALUES = ".self_attn.kv_b_proj.weight"
"""The projection from latents to keys and values, which llama.cpp's files hold apart."""
_HALVES = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}


_STILL = 1e30
"""Divisor of frequencies of dimensions that do not turn."""
_APART = re.compile(r".+\.layers\.\d+\.experts\.(gate_up_proj|down_proj)")
"""All experts beside a dense feed-forward, which llama.cpp's files hold as they are."""
_OWN_NAMES = {
    ".layer_scalar": ".layer_scalar.weight",
    ".router.scale": ".router.proj.scale",
    ".router.per_expert_scale": ".experts.down_proj.scale",
}
"""Names by which the gguf package knows tensors of Gemma 4."""


class Tensors(Protocol):
    """A model's tensors in the layout of its checkpoint."""

    @property
    def specs(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Return shape and dtype by Hugging Face's name."""

    def read(self, name: str) -> np.ndarray:
        """Read a tensor."""

    def packed_type(self, name: str) -> str | None:
        """Return the type in llama.cpp of a matrix that is on the grid of its blocks already; None of others."""

    def read_packed(self, name: str) -> np.ndarray:
        """Read such a matrix as rows of bytes of blocks."""


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """A tensor to write, in pieces that are read one after another."""

    name: str
    """Name in the file, such as `blk.0.attn_q.weight`."""
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    """Names of the model's tensors."""
    pieces: Callable[[], Iterator[Callable[[], np.ndarray]]]
    """Returns functions that read matrices (or vectors), which follow each other in the tensor."""
    packed: str | None = None
    """Type of which the pieces are finished blocks; None where they are values."""


def file_tensors(config: DecoderConfig, tensors: Tensors) -> list[GgufTensor]:
    """Return the tensors of a GGUF file, layer by layer.

    Args:
        config: of the model.
        tensors: of its checkpoint, with experts in any of the layouts that are published.

    Raises:
        ValueError: a tensor that llama.cpp's architecture does not have.
    """
    layout = _Layout(config, tensors)
    made = list(layout.all())
    made += _frequency_factors(config)
    return sorted(made, key=lambda tensor: _order(tensor.name))


def _order(name: str) -> tuple[int, int]:
    first = -2 if name == "token_embd.weight" else -1 if name.startswith("rope_") else 0
    return (first, int(name.split(".")[1]) if name.startswith("blk.") else 1 << 30)


def _frequency_factors(config: DecoderConfig) -> list[GgufTensor]:
    """Return the divisors of rotary frequencies, which Llama 3.1 and longrope stretch."""
    rope = next((rotary.config for rotary in config.rotaries if rotary.config.rope_type == "proportional"), config.rope)
    if rope.rope_type == "proportional":
        rotary = next(rotary for rotary in config.rotaries if rotary.config == rope)
        turning = inverse_frequencies(rope, rotary.head_dim)[0] > 0
        found = {"rope_freqs.weight": np.where(turning, 1.0, _STILL).astype(np.float32)}
    elif rope.rope_type == "longrope":
        lists = {"rope_factors_short.weight": rope.short_factor, "rope_factors_long.weight": rope.long_factor}
        found = {name: np.array(factors, np.float32) for name, factors in lists.items()}
    elif rope.rope_type == "llama3":
        plain = rope.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
        found = {"rope_freqs.weight": (plain / inverse_frequencies(rope, config.head_dim)[0]).astype(np.float32)}
    else:
        return []
    return [
        GgufTensor(name=name, shape=factors.shape, sources=(), pieces=partial(_one_piece, factors))
        for name, factors in found.items()
    ]


def _one_piece(array: np.ndarray) -> Iterator[Callable[[], np.ndarray]]:
    return iter([lambda: array])


class _Layout:
    """Maps a checkpoint's tensors to those of llama.cpp."""

    def __init__(self, config: DecoderConfig, tensors: Tensors):
        gguf = load_gguf()
        self._config, self._tensors, self._specs = config, tensors, tensors.specs
        architecture = gguf.MODEL_ARCH[architecture_of(config).name]
        self._names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
        self._offset = find_family(config.model_type).parts.norm.offset
        self._cached, self._reading = lru_cache(maxsize=2)(tensors.read), Lock()

    def all(self) -> Iterable[GgufTensor]:
        """Yield every tensor."""
        grouped: dict[str, list[str]] = {}
        vision = self._config.vision  # in a file of its own
        for name in self._specs:
            if (vision and vision.owns(name)) or (name == "lm_head.weight" and self._config.tie_word_embeddings):
                continue
            match = _EXPERT.fullmatch(name)
            grouped.setdefault(f"{match['experts']}.{match['projection']}.weight" if match else name, []).append(name)
        for name, parts in grouped.items():
            if len(parts) > 1 or parts != [name]:
                yield self._from_experts(name, parts)
            elif match := _STACK.fullmatch(name):
                yield from self._from_stack(name, match)
            elif _APART.fullmatch(name):
                experts = range(self._specs[name].shape[0])
                pieces = partial(self._each_of, name, experts)
                yield self._make(f"{name}.weight", self._specs[name].shape, (name,), pieces)
            elif name.endswith(KEYS_AND_VALUES):
                yield from self._from_latents(name)
            elif name.endswith(mamba.INPUT):
                yield from self._from_rows(name)
            elif not name.endswith("_scales"):
                yield self._plain(name)
        if self._config.tie_word_embeddings and architecture_of(self._config).own_output:
            yield replace(self._plain("model.embed_tokens.weight"), name="output.weight")

    def _name(self, name: str) -> str:
        """Return llama.cpp's name."""
        if match := _NEXTN.fullmatch(name):
            return f"blk.{match['layer']}.{match['part']}"
        module = module_in_file(name).replace("e_score_correction_bias", "e_score_correction.bias")
        for ours, theirs in _OWN_NAMES.items():
            module = module.removesuffix(ours) + theirs if module.endswith(ours) else module
        module = architecture_of(self._config).renamed(module)
        found = self._names.get_name(module, try_suffixes=(".weight", ".bias", ".scale"))
        if found is None:
            raise ValueError(f"{name}: llama.cpp has no such tensor in its {self._config.model_type} models")
        return f"{found}.weight" if name.endswith(".sinks") else found

    def _plain(self, name: str) -> GgufTensor:
        spec, match = self._specs[name], _PERMUTED.fullmatch(name)
        order, flat = None, name.endswith(architecture_of(self._config).flat)
        shape = tuple(size for size in spec.shape if size > 1) if flat else shape_in_file(name, spec.shape)
        shape = mamba.shape_in_file(self._config, name, shape)
        if match and architecture_of(self._config).permuted:
            heads = self._config.num_attention_heads if match["projection"] == "q" else self._config.num_key_value_heads
            order = interleaved_rows(spec.shape[0], heads)

        if packed := self._tensors.packed_type(name):
            if mamba.row_factors(self._config, name) is not None:
                raise ValueError(f"{name}: llama.cpp's files hold it times a factor, and it is rounded without")
            if moves_columns(self._config, name):
                raise ValueError(
                    f"{name}: its columns have another order in llama.cpp's files than when it was rounded"
                )

            def read_packed() -> np.ndarray:
                rows = self._tensors.read_packed(name)
                changed = in_file(self._config, name, rows)
                return changed if changed is not None else rows if order is None else rows[order]

            return self._make(name, shape, (name,), lambda: iter([read_packed]), packed=packed)

        def read() -> np.ndarray:
            array = self._tensors.read(name)
            if (changed := in_file(self._config, name, array)) is not None:
                return changed
            if (changed := mamba.in_file(self._config, name, array)) is not None:
                return changed if order is None else changed[order]
            if self._offset and name.endswith("norm.weight"):
                return array.astype(np.float32) + np.float32(self._offset)
            array = array.reshape(shape) if flat else array
            return array if order is None else array[order]

        return self._make(name, shape, (name,), lambda: iter([read]))

    def _from_experts(self, name: str, parts: list[str]) -> GgufTensor:
        """Return the stack of experts that the checkpoint holds one by one."""
        parts = sorted(parts, key=lambda part: int(_expert(part)))
        shape, packed = (len(parts), *self._specs[parts[0]].shape), self._tensors.packed_type(parts[0])
        read = self._tensors.read_packed if packed else self._tensors.read
        return self._make(name, shape, tuple(parts), lambda: (partial(read, part) for part in parts), packed=packed)

    def _from_stack(self, name: str, match: re.Match[str]) -> Iterator[GgufTensor]:
        """Yield the halves of a stack of all experts: interleaved in GPT-OSS, one after the other in Qwen3-MoE."""
        halves, interleaved = _HALVES[match["projection"]], self._config.model_type == "gpt_oss"
        suffix = "bias" if match["part"] == "_bias" else "weight"
        transposed = interleaved and not match["part"]
        shape = self._specs[name].shape
        shape = (shape[0], shape[2], shape[1]) if transposed else shape
        rows = shape[1] // len(halves)
        for index, half in enumerate(halves):
            taken = slice(index, None, len(halves)) if interleaved else slice(index * rows, (index + 1) * rows)

            def pieces(taken: slice = taken) -> Iterator[Callable[[], np.ndarray]]:
                if match["part"] == "_bias":
                    return iter([lambda: self._tensors.read(name)[:, taken]])
                if match["part"] == "_blocks":
                    return (partial(self._mxfp4, name, expert, taken) for expert in range(shape[0]))
                return (partial(self._expert, name, expert, taken, transposed) for expert in range(shape[0]))

            half_shape: tuple[int, ...] = (shape[0], rows, *shape[2:])
            if match["part"] == "_blocks":
                half_shape = (shape[0], rows, shape[2] * BLOCK)
            yield self._make(
                f"{match['experts']}.{half}.{suffix}",
                half_shape,
                (name,),
                pieces,
                packed="mxfp4" if match["part"] == "_blocks" else None,
            )

    def _from_rows(self, name: str) -> Iterator[GgufTensor]:
        """Yield the halves of a projection of gate and up."""
        (rows, *rest), packed = self._specs[name].shape, self._tensors.packed_type(name)
        for half, part in (("gate_proj", slice(rows // 2)), ("up_proj", slice(rows // 2, None))):
            pieces = partial(self._part_of, name, part, packed is not None)
            yield self._make(name.replace("input_linear", half), (rows // 2, *rest), (name,), pieces, packed=packed)

    def _part_of(self, name: str, rows: slice, packed: bool) -> Iterator[Callable[[], np.ndarray]]:
        return iter([lambda: (self._tensors.read_packed(name) if packed else self._whole(name))[rows]])

    def _from_latents(self, name: str) -> Iterator[GgufTensor]:
        """Yield the matrices from latents to each head's keys, transposed, and to its values."""
        latent, heads = self._config.mixer_of(LatentConfig), self._config.num_attention_heads
        _, rank = self._specs[name].shape
        assert latent is not None
        sizes = {"k_b_proj": (rank, latent.nope_dim), "v_b_proj": (latent.value_dim, rank)}
        rows = {"k_b_proj": slice(latent.nope_dim), "v_b_proj": slice(latent.nope_dim, None)}

        def matrix(part: str, head: int) -> np.ndarray:
            own = self._whole(name).reshape(heads, -1, rank)[head, rows[part]]
            return np.ascontiguousarray(own.T) if part == "k_b_proj" else own

        for part, size in sizes.items():
            pieces = partial(self._of_heads, partial(matrix, part))
            yield self._make(name.replace("kv_b_proj", part), (heads, *size), (name,), pieces)

    def _each_of(self, name: str, experts: range) -> Iterator[Callable[[], np.ndarray]]:
        return (partial(self._expert, name, expert, slice(None), False) for expert in experts)

    def _of_heads(self, matrix: Callable[[int], np.ndarray]) -> Iterator[Callable[[], np.ndarray]]:
        return (partial(matrix, head) for head in range(self._config.num_attention_heads))

    def _whole(self, name: str) -> np.ndarray:
        """Read a stack of experts, which serves many pieces, once."""
        with self._reading:
            return self._cached(name)

    def _expert(self, name: str, expert: int, rows: slice, transposed: bool) -> np.ndarray:
        matrix = self._whole(name)[expert]
        return (matrix.T if transposed else matrix)[rows]

    def _mxfp4(self, name: str, expert: int, rows: slice) -> np.ndarray:
        blocks = self._whole(name)[expert][rows]
        scales = self._whole(name.replace("_blocks", "_scales"))[expert][rows]
        return join_mxfp4(blocks, scales)

    def _make(
        self, name: str, shape: tuple[int, ...], sources: tuple[str, ...], pieces: Any, **more: Any
    ) -> GgufTensor:
        return GgufTensor(name=self._name(name), shape=tuple(shape), sources=sources, pieces=pieces, **more)


def _expert(name: str) -> str:
    match = _EXPERT.fullmatch(name)
    assert match
    return match["expert"]


def interleaved_rows(rows: int, heads: int) -> np.ndarray:
    """Return the order of a projection's rows in llama.cpp, where rotary pairs are neighbors, not halves apart."""
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).ravel()


def join_mxfp4(blocks: Any, scales: Any) -> Any:
    """Return the bytes of rows of MXFP4 blocks as llama.cpp lays them out: the scale, then the two halves as nibbles.

    Args:
        blocks: [rows, blocks, 16] uint8, neighboring values in a byte, the first in the low half.
        scales: [rows, blocks] uint8; both of NumPy or of JAX.
    """
    np = blocks.__array_namespace__()
    values = np.stack([blocks & 0xF, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], BLOCK)
    halves = values[..., : BLOCK // 2] | values[..., BLOCK // 2 :] << 4
    return np.concatenate([scales[..., None], halves], axis=-1).reshape(len(blocks), -1)
