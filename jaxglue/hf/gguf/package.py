"""The `gguf` package, which writes the files and knows llama.cpp's names."""

from typing import Any


def load_gguf() -> Any:
    """Return the `gguf` module.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        needed = "pip install '.[gguf]' in the clone of jaxglue"
        raise ValueError(f"--gguf needs the package gguf ({error}): {needed}") from None
    return gguf
