"""Model families: read config.json, build a flax.nnx model. Imported on first use, as they load JAX."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxglue.models.families import (
        FAMILIES,
        Family,
        abstract_model,
        build_model,
        config_from_hf,
        register,
        with_vision,
    )

__all__ = ["FAMILIES", "Family", "abstract_model", "build_model", "config_from_hf", "register", "with_vision"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jaxglue.models import families

    return getattr(families, name)
