"""Proof of an export: files, read back layer by layer, must predict as the model that they were written from."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxglue.files.atomic import atomic_file
from jaxglue.files.json_file import write_json
from jaxglue.files.regular_file import open_regular
from jaxglue.hf.adapter import Adapter, vocabulary_matrix
from jaxglue.hf.checkpoint import load_tensors, read_config
from jaxglue.hf.experts import expand, expert_parts
from jaxglue.models import build_model, config_from_hf
from jaxglue.models.config import DecoderConfig
from jaxglue.models.decoder import packed_context
from jaxglue.models.linear import Linear
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import PATHS
from jaxglue.models.parameters import ModelGraphDefs, ParamKey, Params, get_part, merge_module, part_name
from jaxglue.models.vocabulary import extended_matrix, with_low_rank
from jaxglue.ops.projection import project
from jaxglue.ops.quant import dequantize
from jaxglue.ops.quant.formats import FORMATS, WeightFormat, is_quantized
from jaxglue.ops.quant.served import is_sensitive
from jaxglue.ops.quant.stack import hold_matrices
from jaxglue.ops.segments import PackedSegments, pack_segments

CHECK_FILE = "export_check.json"
ROWS_FILE = "export_rows.npz"
"""Rows on which a run's exports are compared, beside its adapter, not in it."""
TRAINED_FILE = "trained_rows.npz"
"""Rows on which a run's exports measure what matters to its training data, beside its adapter."""
_LEAST_GAIN = 0.01
"""Difference of losses below which a share of it says nothing, nats per token."""
_LARGEST = 0.05
"""KL that never passes, nats per token."""
_TF32 = 2.0**-10
"""Precision of float32 matmuls on GPUs."""
_RELATIVE = 4.0
"""Errors of logits that rounding explains, in units of the dtype's precision and of the logits' deviation.

They grow with the depth: all layers' weights rounded to bfloat16 give 0.8 for 2 layers of large random weights, 1.6 for
8 and 3.3 for 32.
"""
_ROWS, _TOKENS = 2, 64
_LOSS_ROWS, _LOSS_TOKENS = 4, 512
"""Most rows, and tokens of a row, on which losses are compared."""
_TRAINED_ROWS, _TRAINED_TOKENS = 64, 512
"""Most rows, and tokens of a row, of training data that a run keeps."""

Rounding = Callable[[str, Array], Array]
"""Maps a linear layer's name and merge to the values that a file holds."""
Part = tuple[nnx.GraphDef, tuple[Params, ...]]
Parts = Callable[[ParamKey], Part]
"""Returns a module of a model by its key, with its parameters: only one layer's need to be in memory."""


@dataclass(frozen=True, kw_only=True)
class ExportRows:
    """Packed rows to predict."""

    tokens: Int[np.ndarray, "B T"]
    segments: PackedSegments
    source: str
    """held-out, trained or random."""
    targets: Int[np.ndarray, "B T"] | None = None
    """The token after each; None where no loss is measured."""
    loss_weights: Float[np.ndarray, "B T"] | None = None
    """Weight of each target in the loss."""

    @property
    def few(self) -> "ExportRows":
        """Return the first rows' beginnings, which are enough to tell whether files predict alike."""
        return first_rows(self.tokens, self.segments, self.source)

    def batches(self, rows: int, most: int) -> "list[ExportRows]":
        """Return the first rows, at most so many, in batches of a few."""
        ids, source = np.asarray(self.segments.segment_ids), self.source
        starts = range(0, min(len(ids), most), rows)
        return [_packed(self.tokens[i : i + rows], ids[i : i + rows], source) for i in starts]

    def save(self, path: Path) -> None:
        """Write the rows to a file."""
        arrays: dict[str, Any] = {
            "tokens": self.tokens,
            "segment_ids": self.segments.segment_ids,
            "source": self.source,
        }
        losses = {"targets": self.targets, "loss_weights": self.loss_weights}
        arrays |= {name: array for name, array in losses.items() if array is not None}
        with atomic_file(path) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Losses on rows of a run, nats per token: what an adapter gains, and what of it files in few bits keep."""

    base: float
    """Without the adapter, in 16 bits."""
    adapted: float
    """With the adapter beside its base, in 16 bits."""
    files: float
    kl: float
    """Mean of KL(adapted ‖ files) per token."""
    tokens: int
    """That have a loss."""

    @property
    def share(self) -> float | None:
        """Return the part of the adapter's gain that the files keep; None where the adapter gains next to nothing."""
        gained = self.base - self.adapted
        return (self.base - self.files) / gained if gained >= _LEAST_GAIN else None

    def __str__(self) -> str:
        losses = f"loss {self.base:.4f} without it, {self.adapted:.4f} with it in 16 bits, {self.files:.4f} as written"
        where = f"on {self.tokens} tokens; KL {self.kl:.1e}"
        if self.share is None:
            return f"the adapter gains too little to compare: {losses} {where}"
        return f"{self.share:.0%} of the adapter's gain is kept: {losses} {where}"


