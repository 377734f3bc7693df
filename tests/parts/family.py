"""A model family: Cohere's Command R, whose attention and feed-forward read one layer norm without a bias."""

from jaxglue.models import Family, register
from jaxglue.models.config import AttentionOptions, DecoderConfig, Scales
from jaxglue.models.family import NormNames, Parts
from jaxglue.models.hf_fields import decoder_fields
from jaxglue.ops.norm_rope import NormStyle


def read_config(raw):
    if raw.get("use_qk_norm"):
        raise ValueError("use_qk_norm in config.json is not supported for cohere")
    given = {"tie_word_embeddings": True, **raw, "rms_norm_eps": raw.get("layer_norm_eps", 1e-5), "mlp_bias": False}
    return DecoderConfig(
        **decoder_fields(given, max_position_embeddings=8192, interleaved=True),
        layer_windows=(None,) * raw["num_hidden_layers"],
        attention=AttentionOptions(output_bias=bool(raw.get("attention_bias"))),
        scales=Scales(logit_divisor=1 / raw.get("logit_scale", 0.0625)),
    )


register(
    Family(
        model_type="cohere",
        config_from_hf=read_config,
        parts=Parts(norms=NormNames(before_mlp=None), norm=NormStyle(rounds_first=False, centered=True), parallel=True),
    )
)
