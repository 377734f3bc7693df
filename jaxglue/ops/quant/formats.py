"""Formats of frozen weights: what one can do, and the registry through which everything else knows them."""

import contextlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxglue.ops.choices import QUANTIZE
from jaxglue.parts import Registry

_LONGEST = 200
"""Characters of a pattern of modules' names."""
Shape = tuple[int, ...]
Specs = dict[str, jax.ShapeDtypeStruct]
"""Shapes and dtypes of stored tensors, by name."""


class Quantized:
    """Base of quantized arrays: pytrees, most of matrices [out, in], with `shape` and `dtype` of the original."""

    shape: Any
    dtype: Any

    without_kernel: ClassVar[str | None] = "this format has no kernel"
    """Why XLA dequantizes it; None where `DEQUANTIZE` has kernels."""

    def check(self, name: str) -> "Quantized":
        """Return itself; raise ValueError with the name if arrays do not fit together."""
        return self

    def dequantize(self, dtype) -> Array:
        """Compute the values in `dtype`, by XLA."""
        raise NotImplementedError

    def of_dtype(self, dtype) -> "Quantized":
        """Return the same as quantized from an original of this dtype."""
        return replace(self, dtype=dtype)  # type: ignore[type-var]


class TensorHeader(Protocol):
    """Header entry of a stored tensor."""

    @property
    def file(self) -> Any:
        """Return the path of its file."""

    @property
    def shape(self) -> Shape:
        """Return its shape."""

    @property
    def dtype(self) -> np.dtype:
        """Return its dtype."""


class TensorReader(Protocol):
    """Tensors of a model folder."""

    @property
    def tensors(self) -> Mapping[str, TensorHeader]:
        """Return their headers by name."""

    def read(self, name: str) -> np.ndarray:
        """Read a tensor."""


class Stored(NamedTuple):
    """A quantized matrix in files."""

    shapes: dict[str, Shape]
    """Shapes of its tensors, by name."""
    read: Callable[[Any], Quantized]
    """Reads it from a `TensorReader`; arrays are NumPy's."""