@dataclass(frozen=True, kw_only=True)
class ExportCheck:
    """Comparison of exported files with their origin on a few rows."""

    kl: float
    """Mean of KL(origin ‖ files) per token, nats; of scores, as means of normal distributions of variance 1."""
    max_logit_difference: float
    limit: float
    """Largest KL that passes."""
    tokens: int
    rows: str
    storage: str = "none"
    """Format in which the origin's linear layers are held: files of a merge hold these values, expanded."""

    gain: Gain | None = None
    """What files in few bits keep of the adapter's gain; None where it was not measured."""

    def __str__(self) -> str:
        text = (
            f"read back: KL {self.kl:.1e} (limit {self.limit:.1e}), largest logit difference "
            f"{self.max_logit_difference:.1e} on {self.tokens} {self.rows} tokens"
        )
        return text if self.gain is None else f"{text}; {self.gain}"

    def require(self, what: str | Path) -> None:
        """Raise ValueError above the limit, or where logits are not finite."""
        if not self.kl <= self.limit:
            raise ValueError(f"{what} does not predict as its origin: {self}; the export failed")

    def save(self, folder: Path) -> None:
        """Write the comparison into the exported folder."""
        write_json(folder / CHECK_FILE, asdict(self))


def random_rows(vocab_size: int) -> ExportRows:
    """Return rows of random tokens, for models without data at hand."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, (_ROWS, _TOKENS), dtype=np.int32)
    return ExportRows(tokens=tokens, segments=pack_segments([[_TOKENS]] * _ROWS, seq_len=_TOKENS), source="random")


def first_rows(
    tokens: Int[np.ndarray, "B T"],
    segments: PackedSegments,
    source: str,
    targets: Int[np.ndarray, "B T"] | None = None,
    loss_weights: Float[np.ndarray, "B T"] | None = None,
) -> ExportRows:
    """Return the start of a batch's first filled rows: documents' beginnings, as causal models see them.

    With targets, the rows are more and longer, so that a loss can be measured on them.
    """
    rows, length = (_ROWS, _TOKENS) if targets is None else (_LOSS_ROWS, _LOSS_TOKENS)
    ids = np.asarray(segments.segment_ids)[:, :length]
    filled = np.flatnonzero(ids.any(axis=1))[:rows]
    losses = [None if array is None else np.asarray(array)[filled, :length] for array in (targets, loss_weights)]
    return _packed(np.asarray(tokens)[filled, :length], ids[filled], source, *losses)


def trained_rows(
    tokens: Int[np.ndarray, " N"], offsets: Int[np.ndarray, "documents+1"], pad: int = 0
) -> ExportRows | None:
    """Return beginnings of documents, evenly taken from all of them, in rows; None without any.

    Args:
        tokens: of all documents.
        offsets: of document d: its tokens are `tokens[offsets[d] : offsets[d + 1]]`.
        pad: token of the rows' ends.
    """
    count, room = len(offsets) - 1, _TRAINED_ROWS * _TRAINED_TOKENS
    chosen = np.unique(np.linspace(0, max(count - 1, 0), min(count, room // 16), dtype=np.int64))
    packed: list[list[np.ndarray]] = [[]]
    for document in np.random.default_rng(0).permutation(chosen):
        first, end = offsets[document], offsets[document + 1]
        piece = np.asarray(tokens[np.arange(first, min(end, first + _TRAINED_TOKENS))])
        if sum(map(len, packed[-1])) + len(piece) > _TRAINED_TOKENS:
            if len(packed) == _TRAINED_ROWS:
                break
            packed.append([])
        packed[-1] += [piece] if len(piece) else []
    rows = np.full((len(packed), _TRAINED_TOKENS), pad, np.int32)
    for row, pieces in zip(rows, packed, strict=True):
        joined = np.concatenate([*pieces, row[:0]])
        row[: len(joined)] = joined
    segments = pack_segments([list(map(len, pieces)) for pieces in packed], seq_len=_TRAINED_TOKENS)
    return ExportRows(tokens=rows, segments=segments, source="trained") if packed[0] else None


def load_rows(path: Path) -> ExportRows | None:
    """Return the rows that `ExportRows.save` wrote; None without the file.

    Raises:
        ValueError: a damaged file.
    """
    if not path.is_file():
        return None
    try:
        with open_regular(path) as source, np.load(source, allow_pickle=False) as stored:
            losses = [stored.get(name) for name in ("targets", "loss_weights")]
            return _packed(stored["tokens"], stored["segment_ids"], str(stored["source"]), *losses)
    except Exception as error:  # zipfile raises errors of many types
        raise ValueError(f"{path} is damaged ({error}): delete it, and random tokens are compared") from None


def _packed(
    tokens: np.ndarray,
    ids: np.ndarray,
    source: str,
    targets: np.ndarray | None = None,
    loss_weights: np.ndarray | None = None,
) -> ExportRows:
    is_matrix = ids.dtype.kind == tokens.dtype.kind == "i" and ids.ndim == 2 and ids.shape == tokens.shape
    if not is_matrix or not 0 <= ids.min(initial=0) <= ids.max(initial=0) <= tokens.size:
        raise ValueError("segments out of bounds")
    if any(array is not None and array.shape != tokens.shape for array in (targets, loss_weights)):
        raise ValueError("losses of other tokens")
    lengths = [[int((row == i).sum()) for i in range(1, row.max() + 1)] for row in ids]
    segments = pack_segments(lengths, seq_len=ids.shape[1])
    return ExportRows(tokens=tokens, segments=segments, source=source, targets=targets, loss_weights=loss_weights)


def live_parts(graphdefs: ModelGraphDefs, *trees: Params) -> Parts:
    """Return the parts of a model in memory."""

    def part(key: ParamKey) -> Part:
        graphdef = graphdefs.layers[key] if isinstance(key, int) else getattr(graphdefs, key)
        return graphdef, tuple(get_part(tree, key) for tree in trees)

    return part


def folder_parts(folder: str | Path, config: DecoderConfig, *, dtype, adapter: Adapter | None = None) -> Parts:
    """Return the parts of a model folder and an adapter, read from the files at each call.

    Args:
        folder: of the base or the merged model.
        config: its shape; with `quantize`, linear layers are quantized as they are read.
        dtype: of weights.
        adapter: to add, fitted to the base by `check_adapter`.
    """

    def make() -> Any:
        model = build_model(config, dtype=dtype, rngs=nnx.Rngs(0))
        if adapter is not None:
            add_lora(model, adapter.linears.config, rngs=nnx.Rngs(0))
        return model

    model = nnx.eval_shape(make)

    def part(key: ParamKey) -> Part:
        module = model.layers[key] if isinstance(key, int) else getattr(model, key)
        graphdef, state = nnx.split(module)
        named = {part_name(key, ".".join(map(str, path))): (path, v) for path, v in nnx.to_flat_state(state)}
        stored = {name: v for name, (_, v) in named.items() if not isinstance(v, nnx.LoRAParam)}
        values = _load_values(folder, config, stored)
        if adapter is not None:
            values |= {name: jnp.asarray(adapter.tensors[name]) for name in named.keys() - stored.keys()}
        if adapter is not None and key in PATHS:
            values |= _trained_vocabulary(adapter, PATHS[key], values)
        flat = [(path, v.replace(values[name])) for name, (path, v) in named.items()]
        return graphdef, (nnx.to_pure_dict(nnx.from_flat_state(flat)),)

    return part


def _load_values(folder: str | Path, config: DecoderConfig, stored: Mapping[str, nnx.Variable]) -> dict[str, Any]:
    quantized = {name for name, variable in stored.items() if is_quantized(variable.get_value())}

    def put(name: str, array: Any) -> Any:
        if name not in quantized:
            return jax.device_put(expand(array, array.dtype))
        sensitive = is_sensitive(name, config.num_hidden_layers)
        return jax.device_put(hold_matrices(FORMATS[config.quantize], array, sensitive=sensitive))

    specs = {name: jax.ShapeDtypeStruct(variable.shape, variable.dtype) for name, variable in stored.items()}
    return load_tensors(folder, specs, put, complete=False)


def _trained_vocabulary(adapter: Adapter, path: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an adapter's matrix of the embedding or output projection by its name, if it has one."""
    base = values[f"{path}.weight"]
    matrix = vocabulary_matrix(adapter, path, base)
    return {} if matrix is None else {f"{path}.weight": jnp.asarray(matrix, base.dtype)}


