"""Merges an adapter into its base: a Hugging Face folder that transformers, vLLM and others load.

python scripts/export.py --adapter runs/first/adapter --base models/Qwen3-0.6B --output merged
"""

from dataclasses import dataclass
from pathlib import Path

from jaxglue.cli import parse_config, user_errors
from jaxglue.hf.checkpoint import MAX_SHARD_BYTES
from jaxglue.hf.export import export_adapter


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Merge an adapter into its base model, as a new Hugging Face folder."""

    adapter: Path
    """PEFT adapter folder."""
    base: Path
    """Folder of the model that the adapter was trained on."""
    output: Path
    """The new folder; must not exist, or be empty."""
    max_shard_bytes: int = MAX_SHARD_BYTES
    """Size at which a new file is begun, in bytes."""


def main() -> None:
    config = parse_config(ExportConfig)
    with user_errors():
        export_adapter(config.adapter, config.base, config.output, config.max_shard_bytes)
    print(f"wrote {config.output}")


if __name__ == "__main__":
    main()
