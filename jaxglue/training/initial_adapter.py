"""The adapter that a run trains on from, checked against its base by this one's identity."""

from dataclasses import replace

from jaxglue.hf.adapter import Adapter, load_adapter
from jaxglue.hf.adapter_check import check_adapter
from jaxglue.hf.identity import Identity, identify, identify_random
from jaxglue.models import abstract_model
from jaxglue.models.config import DecoderConfig
from jaxglue.models.lora import base_shapes
from jaxglue.models.lora_config import LoraConfig
from jaxglue.ops.quant.formats import FORMATS
from jaxglue.training.config import TrainConfig


def read_initial_adapter(config: TrainConfig, model: DecoderConfig) -> Adapter | None:
    """Return the adapter that a run trains on from; None without `--adapter`.

    Raises:
        ValueError: not an adapter folder, one that does not fit the base, or flags that contradict it.
    """
    folder = config.model.adapter
    if folder is None:
        return None
    adapter, tied = load_adapter(folder), model
    model = adapter.adapted(tied)
    if model != tied and config.model.random_weights:
        raise ValueError(
            f"--adapter {folder} has embedding and output projection apart, which --random-weights draws as one: "
            "leave one of them out"
        )
    adapter = check_adapter(
        adapter, base_shapes(abstract_model(model)), base_identity(config, model), config.model.model
    )
    if adapter.labels != (model.labels if model.scores else 0):
        what = f"of a model with {adapter.labels} scores" if adapter.scores else "of a text model"
        objective = config.objective.objective
        raise ValueError(f"--adapter {folder} is {what}, so --objective {objective} cannot train it on")
    lora, given = adapter.config, replace(config.lora, dropout=None)
    if given not in (LoraConfig(), replace(lora, dropout=None)):
        raise ValueError(
            f"--adapter {folder} brings its own rank {lora.rank}, alpha {lora.alpha:g} and targets "
            f"{', '.join(lora.targets[:8])}: leave out the other settings of adapters than --dropout"
        )
    return adapter


def base_identity(config: TrainConfig, model: DecoderConfig) -> Identity:
    """Return the identity of a run's base, with the format of its linear layers, which its adapter records."""
    random = config.model.random_weights
    identity = identify_random(model, config.data.seed) if random else identify(config.model.folder)
    if not FORMATS[model.quantize].offered:
        return identity
    skipped = {"unquantized": ",".join(model.unquantized)} if model.unquantized else {}
    return {**identity, "quantize": model.quantize, **skipped}