def predict(config: DecoderConfig, parts: Parts, rows: ExportRows, dtype) -> Float[Array, "B T V"]:
    """Compute float32 logits, one layer's parameters at a time, with activations in `dtype`."""
    context, x = packed_context(config, rows.segments), embed_rows(parts, rows, dtype)
    own = _layer_inputs(*parts("embed_tokens"), rows.tokens, x) if config.per_layer else None
    for index, layer_context in enumerate(context.each(own, config.layer_segments(rows.segments, None))):
        x = _layer(*parts(index), x, layer_context)
    x = _norm(*parts("norm"), x)
    head = "score" if config.scores else "embed_tokens" if config.tie_word_embeddings else "lm_head"
    return _project(*parts(head), x)


def embed_rows(parts: Parts, rows: ExportRows, dtype) -> Float[Array, "B T D"]:
    """Return the rows' embeddings."""
    return _embed(*parts("embed_tokens"), rows.tokens, dtype)


@partial(jax.jit, static_argnums=(0, 3))
def _embed(graphdef, trees, tokens, dtype):
    return merge_module(graphdef, *trees)(tokens, dtype)


@partial(jax.jit, static_argnums=0)
def _layer_inputs(graphdef, trees, tokens, x):
    return merge_module(graphdef, *trees).layer_inputs(tokens, x)


