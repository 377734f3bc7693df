"""Merge an adapter into its base, or quantize a model, as a Hugging Face folder.

jaxglue export --adapter runs/first/adapter --base models/Qwen3-0.6B --output merged
jaxglue export --quantize nf4 --base models/Qwen3-8B --output models/Qwen3-8B-nf4
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jaxglue.cli import parse_config
from jaxglue.config import Alias, Config, PositiveInt
from jaxglue.hf.checkpoint import MAX_SHARD_BYTES
from jaxglue.hf.export import export_adapter, quantize_folder
from jaxglue.ops.quant.formats import Quantize


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Config):
    """Merge an adapter into its base model, or quantize a model, as a new Hugging Face folder."""

    base: Path
    """Model folder; the adapter's base when merging."""
    output: Path
    """New folder; absent or empty."""
    adapter: Path | None = None
    """PEFT adapter folder to merge."""
    quantize: Annotated[Quantize, Alias("quantise")] = "none"
    """Store the decoder layers' linear layers in bitsandbytes' NF4 or int8 format."""
    max_shard_bytes: PositiveInt = MAX_SHARD_BYTES
    """Shard limit in bytes."""

    def validate(self) -> None:
        """Refuse both tasks at once, and neither."""
        if (self.adapter is None) == (self.quantize == "none"):
            raise ValueError("give either --adapter or --quantize; to do both, quantize the merged folder")


def main(argv: Sequence[str] | None = None) -> None:
    """Write the merged or quantized folder."""
    config = parse_config(ExportConfig, argv, command="export")
    if config.adapter is not None:
        print(export_adapter(config.adapter, config.base, config.output, config.max_shard_bytes))
    else:
        quantize_folder(config.base, config.output, config.quantize, config.max_shard_bytes)
    print(f"wrote {config.output}")
