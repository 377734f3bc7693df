"""Clips of audio: samples of WAV files, and their mel bands over time, as Gemma 4's feature extractor makes them."""

import io
import math
import wave
from functools import cache

import numpy as np
from jaxtyping import Float, Float32

MAX_SECONDS = 30
"""Longest clip; transformers cuts longer ones."""
FRAMES = 4
"""Frames of a token."""
FRAMES_PER_SECOND = 100
MAX_TOKENS = 750
"""Tokens of the longest clip."""
_RATE = 16_000
_RATES, _CHANNELS = range(1_000, 192_001), 8
"""Samples per second, and channels at most, that files may have."""
_FRAME, _HOP, _FFT = 320, 160, 512
"""Samples of a frame, between the beginnings of two, and of a Fourier transform."""
_FLOOR = 1e-3
"""Added to a band before its logarithm."""
_REMEDY = "convert it: ffmpeg -i FILE -ar 16000 -ac 1 -c:a pcm_s16le clip.wav"


def read_clip(data: bytes) -> Float32[np.ndarray, " samples"]:
    """Decode a WAV file of whole numbers to samples within ±1 at 16 kHz, the mean of its channels.

    Raises:
        ValueError: no such file, a damaged one, or one too long or too short.
    """
    try:
        with wave.open(io.BytesIO(data)) as file:
            channels, width, rate, count = file.getparams()[:4]
            stored = file.readframes(count)
    except (wave.Error, EOFError, RuntimeError) as error:  # the latter where a part's size is beyond the file
        raise ValueError(f"no WAV file of whole numbers ({str(error) or 'damaged'}): {_REMEDY}") from error
    if rate not in _RATES or width > 4 or channels > _CHANNELS:
        raise ValueError(f"{rate:,} samples per second, of {channels} times {8 * width} bits: {_REMEDY}")
    if len(stored) != count * channels * width:
        raise ValueError(f"a damaged clip: {count:,} samples are announced, and it has {len(stored):,} bytes of them")
    if count > MAX_SECONDS * rate:
        raise ValueError(f"{count / rate:.1f} seconds: at most {MAX_SECONDS} are heard: cut it into shorter clips")
    samples = _resampled(_whole_numbers(stored, width).reshape(-1, channels).mean(1), rate)
    if clip_frames(len(samples)) < 1:
        raise ValueError(f"{len(samples)} samples: at least {_FRAME - _HOP + 1} are heard, a hundredth of a second")
    return samples.astype(np.float32)


def _whole_numbers(stored: bytes, width: int) -> Float[np.ndarray, " values"]:
    """Return numbers of so many bytes within ±1."""
    if width == 1:
        return (np.frombuffer(stored, np.uint8) - 128.0) / 128
    places = np.zeros((len(stored) // width, 4), np.uint8)  # the largest places of 32 bits
    places[:, 4 - width :] = np.frombuffer(stored, np.uint8).reshape(-1, width)
    return places.view("<i4")[:, 0] / 2.0**31


def _resampled(samples: Float[np.ndarray, " samples"], rate: int) -> Float[np.ndarray, " samples"]:
    """Return samples at 16 kHz, whose spectrum is that of the given ones as far as it goes."""
    if rate == _RATE or not len(samples):
        return samples
    count = math.ceil(len(samples) * _RATE / rate)
    return np.fft.irfft(np.fft.rfft(samples), count) * (count / len(samples))


def clip_frames(samples: int) -> int:
    """Return the frames of so many samples: those whose samples, and the one behind, are all there."""
    return (samples - (_FRAME - _HOP + 1)) // _HOP + 1


def log_mel(samples: Float32[np.ndarray, " samples"], bands: int) -> Float32[np.ndarray, "frames bands"]:
    """Return the logarithms of a clip's mel bands in each frame; the first frame's middle is the first sample."""
    padded = np.concatenate([np.zeros(_FRAME - _HOP, np.float32), samples])
    frames = np.lib.stride_tricks.sliding_window_view(padded, _FRAME)[::_HOP][: clip_frames(len(samples))]
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_FRAME) / _FRAME)).astype(np.float32)
    magnitudes = np.abs(np.fft.rfft(frames * window, _FFT))
    return np.log(magnitudes @ _bands(bands) + _FLOOR).astype(np.float32)


@cache
def _bands(bands: int) -> Float[np.ndarray, "frequencies bands"]:
    """Return triangles over frequencies, whose corners are at equal distances in mel (HTK's)."""
    top = _RATE / 2
    corners = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + top / 700), bands + 2) / 2595) - 1)
    frequencies = np.linspace(0, top, _FFT // 2 + 1)[:, None]
    low, middle, high = corners[:-2], corners[1:-1], corners[2:]
    return np.maximum(0, np.minimum((frequencies - low) / (middle - low), (high - frequencies) / (high - middle)))