@partial(jax.jit, static_argnums=0)
def _layer(graphdef, trees, x, context):
    return merge_module(graphdef, *trees)(x, context)


@partial(jax.jit, static_argnums=0)
def _norm(graphdef, trees, x):
    return merge_module(graphdef, *trees)(x)


@partial(jax.jit, static_argnums=0)
def _project(graphdef, trees, x):
    output = merge_module(graphdef, *trees)
    return project(with_low_rank(output, x), extended_matrix(output), jnp.float32)


def compare(origin: Array, files: Array, rows: ExportRows, limit: float) -> ExportCheck:
    """Compare the logits of files with those of their origin."""
    kl, largest = _divergence(origin, files, rows.segments.segment_ids > 0)
    tokens = int((np.asarray(rows.segments.segment_ids) > 0).sum())
    return ExportCheck(kl=float(kl), max_logit_difference=float(largest), limit=limit, tokens=tokens, rows=rows.source)


@jax.jit
def _divergence(origin, files, mask):
    p, q = jax.nn.log_softmax(origin), jax.nn.log_softmax(files)
    scores = origin.shape[-1] == 1
    kl = (origin - files)[..., 0] ** 2 / 2 if scores else jnp.sum(jnp.exp(p) * (p - q), axis=-1)
    largest = jnp.max(jnp.where(mask[..., None], jnp.abs(origin - files), 0))
    return jnp.maximum(jnp.sum(jnp.where(mask, kl, 0)) / jnp.sum(mask), 0), largest


