"""Merges an adapter into its base, or quantizes a model: a Hugging Face folder that transformers and others load.

python scripts/export.py --adapter runs/first/adapter --base models/Qwen3-0.6B --output merged
python scripts/export.py --quantize nf4 --base models/Qwen3-8B --output models/Qwen3-8B-nf4
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jaxglue.cli import parse_config, user_errors
from jaxglue.config import Alias, Config, PositiveInt
from jaxglue.hf.checkpoint import MAX_SHARD_BYTES
from jaxglue.hf.export import export_adapter, quantize_folder
from jaxglue.ops.quant.formats import Quantize


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Config):
    """Merge an adapter into its base model, or quantize a model, as a new Hugging Face folder."""

    base: Path
    """Folder of the model; of the one that the adapter was trained on."""
    output: Path
    """The new folder; must not exist, or be empty."""
    adapter: Path | None = None
    """PEFT adapter folder to merge."""
    quantize: Annotated[Quantize, Alias("quantise")] = "none"
    """Store the linear layers of the decoder layers in NF4 or int8, as bitsandbytes does."""
    max_shard_bytes: PositiveInt = MAX_SHARD_BYTES
    """Size at which a new file is begun, in bytes."""

    def validate(self) -> None:
        """Refuse both tasks at once, and neither."""
        if (self.adapter is None) == (self.quantize == "none"):
            raise ValueError(
                "give either --adapter, to merge it, or --quantize; to do both, quantize the merged folder"
            )


def main() -> None:
    config = parse_config(ExportConfig)
    with user_errors():
        if config.adapter is not None:
            export_adapter(config.adapter, config.base, config.output, config.max_shard_bytes)
        else:
            quantize_folder(config.base, config.output, config.quantize, config.max_shard_bytes)
    print(f"wrote {config.output}")


if __name__ == "__main__":
    main()
