"""The layers that stay out of FP8 because it is too inaccurate on their activations."""

from collections.abc import Sequence

from jaxglue.models.parameters import Params
from jaxglue.ops.quant.fp8 import expand_products


def expand_inaccurate(frozen: Params, errors: Sequence[float], largest: float) -> tuple[Params, str]:
    """Return (frozen parameters in which layers of larger errors expand their products, a line that says so).

    Args:
        frozen: parameter tree of `split_model`.
        errors: relative error of each layer's output.
        largest: error up to which a layer stays in FP8; not-a-number is above any.
    """
    expanded = [index for index, error in enumerate(errors) if not error <= largest]
    layers = [expand_products(layer) if i in expanded else layer for i, layer in enumerate(frozen["layers"])]
    worst = max(range(len(errors)), key=lambda index: errors[index])
    note = f"fp8: largest relative error of a layer {errors[worst]:.1%}, in layer {worst}"
    if expanded:
        names = ", ".join(map(str, expanded))
        note += f"; layers above {largest:.0%} multiply in the activations' dtype: {names}"
    return {**frozen, "layers": layers}, note
