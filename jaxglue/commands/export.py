"""Merge an adapter, quantize a model, write a run's checkpoint, or upload the result to the Hugging Face hub.

jaxglue export --adapter runs/first/adapter --output merged
jaxglue export --adapter runs/first/adapter --push owner/name
jaxglue export --quantize nf4 --base models/Qwen3-8B --output models/Qwen3-8B-nf4
jaxglue export --run runs/first --checkpoint best --output best
"""

from pathlib import Path

from jaxglue.commands.configs import ExportConfig
from jaxglue.data.progress import DataProgress
from jaxglue.hf.export import quantize_folder
from jaxglue.hf.export_check import CHECK_FILE
from jaxglue.hf.hub import CURVE, base_reference, model_card, push_folder
from jaxglue.hf.merge import export_adapter
from jaxglue.json_file import read_json
from jaxglue.ops.quant.formats import FORMATS
from jaxglue.training.checkpoint_export import export_checkpoint


def main(config: ExportConfig) -> None:
    """Write the merged or quantized folder, and upload it or the adapter."""
    if config.output is not None:
        _write(config, config.output)
        print(f"wrote {config.output}")
    if config.push is not None:
        print(f"uploaded to {_push(config, config.push)}")


def _write(config: ExportConfig, output: Path) -> None:
    if config.checkpoint is not None:
        step = export_checkpoint(config.run, config.checkpoint, output)
        print(f"the weights of step {step:,}")
    elif config.adapter is not None:
        print(_merge(config, config.adapter, output))
    else:
        quantize_folder(config.base_folder(), output, config.quantize, config.max_shard_bytes, progress=DataProgress())


def _merge(config: ExportConfig, adapter: Path, output: Path) -> str:
    """Write the merged folder; describe its base, and the comparison with base and adapter apart."""
    storage = None if config.trained_on == "auto" else config.trained_on
    base, most = config.base_folder(), config.max_shard_bytes
    check = export_adapter(adapter, base, output, most, storage=storage, progress=DataProgress())
    if check.storage == "none":
        return str(check)
    label = FORMATS[check.storage].label
    return f"merged into the base as quantized to {label}, on which the adapter was trained; {check}"


def _push(config: ExportConfig, name: str) -> str:
    """Upload the written folder, else the adapter, with the card of the adapter's run; return the address."""
    source = config.output or config.adapter
    assert source is not None
    run = (config.adapter or source).resolve().parent
    base = base_reference(config.base_folder(weights=False))
    check = read_json(source / CHECK_FILE) if (source / CHECK_FILE).is_file() else None
    card = model_card(name, base, run, adapter=config.output is None, check=check)
    curve = [run / CURVE] if (run / CURVE).is_file() else []
    return push_folder(source, name, card, extra=curve, private=config.private)