def rounding_limit(logits: Float[Array, "B T V"], dtypes: Iterable[Any], effect: float = 0.0) -> float:
    """Return the largest KL that rounding explains, nats per token: half the square of the logits' error.

    Args:
        logits: of the origin.
        dtypes: that weights or activations are rounded to.
        effect: KL between the trained model and its base, of which a quarter may be lost to rounding.
    """
    precision = max([_TF32, *(float(jnp.finfo(dtype).eps) for dtype in dtypes)])
    spread = jnp.sqrt(jnp.mean(logits**2)) if logits.shape[-1] == 1 else jnp.std(logits)
    floor = (_RELATIVE * precision * float(spread)) ** 2 / 2
    return min(_LARGEST, max(floor, effect / 4))


def check_merge(
    base: str | Path,
    config: DecoderConfig,
    adapter: Adapter,
    merged: Path,
    dtypes: Iterable[Any],
    rows: ExportRows | None = None,
    rounding: Rounding | None = None,
) -> ExportCheck:
    """Compare a merged folder with its base and adapter apart, in float32; write the result into the folder.

    Args:
        base: the model folder.
        config: its shape; with `quantize`, as its linear layers were held in training.
        adapter: fitted to the base.
        merged: the folder to compare.
        dtypes: of its changed tensors.
        rows: to predict; by default random tokens.
        rounding: of the merge, where the folder holds it in fewer bits than its base.

    Raises:
        ValueError: they differ by more than rounding explains.
    """
    after, dtype = config_from_hf(read_config(merged)), jnp.dtype(jnp.float32)
    measured, rows = rows, rows.few if rows else random_rows(after.vocab_size)
    origin = folder_parts(base, config, dtype=dtype, adapter=adapter)
    apart = predict(config, merged_parts(origin, rounding) if rounding else origin, rows, dtype)
    effect = 0.0
    if adapter.vocab_size <= config.vocab_size and not adapter.scores:  # bases have no score
        effect = compare(apart, predict(config, folder_parts(base, config, dtype=dtype), rows, dtype), rows, 0.0).kl
    together = predict(after, folder_parts(merged, after, dtype=dtype), rows, dtype)
    check = replace(compare(apart, together, rows, rounding_limit(apart, dtypes, effect)), storage=config.quantize)
    check.require(merged)
    in_few_bits = after.quantize != "none" or (after.moe is not None and after.moe.quantize != "none")
    if measured is not None and in_few_bits:
        check = replace(
            check, gain=measure_gain(base, adapter, measured, after, folder_parts(merged, after, dtype=dtype))
        )
    check.save(merged)
    return check


def merged_parts(parts: Parts, rounding: Rounding) -> Parts:
    """Return parts whose linear layers have their adapter merged and rounded."""

    def part(key: ParamKey) -> Part:
        graphdef, trees = parts(key)
        module = merge_module(graphdef, *trees)
        for path, linear in nnx.iter_modules(module):
            if isinstance(linear, Linear) and isinstance(key, int):
                name = part_name(key, ".".join(map(str, (*path, "weight"))))
                adapter, matrix = linear.adapter, linear.weight[...]
                if adapter is not None:
                    matrix = (matrix + jnp.matmul(adapter.up, adapter.A, precision="highest")).astype(matrix.dtype)
                linear.weight = nnx.Param(rounding(name, matrix))
                linear.lora_A = linear.lora_B = nnx.data(None)
        graphdef, state = nnx.split(module)
        return graphdef, (nnx.to_pure_dict(state),)

    return part


