from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxglue.hf.checkpoint import open_checkpoint, save_tensors
from jaxglue.hf.upload_buffers import UploadBuffers

SHAPES = {"one": (7,), "rows": (50, 8), "experts": (3, 4, 8), "long_row": (2, 500), "scalar": (), "empty": (0, 8)}


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.standard_normal(shape), ml_dtypes.bfloat16) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("size", [64, 100, 2**12])
def test_uploads_equal_the_files_with_buffers_of_any_size(tmp_path, tensors, size):
    save_tensors(tmp_path / "model", tensors, 300)
    files = open_checkpoint(tmp_path / "model")
    names = list(SHAPES) * 5
    with UploadBuffers(2, size, partial(jnp.array, copy=True)) as buffers, ThreadPoolExecutor(4) as readers:
        uploaded = list(readers.map(partial(buffers.upload, files), names))
    for name, array in zip(names, uploaded, strict=True):
        assert isinstance(array, jax.Array)
        assert array.dtype == jnp.bfloat16
        np.testing.assert_array_equal(array, tensors[name])


def test_buffers_return_after_an_error(tmp_path, tensors):
    save_tensors(tmp_path / "model", {"rows": tensors["rows"]})
    files = open_checkpoint(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    whole = path.read_bytes()
    with UploadBuffers(1, 64, partial(jnp.array, copy=True)) as buffers:
        path.write_bytes(whole[:-100])
        with pytest.raises(ValueError, match=r"model.safetensors ended while it was read"):
            buffers.upload(files, "rows")
        path.write_bytes(whole)
        np.testing.assert_array_equal(buffers.upload(files, "rows"), tensors["rows"])
