"""Qwen3-VL: Qwen3 inside of a model whose vision tower adds features to its first layers."""

from jaxglue.models import qwen3
from jaxglue.models.family import Family, Parts, register
from jaxglue.models.qwen_vision import with_tower
from jaxglue.models.wrapper import Wrapper, wrap

register(Family(model_type="qwen3_vl_text", config_from_hf=qwen3.config_from_hf, parts=Parts(head_norms="heads")))
wrap(Wrapper(model_type="qwen3_vl", text_types=("qwen3_vl_text",), others=("visual.",), tied=False, tower=with_tower))
