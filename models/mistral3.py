"""Mistral Small 3 and Ministral 3 with a vision tower around their text model."""

from jaxglue.models.pixtral import with_tower
from jaxglue.models.wrapper import Wrapper, wrap

wrap(
    Wrapper(
        model_type="mistral3",
        text_types=("mistral", "ministral3"),
        others=("vision_tower.", "multi_modal_projector."),
        tower=with_tower,
        unread=("layer_types",),
    )
)