class WeightFormat:
    """A storage of the decoder layers' linear layers, under its name in `DecoderConfig.quantize`, or of experts.

    A new one subclasses this beside its `Quantized` and registers itself; what it leaves out, it cannot do.
    """

    name: str
    label: str
    """Name in messages."""
    flag: str
    """Flag that asks for it, in messages."""
    description: str
    """Follows "linear layers of the decoder layers" in the plan."""
    weight: type | None = None
    """Type of its matrices; None where they are arrays."""
    offered: bool = False
    """`--quantize` offers it, and adapters record it."""
    recorded: bool = False
    """Adapters record it although `--quantize` does not offer it."""
    trains: bool = False
    """Weights in it may train."""
    fp8: bool = False
    """Products are in FP8."""
    few_values: bool = False
    """Matrices have few distinct values, whose products draw less power."""
    row_wise: bool = False
    """Every array has a row for each row of the matrix, so that stacks of matrices are stacks of these."""
    holds_experts: bool = False
    """Folders may hold experts in it one by one, which are expanded."""

    parts: Mapping[str, int] = {}
    """Arrays of experts' matrices in it, each a parameter, by the end of its name, and the values that an item holds;
    empty for formats of linear layers."""

    def check(self, widths: Mapping[str, int]) -> None:
        """Raise ValueError for row lengths that it cannot hold, given by names for the message."""

    def quantize(self, matrix: Float[Array, "out in"]) -> Any:
        """Convert a matrix."""
        raise NotImplementedError

    def hold(self, matrix: Any, *, sensitive: bool = False) -> Any:
        """Return a matrix as a model in this format holds it: quantized, unless its folder has it so.

        A mixture of formats gives the sensitive ones more bits.
        """
        return matrix if isinstance(matrix, Quantized) else self.quantize(matrix)

    def accepts(self, weight: Quantized) -> bool:
        """Return whether a model in this format can hold a weight that its folder has quantized."""
        return type(weight) is self.weight

    def reads(self, config: Mapping[str, Any]) -> bool:
        """Return whether `quantization_config` in config.json names this format.

        Raises:
            ValueError: it names a variant that cannot be read.
        """
        return False

    def skips(self, config: Mapping[str, Any]) -> list[str]:
        """Return the modules, or patterns of them after `re:`, that a `quantization_config` leaves unquantized."""
        return []

    def find(self, files: TensorReader, name: str, shape: Shape) -> Stored | None:
        """Return the named matrix of this shape in a folder's tensors; None if it is not in this format.

        Raises:
            ValueError: it is, with other tensors than belong to it.
        """
        return None

    def ignores(self, name: str) -> bool:
        """Return whether a folder in this format may have the named tensor, which is not needed."""
        return False

    def specs(self, name: str, shape: Shape) -> Specs:
        """Return the tensors to store for a matrix [out, in] named `….weight`."""
        raise NotImplementedError

    def tensors(self, name: str, weight: Any) -> dict[str, np.ndarray]:
        """Return the tensors of a quantized matrix, as `specs` describes them."""
        raise NotImplementedError

    def config(self, unquantized: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
        """Return the `quantization_config` of a folder, with these modules beside decoder layers left as they are."""
        raise NotImplementedError

    def beside(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return further JSON files of a folder with this `quantization_config`, by name."""
        return {}

    def divides(self, matrices: Shape, devices: int) -> bool:
        """Return whether each of the devices may hold an equal share of the experts' matrices [E, out, in]."""
        return matrices[0] % devices == 0

    def part_specs(self, shape: Shape) -> Specs:
        """Return the arrays of experts' matrices [E, out, in] by part.

        Raises:
            ValueError: sizes that it cannot hold.
        """
        raise NotImplementedError

    def random_part(self, part: str, key: Array, spec: jax.ShapeDtypeStruct, std: float) -> Array:
        """Return one of `part_specs` such that all together have normal values' deviation."""
        raise NotImplementedError

    def join(self, parts: Mapping[str, Any]) -> Quantized:
        """Return experts' matrices [E, out, in] from their arrays."""
        raise NotImplementedError


FORMATS = Registry[WeightFormat]("weight format")
"""Every format by name."""


def register(made: WeightFormat) -> WeightFormat:
    """Add a format to the registry, and to the choices of `--quantize` if it is offered there."""
    FORMATS.add(made.name, made)
    if made.offered and made.name not in QUANTIZE:
        QUANTIZE.append(made.name)
    return made


class _Plain(WeightFormat):
    """Arrays in the model's dtype."""

    name, label, flag, description, trains = "none", "none", "--quantize none", "", True

    def quantize(self, matrix: Float[Array, "out in"]) -> Any:
        """Return the matrix."""
        return matrix


register(_Plain())


def find_format(name: str) -> WeightFormat:
    """Return the named format; raise ValueError for another name."""
    if name not in FORMATS:
        linear = (made for made in FORMATS.values() if made.name == made.label and not made.parts)
        others = [made.name for made in linear if made.flag.startswith("--") and made.name not in QUANTIZE]
        raise ValueError(f"quantize must be one of {', '.join(QUANTIZE + others)}, got {name!r}")
    return FORMATS[name]


def format_of(weight: Quantized) -> WeightFormat:
    """Return the format of a quantized matrix."""
    return next(made for made in FORMATS.values() if made.weight is type(weight))


def stored_format(config: Mapping[str, Any] | None) -> str:
    """Return the name of the format in a `quantization_config`; formats registered last are asked first.

    Raises:
        ValueError: of another tool, or a variant that cannot be read.
    """
    if not config:
        return "none"
    for made in reversed(list(FORMATS.values())):
        if made.reads(config):
            return made.name
    method = config.get("quant_method")
    remedy = "use the original model folder with --quantize nf4 or int8"
    raise ValueError(f"quant_method {method!r:.100} in config.json is not supported: {remedy}")


def skipped_modules(config: Mapping[str, Any] | None, modules: Collection[str]) -> tuple[str, ...]:
    """Return those of the named modules that a `quantization_config` leaves unquantized.

    An entry names a module, or one around it, by consecutive parts of its dotted name; after `re:` it is a pattern from
    the name's beginning.

    Raises:
        ValueError: as `stored_format`, or a pattern that cannot be read.
    """
    entries = FORMATS[stored_format(config)].skips(config or {})
    patterns = [_pattern(entry.removeprefix("re:")) for entry in entries if entry.startswith("re:")]
    parts = [f".{entry}." for entry in entries if entry and not entry.startswith("re:")]
    return tuple(
        module
        for module in modules
        if any(part in f".{module}." for part in parts) or any(pattern.match(module) for pattern in patterns)
    )


def _pattern(text: str) -> re.Pattern[str]:
    """Compile a pattern of a stranger's; repeated groups are refused, since they may take forever."""
    if len(text) <= _LONGEST and not re.search(r"\)[*+{]", text):
        with contextlib.suppress(re.error):
            return re.compile(text)
    raise ValueError(f"quantization_config in config.json: the pattern {text!r:.100} cannot be read")


def find_stored(files: TensorReader, name: str, shape: Shape) -> Stored | None:
    """Return the named matrix in a folder's tensors if one of the formats has it, else None; raises like `find`."""
    return next((stored for made in FORMATS.values() if (stored := made.find(files, name, shape))), None)


def experts_format(names: Collection[str], parameter: str) -> WeightFormat | None:
    """Return the format that has all arrays of the named parameter of experts among these names, None if none has."""
    formats = (made for made in FORMATS.values() if made.parts)
    return next((made for made in formats if all(f"{parameter}_{part}" in names for part in made.parts)), None)


def is_unneeded(name: str) -> bool:
    """Return whether a tensor of a quantized folder is not needed."""
    return any(made.ignores(name) for made in FORMATS.values())


def is_quantized(leaf: object) -> bool:
    """Return whether this is a quantized matrix, for `jax.tree.map(…, is_leaf=is_quantized)`."""
    return isinstance(leaf, Quantized)


def quantize_matrix(matrix: Float[Array, "out in"], how: str) -> Any:
    """Convert a matrix to the named format."""
    return FORMATS[how].quantize(matrix)


def names_in(config: Mapping[str, Any], key: str) -> list[str]:
    """Return an entry of names in `quantization_config`; raise ValueError for anything else."""
    names = config.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key} in config.json: expected a list of names, got {names!r:.100}")
    return names
