"""NEFTune's noise on the embeddings of packed documents."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxglue.models.noise import add_noise
from jaxglue.ops.segments import pack_segments

SEGMENTS, D = pack_segments([[4, 9], [16]], seq_len=16), 64
ZEROS = jnp.zeros((2, 16, D))


def test_noise_is_scaled_by_each_documents_length():
    noise = np.abs(add_noise(ZEROS, SEGMENTS, 5.0, jax.random.key(1)))
    for row, part, length in ((0, slice(0, 4), 4), (0, slice(4, 13), 9), (1, slice(0, 16), 16)):
        bound = 5 / np.sqrt(length * D)
        assert 0.9 * bound < noise[row, part].max() <= bound
        assert abs(noise[row, part].mean() / bound - 0.5) < 0.1  # uniform
    assert not noise[0, 13:].any()  # padding


def test_noise_follows_from_its_key_and_keeps_the_dtype():
    one, again, other = (add_noise(ZEROS, SEGMENTS, 5.0, jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 0.01
    assert add_noise(ZEROS.astype(jnp.bfloat16), SEGMENTS, 5.0, jax.random.key(1)).dtype == jnp.bfloat16
