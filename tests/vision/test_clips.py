"""Clips of audio as transformers' feature extractor reads them, and as strangers send them."""

import io
import sys
import wave
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hearing import wav
from safetensors.numpy import load_file

from jaxglue.vision.clips import clip_frames, log_mel, read_clip

GOLDENS = Path(__file__).parents[1] / "goldens"
sys.path.append(str(GOLDENS))
from drawn import samples  # noqa: E402

TONE = 0.5 * np.sin(2 * np.pi * 440 * np.arange(4800) / 48_000)


def test_frames_are_those_of_transformers():
    clip = samples(1000)
    expected = load_file(GOLDENS / "audio.safetensors")["mel"]
    read = read_clip(wav(clip * 32768 / 32767))
    np.testing.assert_array_equal(read, clip)
    np.testing.assert_allclose(log_mel(read, 128), expected, rtol=0, atol=1e-6)
    assert [clip_frames(count) for count in (160, 161, 320, 321, 480_000)] == [0, 1, 1, 2, 2999]


@pytest.mark.parametrize(("width", "channels"), [(1, 1), (2, 2), (3, 1), (4, 2)])
def test_files_of_any_width_and_rate_sound_alike(width, channels):
    found = read_clip(wav(TONE, rate=48_000, width=width, channels=channels))
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(1600) / 16_000)
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.02 if width == 1 else 1e-3)


def floats():
    """A WAV file of float32, which the standard library writes no header of."""
    data = bytearray(wav(np.zeros(2000), width=4))
    data[20:22] = (3).to_bytes(2, "little")
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"ID3" + bytes(100), r"no WAV file of whole numbers .*: convert it: ffmpeg -i FILE -ar 16000 -ac 1"),
        (floats(), "no WAV file of whole numbers .*: convert it"),
        (b"", "no WAV file"),
        (wav(TONE)[:-100], "a damaged clip: 4,800 samples are announced, and it has 9,500 bytes of them"),
        (wav(np.zeros(31 * 8000), rate=8000), "31.0 seconds: at most 30 are heard: cut it into shorter clips"),
        (wav(np.zeros(160)), "160 samples: at least 161 are heard"),
        (wav(np.zeros(500), rate=10), "10 samples per second, of 1 times 16 bits: convert it"),
    ],
)
def test_clips_that_cannot_be_heard_are_refused_with_the_remedy(data, message):
    with pytest.raises(ValueError, match=message):
        read_clip(data)


def test_damaged_headers_are_refused_or_read():
    rng, whole = np.random.default_rng(0), wav(TONE[:400])
    for _ in range(400):
        data = bytearray(whole)
        data[rng.integers(44)] = rng.integers(256)
        data[rng.integers(44)] = rng.integers(256)
        with suppress(ValueError):
            assert np.abs(read_clip(bytes(data))).max() < 2


def test_a_header_of_more_samples_than_there_are_takes_no_memory():
    with wave.open(file := io.BytesIO(), "wb") as target:
        target.setparams((1, 2, 16_000, 2**30, "NONE", ""))
        target.writeframesraw(bytes(400))
        data = file.getvalue()
    with pytest.raises(ValueError, match="a damaged clip"):
        read_clip(data)
