"""Weights drawn alike by the makers of goldens and by tests, so that goldens need not hold them. NumPy alone."""

import zlib

import numpy as np


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw the named parameter in float32: non-uniform attention, and non-trivial norms and biases."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    if name.endswith(("put_min", "put_max")):  # bounds that cut some values
        return np.array((-1 if name.endswith("_min") else 1) * (1 + 0.2 * np.abs(noise)), np.float32)
    return 1 + 0.2 * noise if name.endswith(("norm.weight", "layer_scalar")) else 0.3 * noise


def probes(name: str, gradient: np.ndarray) -> np.ndarray:
    """Return eight sums of a gradient's entries with random signs, over √8: their distance is about the gradients'."""
    signs = np.random.default_rng(zlib.crc32(name.encode())).choice([-1.0, 1.0], (8, gradient.size))
    return (signs @ np.asarray(gradient, np.float64).ravel() / 8**0.5).astype(np.float32)


def packed(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a golden's tensors with `norm.<name>` [] and `probes.<name>` [8] of P names as rows of two arrays.

    A file's header takes more bytes than its tensors otherwise. `names` are compressed, a line each.
    """
    names = [key.removeprefix("norm.") for key in sorted(tensors) if key.startswith("norm.")]
    kept = {key: tensor for key, tensor in tensors.items() if not key.startswith(("norm.", "probes."))}
    kept["norms"], kept["probes"] = (np.stack([tensors[f"{of}.{name}"] for name in names]) for of in ("norm", "probes"))
    return kept | {"names": np.frombuffer(zlib.compress("\n".join(names).encode(), 9), np.uint8)}


def unpacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what `packed` took."""
    names = zlib.decompress(tensors["names"].tobytes()).decode().split("\n")
    kept = {key: tensor for key, tensor in tensors.items() if key not in ("names", "norms", "probes")}
    for name, norm, sums in zip(names, tensors["norms"], tensors["probes"], strict=True):
        kept |= {f"norm.{name}": norm, f"probes.{name}": sums}
    return kept


def pixels(number: int, grid: tuple[int, int], patch: int) -> np.ndarray:
    """Draw an image's patches [P, 3 · patch²], uint8, in the order of a model's merged ones."""
    rng = np.random.default_rng([number, *grid])
    return rng.integers(0, 256, (grid[0] * grid[1], 3 * patch**2)).astype(np.uint8)


def frames(number: int, count: int, bands: int) -> np.ndarray:
    """Draw a clip's frames [count, bands], float32."""
    return np.random.default_rng([number, count]).standard_normal((count, bands)).astype(np.float32)


def samples(count: int) -> np.ndarray:
    """Draw a clip's samples [count], float32, which 16 bits hold."""
    noise = np.random.default_rng(0).standard_normal(count) * np.sin(np.arange(count) / 40)
    return (np.round(np.clip(noise / 8, -1, 1) * 32767) / 32768).astype(np.float32)
