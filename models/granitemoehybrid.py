"""Granite 4 (H-micro, H-tiny, H-small): Mamba-2 in most layers, a feed-forward that all tokens share, and experts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from flax import nnx
from jaxtyping import Array, Float

from jaxglue.models.config import ATTENTION, DecoderConfig, LayerKind, MoeConfig
from jaxglue.models.context import LayerContext
from jaxglue.models.family import ExpertParts, Family, ModuleNames, Parts, register
from jaxglue.models.granite import factors
from jaxglue.models.hf_fields import check_fields, decoder_fields, expert_format, require_fields
from jaxglue.models.layers import DecoderLayer, FusedMLP
from jaxglue.models.mamba import Mamba2Config, mamba_sizes, read_limits
from jaxglue.models.moe_layers import SparseMLP
from jaxglue.models.residual import Branch
from jaxglue.models.wrapper import Spelling, spell
from jaxglue.ops.residual_norm import Normed
from jaxglue.settings.config import NonNegativeInt, PositiveInt


@dataclass(frozen=True, kw_only=True)
class _Fields:
    shared_intermediate_size: PositiveInt
    num_local_experts: NonNegativeInt
    num_experts_per_tok: NonNegativeInt
    position_embedding_type: str
    layers_block_type: tuple[str, ...]


_TYPES: dict[str, Literal["mamba", "attention"]] = {
    **{"mamba": "mamba", "linear_attention": "mamba"},
    **{"attention": "attention", "full_attention": "attention"},
}
_DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024}


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `GraniteMoeHybridForCausalLM` config.json; without experts the feed-forward of all tokens is alone.

    Raises:
        ValueError: a missing field, or a value that is not supported.
    """
    check_fields(raw, _Fields)
    given = {**_DEFAULTS, **{name: value for name, value in raw.items() if value is not None}}
    require_fields(given, ("num_hidden_layers", "hidden_size", "intermediate_size"))
    layers, types = given["num_hidden_layers"], _types(given)
    positions = given.get("position_embedding_type")
    if positions not in (None, "nope", "rope"):
        raise ValueError(f"position_embedding_type in config.json: expected rope, nope or null, got {positions!r:.100}")
    mamba = Mamba2Config(**mamba_sizes(given), limits=read_limits(given))
    shared, moe = given["shared_intermediate_size"], None
    if given["num_local_experts"]:
        moe = MoeConfig(
            num_experts=given["num_local_experts"],
            num_experts_per_tok=given["num_experts_per_tok"],
            intermediate_size=given["intermediate_size"],
            sparse_layers=(True,) * layers,
            quantize=expert_format(given),
            shared_size=shared,
        )
    return DecoderConfig(
        **decoder_fields({**given, "intermediate_size": shared, "mlp_bias": False}),
        **factors(given),
        layer_windows=(None,) * layers,
        layer_ropes=() if positions == "rope" else (None,) * layers,
        moe=moe,
        mixers=tuple(mamba if kind == "mamba" else ATTENTION for kind in types),
    )


def _types(given: Mapping[str, Any]) -> list[str]:
    """Return each layer's part by its type, in either name of these."""
    layers = given["num_hidden_layers"]
    types = given.get("layer_types") or given.get("layers_block_type") or ["mamba"] * layers
    if len(types) != layers or not _TYPES.keys() >= set(types):
        raise ValueError(
            f"layer_types in config.json: expected {', '.join(_TYPES)} for each of {layers} layers, got {types!r:.100}"
        )
    return [_TYPES[kind] for kind in types]


class SharedBeside:
    """Experts and, beside them in the layer, the feed-forward of all tokens."""

    inputs = ()
    """Projections that alone read the layer's norm: none, since the router reads it."""

    def __init__(self, experts: SparseMLP, shared: FusedMLP):
        self._experts, self._shared = experts, shared

    def __call__(self, x: Normed, context: LayerContext) -> Branch:
        """Apply both."""
        experts, shared = self._experts(x, context), self._shared(x, context)
        return Branch(lambda stream: self._sum(stream, experts, shared))

    def _sum(self, stream: Float[Array, "B T D"], experts: Branch, shared: Branch) -> Array:
        return shared.add_to(experts.add_to(stream))


class GraniteHybridLayer(DecoderLayer):
    """A layer whose dense feed-forward is `shared_mlp`, also where it has experts, `block_sparse_moe`."""

    def __init__(self, config: DecoderConfig, parts: Parts, kind: LayerKind, *, dtype, rngs: nnx.Rngs):
        if kind.sparse:
            assert config.moe is not None
            names = replace(parts.names, mlp="block_sparse_moe")
            of_experts = replace(config, moe=replace(config.moe, shared_size=0))
            super().__init__(of_experts, replace(parts, names=names), kind, dtype=dtype, rngs=rngs)
            self.shared_mlp = FusedMLP(config, kind, "shared_mlp", modules=parts.names, dtype=dtype, rngs=rngs)
        else:
            super().__init__(config, parts, kind, dtype=dtype, rngs=rngs)

    @property
    def ffn(self) -> Any:
        """Return the feed-forward, alone or beside experts."""
        named = getattr(self, self.mlp_name)
        return SharedBeside(named, self.shared_mlp) if isinstance(named, SparseMLP) else named


_NAMES = ModuleNames(mlp="shared_mlp", gate_up="input_linear", down="output_linear")
_EXPERTS = ExpertParts(router="router", order="topk_softmax")
_MOE = "block_sparse_moe"
register(
    Family(
        model_type="granitemoehybrid",
        config_from_hf=config_from_hf,
        parts=Parts(names=_NAMES, fused_gate_up=True, experts=_EXPERTS),
        layer=GraniteHybridLayer,
        linears=("mamba.in_proj", "mamba.out_proj", "shared_mlp.input_linear", "shared_mlp.output_linear"),
    )
)
spell(
    Spelling(
        model_type="granitemoehybrid",
        parts=(
            (f"{_MOE}.experts.gate_up_proj", f"{_MOE}.input_linear.weight"),
            (f"{_MOE}.experts.down_proj", f"{_MOE}.output_linear.weight"),
            (f"{_MOE}.router.weight", f"{_MOE}.router.layer.weight"),
        ),
    )
)
