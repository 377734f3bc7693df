"""Merge an adapter into its base, quantize a model, or upload the result to the Hugging Face hub.

jaxglue export --adapter runs/first/adapter --output merged
jaxglue export --adapter runs/first/adapter --push owner/name
jaxglue export --quantize nf4 --base models/Qwen3-8B --output models/Qwen3-8B-nf4
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jaxglue.cli import parse_config
from jaxglue.config import Alias, Config, PositiveInt
from jaxglue.hf.adapter import find_base
from jaxglue.hf.card import CURVE, model_card
from jaxglue.hf.checkpoint import MAX_SHARD_BYTES
from jaxglue.hf.export import export_adapter, quantize_folder
from jaxglue.hf.hub import base_reference, model_path, push_folder
from jaxglue.ops.quant.formats import Quantize


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Config):
    """Merge an adapter into its base model, quantize a model, or upload either to the Hugging Face hub."""

    base: Annotated[Path | None, Alias("model")] = None
    """Model folder, or owner/name on the hub; by default the adapter's base."""
    output: Path | None = None
    """New folder; absent or empty. Without it, --push uploads the adapter itself."""
    adapter: Path | None = None
    """PEFT adapter folder to merge, or to upload."""
    quantize: Annotated[Quantize, Alias("quantise")] = "none"
    """Store the decoder layers' linear layers in bitsandbytes' NF4 or int8 format."""
    push: str | None = None
    """Repository owner/name on the hub to upload to, with a model card of the run."""
    private: bool = False
    """Create the repository as private."""
    max_shard_bytes: PositiveInt = MAX_SHARD_BYTES
    """Shard limit in bytes."""

    def validate(self) -> None:
        """Refuse both tasks at once, and neither."""
        if (self.adapter is None) == (self.quantize == "none"):
            raise ValueError("give either --adapter or --quantize; to do both, quantize the merged folder")
        if self.output is None and (self.adapter is None or self.push is None):
            raise ValueError("no --output: name a new folder")
        if self.base is None and self.adapter is None:
            raise ValueError("no --base: name the model to quantize")

    def base_folder(self, *, weights: bool = True) -> Path:
        """Return the base's folder, downloaded if it is on the hub."""
        if self.base is not None:
            return model_path(self.base, weights=weights)
        assert self.adapter is not None
        return find_base(self.adapter, weights=weights)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the merged or quantized folder, and upload it or the adapter."""
    config = parse_config(ExportConfig, argv, command="export")
    if config.output is not None:
        _write(config, config.output)
        print(f"wrote {config.output}")
    if config.push is not None:
        print(f"uploaded to {_push(config, config.push)}")


def _write(config: ExportConfig, output: Path) -> None:
    if config.adapter is not None:
        print(export_adapter(config.adapter, config.base_folder(), output, config.max_shard_bytes))
    else:
        quantize_folder(config.base_folder(), output, config.quantize, config.max_shard_bytes)


def _push(config: ExportConfig, name: str) -> str:
    """Upload the written folder, else the adapter, with the card of the adapter's run; return the address."""
    source = config.output or config.adapter
    assert source is not None
    run = (config.adapter or source).resolve().parent
    base = base_reference(config.base_folder(weights=False))
    card = model_card(name, base, run, adapter=config.output is None)
    curve = [run / CURVE] if (run / CURVE).is_file() else []
    return push_folder(source, name, card, extra=curve, private=config.private)
