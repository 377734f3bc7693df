"""The layers that stay out of FP8, and whether the head does, because it is too inaccurate on their values."""

from typing import NamedTuple

from jaxglue.engine.fp8_errors import FP8Errors


class FP8Choice(NamedTuple):
    """Parts that are multiplied in FP8, and a line that names them."""

    layers: list[bool]
    head: bool
    note: str


def choose_fp8(errors: FP8Errors, largest: float) -> FP8Choice:
    """Return the choice by errors and the largest error that stays in FP8; not-a-number is above any."""
    layers, head = [error <= largest for error in errors.layers], errors.head is not None and errors.head <= largest
    worst = max(range(len(layers)), key=lambda index: errors.layers[index])
    note = f"fp8: largest relative error of a layer {errors.layers[worst]:.1%}, in layer {worst}"
    if errors.head is not None:
        note += f"; of the head's gradient {errors.head:.1%}"
    wide = [str(index) for index, stays in enumerate(layers) if not stays]
    if errors.head is not None and not head:
        wide.append("head")
    if wide:
        note += f"; layers above {100 * largest:.3g}% multiply in the activations' dtype: {', '.join(wide)}"
    return FP8Choice(layers, head, note)
