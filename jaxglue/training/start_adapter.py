"""The adapter that a run trains on from."""

from dataclasses import replace

from jaxglue.hf.adapter import Adapter, check_adapter, load_adapter
from jaxglue.hf.identity import Identity, identify, identify_random
from jaxglue.models import abstract_model
from jaxglue.models.config import DecoderConfig
from jaxglue.models.lora import base_shapes
from jaxglue.models.lora_config import LoraConfig
from jaxglue.training.config import TrainConfig


def base_identity(config: TrainConfig, model: DecoderConfig) -> Identity:
    """Return the identity of a run's base, with the format of its linear layers, which its adapter records."""
    random = config.model.random_weights
    identity = identify_random(model, config.data.seed) if random else identify(config.model.folder)
    return {**identity, "quantize": model.quantize} if model.quantize in ("nf4", "int8") else identity


def read_start(config: TrainConfig, model: DecoderConfig) -> tuple[TrainConfig, Adapter | None]:
    """Return the run with the rank, alpha and targets of its `--adapter`, and that adapter, if it has one.

    Raises:
        ValueError: not an adapter folder, one that does not fit the base, or flags that contradict it.
    """
    if config.model.adapter is None:
        return config, None
    shapes = base_shapes(abstract_model(model))
    loaded = load_adapter(config.model.adapter)
    adapter = check_adapter(loaded, shapes, base_identity(config, model), config.model.model)
    if adapter.scores != model.scores:
        what = "a reward model's" if adapter.scores else "not a reward model's"
        objective = config.objective.objective
        raise ValueError(f"--adapter {config.model.adapter} is {what}, so --objective {objective} cannot train it on")
    lora = replace(adapter.config, dropout=config.lora.dropout or adapter.config.dropout)
    if replace(config.lora, dropout=0.0) not in (LoraConfig(), replace(lora, dropout=0.0)):
        raise ValueError(
            f"--adapter {config.model.adapter} brings its own rank {lora.rank}, alpha {lora.alpha:g} and targets "
            f"{', '.join(lora.targets[:8])}: leave out the other settings of adapters than --dropout"
        )
    return replace(config, lora=lora), adapter
