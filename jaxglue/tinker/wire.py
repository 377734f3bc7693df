"""The few messages that the `tinker` SDK sends and reads as protocol buffers."""

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxglue.tinker.images import Chunks, ImageChunk

_DTYPES = {1: np.float32, 2: np.int64, 3: np.int32}
"""Numbers of the wire's types."""
_STOP, _LENGTH = 0, 1
_NO_LOG_PROB = -99999.0
"""Stands for the log-probability of no token, whose id is 0."""


class Datum(NamedTuple):
    """Tokens and images of a document, with arrays of numbers for its loss."""

    chunks: Chunks
    inputs: dict[str, np.ndarray]


class LossRequest(NamedTuple):
    """A request of losses, with their gradients unless it is of the forward pass alone."""

    model_id: str
    data: list[Datum]
    loss: str
    config: dict[str, float]
    forward_only: bool


def read_loss_request(body: bytes) -> LossRequest:
    """Read a forward-backward request.

    Raises:
        ValueError: a damaged message, or content other than text.
    """
    values: dict[str, Any] = {"model_id": "", "data": [], "loss": "", "config": {}, "forward_only": False}
    for number, value in _fields(body):
        if number in (1, 4):
            values["model_id" if number == 1 else "loss"] = _text(value)
        elif number == 3:
            values["data"].append(_datum(value))
        elif number == 5:
            entry = dict(_fields(value))
            values["config"][_text(entry.get(1))] = float(_numbers(entry.get(2, bytes(8)), np.float64, count=1)[0])
        elif number == 6:
            values["forward_only"] = bool(value)
    return LossRequest(**values)


def _datum(body: bytes) -> Datum:
    chunks, inputs = list[np.ndarray | ImageChunk](), {}
    for number, value in _fields(body):
        if number == 1:
            chunks.append(_chunk(value))
        elif number == 2:
            entry = dict(_fields(value))
            inputs[_text(entry.get(1))] = _tensor(entry.get(2, b""))
    return Datum(chunks, inputs)


def _chunk(body: bytes) -> np.ndarray | ImageChunk:
    parts = dict(_fields(body))
    if 1 in parts:
        return _numbers(dict(_fields(parts[1])).get(1, b""), np.int32)
    image = dict(_fields(parts.get(2, b"")))
    if 1 not in image or 4 in image:
        raise ValueError("model_input: expected chunks of encoded text, or images of their own size; sound is not read")
    return ImageChunk(_content(image[1]), image.get(3))


def _tensor(body: bytes) -> np.ndarray:
    parts = dict(_fields(body))
    if 2 in parts or parts.get(3) not in _DTYPES:
        raise ValueError("loss_fn_inputs: expected dense tensors of float32 or int64")
    return _numbers(parts.get(1, b""), _DTYPES[parts[3]])


def _numbers(value: Any, dtype: Any, count: int | None = None) -> np.ndarray:
    """Return a field's bytes as numbers; raise ValueError for others than whole ones, or than so many."""
    size, data = np.dtype(dtype).itemsize, _content(value)
    if len(data) % size or (count is not None and len(data) != count * size):
        raise ValueError("the request is no protocol buffer")
    return np.frombuffer(data, dtype)


def _text(value: Any) -> str:
    return _content(value).decode()


def _content(value: Any) -> bytes:
    """Return a field's bytes; raise ValueError for a number in their place, of which bytes() would be as many."""
    if not isinstance(value, bytes):
        raise ValueError("the request is no protocol buffer")
    return value


def _fields(body: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value): an int, or bytes of a fixed size or a length."""
    body, at = _content(body), 0
    while at < len(body):
        key, at = _varint(body, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(body, at)
            yield number, value
            continue
        if kind == 2:
            size, at = _varint(body, at)
        else:
            size = {1: 8, 5: 4}.get(kind, -1)
        if size < 0 or at + size > len(body):
            raise ValueError("the request is no protocol buffer")
        yield number, body[at : at + size]
        at += size


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(body) and shift < 70:
        byte = body[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("the request is no protocol buffer")


def loss_response(log_probs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Return a forward-backward output: the targets' log-probabilities of each document, and metrics."""
    sizes = np.cumsum([0, *(4 * len(each) for each in log_probs)]).astype(np.int64)
    data = b"".join(np.asarray(each, np.float32).tobytes() for each in log_probs)
    tensor = _bytes(1, data) + _bytes(2, sizes.tobytes()) + _number(3, 1)
    record = _bytes(2, _bytes(1, b"logprobs") + _bytes(2, tensor)) + _number(3, len(log_probs))
    entries = b"".join(
        _bytes(3, _bytes(1, name.encode()) + b"\x11" + struct.pack("<d", value)) for name, value in metrics.items()
    )
    return _bytes(1, b"ArrayRecord") + _bytes(2, record) + entries


def sample_response(
    answers: Sequence[tuple[np.ndarray, np.ndarray, bool]],
    prompt: np.ndarray | None = None,
    likely: tuple[np.ndarray, np.ndarray] | None = None,
) -> bytes:
    """Return sampled answers.

    Args:
        answers: tokens, log-probabilities and whether it ended, of each.
        prompt: log-probabilities of the prompt's tokens, NaN for those that have none; None where not asked for.
        likely: the likeliest tokens in place of the prompt's, [tokens, k], and their log-probabilities, NaN for those
            that have none.
    """
    body = b""
    for tokens, log_probs, ended in answers:
        arrays = _bytes(2, np.asarray(tokens, np.int32).tobytes()) + _bytes(
            3, np.asarray(log_probs, np.float32).tobytes()
        )
        body += _bytes(1, _number(1, _STOP if ended else _LENGTH) + arrays)
    if prompt is not None:
        body += _bytes(2, np.asarray(prompt, np.float32).tobytes())
    if likely is not None:
        ids, log_probs = np.asarray(likely[0], np.int32), np.nan_to_num(likely[1], nan=_NO_LOG_PROB)
        parts = _bytes(1, ids.tobytes()) + _bytes(2, np.asarray(log_probs, np.float32).tobytes())
        body += _bytes(3, parts + _number(3, ids.shape[1]) + _number(4, ids.shape[0]))
    return body


def _bytes(number: int, value: bytes) -> bytes:
    return _packed(number << 3 | 2) + _packed(len(value)) + value


def _number(number: int, value: int) -> bytes:
    return _packed(number << 3) + _packed(value)


def _packed(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out + bytes([value]))
