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
        raise ValueError(f"--gguf needs the package gguf ({error}): pip install 'jaxglue[gguf]'") from None
    return gguf