def measure_gain(
    base: str | Path, adapter: Adapter, rows: ExportRows, after: DecoderConfig, parts: Parts
) -> Gain | None:
    """Return the losses of base, adapter and files in few bits; None for rows without losses, and models of scores.

    Args:
        base: the model folder.
        adapter: fitted to it.
        rows: of the adapter's run.
        after: the files' architecture.
        parts: their model.
    """
    config, dtype = config_from_hf(read_config(base)), jnp.dtype(jnp.float32)
    if rows.targets is None or rows.loss_weights is None or adapter.scores or adapter.vocab_size > config.vocab_size:
        return None
    models = (config, None), (config, adapter)
    logits = [predict(own, folder_parts(base, own, dtype=dtype, adapter=added), rows, dtype) for own, added in models]
    logits.append(predict(after, parts, rows, dtype))
    base_loss, adapted, files = (float(_loss(each, rows.targets, rows.loss_weights)) for each in logits)
    tokens, kl = int((rows.loss_weights > 0).sum()), float(_divergence(*logits[1:], rows.segments.segment_ids > 0)[0])
    return Gain(base=base_loss, adapted=adapted, files=files, kl=kl, tokens=tokens) if tokens else None


@jax.jit
def _loss(logits, targets, weights):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    return -jnp.sum(weights * chosen) / jnp.maximum(jnp.sum(weights), 1e-9)


def check_quantized(
    base: str | Path, quantized: Path, made: WeightFormat, names: Collection[str]
) -> tuple[ExportCheck, float]:
    """Compare a quantized folder with its base, whose matrices are rounded in memory; write the result into the folder.

    Args:
        base: the model folder.
        quantized: the folder to compare.
        made: its format.
        names: of the base's tensors that are in it.

    Returns:
        the comparison, and the KL between the base as it is and the folder, nats per token.

    Raises:
        ValueError: they differ by more than rounding explains.
    """
    before, after = (config_from_hf(read_config(folder)) for folder in (base, quantized))
    rows, dtype = random_rows(after.vocab_size), jnp.dtype(jnp.float32)
    plain = folder_parts(base, before, dtype=dtype)
    origin = predict(before, _rounded_parts(plain, made, names), rows, dtype)
    files = predict(after, folder_parts(quantized, after, dtype=dtype), rows, dtype)
    limit = rounding_limit(origin, [jnp.bfloat16])  # to which experts are expanded
    check = replace(compare(origin, files, rows, limit), storage=made.name)
    check.require(quantized)
    check.save(quantized)
    return check, compare(predict(before, plain, rows, dtype), files, rows, 0.0).kl


def _rounded_parts(parts: Parts, made: WeightFormat, names: Collection[str]) -> Parts:
    """Return parts whose named matrices, also of single experts, have the values that a format holds."""

    def rounded(matrix: Array) -> Array:
        return dequantize(made.quantize(matrix), matrix.dtype)

    def part(key: ParamKey) -> Part:
        def value(path: Any, leaf: Any) -> Any:
            name = part_name(key, jax.tree_util.keystr(path, simple=True, separator="."))
            if name in names:
                return rounded(leaf.mT).mT if made.parts else rounded(leaf)
            for tensor, index in expert_parts(name, leaf.shape).items():
                leaf = leaf.at[index].set(rounded(leaf[index])) if tensor in names else leaf
            return leaf

        graphdef, (tree,) = parts(key)
        return graphdef, (jax.tree_util.tree_map_with_path(value, tree) if isinstance(key, int) else tree,)

    return part
