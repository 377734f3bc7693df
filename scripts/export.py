"""Writes a trained model as a Hugging Face folder that transformers, vLLM and others load.

python scripts/export.py --adapter runs/first/adapter --base models/Qwen3-0.6B --output merged
python scripts/export.py --parameters runs/first/parameters --base models/Qwen3-0.6B --output merged
"""

import sys

from jaxglue.cli import parse_config
from jaxglue.hf.export import ExportConfig, export


def main() -> None:
    config = parse_config(ExportConfig)
    try:
        export(config)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"wrote {config.output}")


if __name__ == "__main__":
    main()
