"""Arrays of zeros, made by the devices that hold them."""

from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def zeros_on(device: jax.Device | jax.sharding.Sharding | None, shape: int | tuple[int, ...], dtype) -> Array:
    """Return zeros on a device, on those of a sharding, or, for None, anywhere.

    `jnp.zeros(…, device=…)` makes them on the first GPU and copies them; among what is made there meanwhile they leave
    holes in its memory.
    """
    if device is None:
        return jnp.zeros(shape, dtype)
    sharding = jax.sharding.SingleDeviceSharding(device) if isinstance(device, jax.Device) else device
    return _program(shape, jnp.dtype(dtype), sharding)()


@lru_cache(256)
def _program(shape: Any, dtype: Any, sharding: jax.sharding.Sharding) -> Any:
    return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)
