"""Messages of the `tinker` SDK, read and written without its library."""

import struct

import numpy as np
import pytest

from jaxglue.tinker.wire import _bytes, _number, loss_response, read_loss_request, sample_response


def tensor(values, dtype, number):
    return _bytes(1, np.asarray(values, dtype).tobytes()) + _number(3, number)


def loss_request(model, documents, loss, config=None, *, forward_only=False):
    """Return a request of documents: (tokens, arrays by name)."""
    body = _bytes(1, model.encode()) + _number(2, 7) + _bytes(4, loss.encode())
    for tokens, arrays in documents:
        chunk = _bytes(1, _bytes(1, np.asarray(tokens, np.int32).tobytes()))
        datum = _bytes(1, chunk)
        for name, values in arrays.items():
            kind = (np.int64, 2) if name == "target_tokens" else (np.float32, 1)
            datum += _bytes(2, _bytes(1, name.encode()) + _bytes(2, tensor(values, *kind)))
        body += _bytes(3, datum)
    for name, value in (config or {}).items():
        body += _bytes(5, _bytes(1, name.encode()) + b"\x11" + struct.pack("<d", value))
    return body + (_number(6, 1) if forward_only else b"")


def test_a_request_is_read():
    documents = [([1, 2, 300], {"target_tokens": [2, 300, 5], "weights": [0, 1, 0.5]}), ([9], {"target_tokens": [3]})]
    found = read_loss_request(loss_request("m", documents, "ppo", {"clip": 0.8}, forward_only=True))
    assert (found.model_id, found.loss, found.config, found.forward_only) == ("m", "ppo", {"clip": 0.8}, True)
    assert [[chunk.tolist() for chunk in datum.chunks] for datum in found.data] == [[[1, 2, 300]], [[9]]]
    assert found.data[0].inputs["target_tokens"].tolist() == [2, 300, 5]
    assert found.data[0].inputs["weights"].tolist() == [0, 1, 0.5]


@pytest.mark.parametrize(
    "body",
    [
        *(b"\x0a\x05ab", b"\xff" * 12, b"\x0b", b"\x08\xff\xff\xff\xff\x7f", b"\x18\x05"),
        *(_bytes(5, _bytes(1, b"clip") + _bytes(2, b"abc")), _bytes(5, b""), _bytes(3, _bytes(2, b""))),
        _bytes(3, _bytes(1, _bytes(1, _bytes(1, b"abc")))),
    ],
)
def test_other_bytes_are_refused(body):
    with pytest.raises(ValueError, match=r"no protocol buffer|dense tensors"):
        read_loss_request(body)


def test_the_sdk_reads_our_answers():
    conversion = pytest.importorskip("tinker.proto.response_conv")
    answers = [(np.array([1, 2]), np.array([-0.5, -1.0]), True), (np.array([3]), np.array([-2.0]), False)]
    found = conversion.deserialize_sample_response(sample_response(answers))
    assert [each.tokens for each in found.sequences] == [[1, 2], [3]]
    assert [each.stop_reason for each in found.sequences] == ["stop", "length"]
    loss = conversion.deserialize_forward_backward_output(loss_response([np.ones(2), np.zeros(3)], {"loss:sum": 1.5}))
    assert loss.metrics == {"loss:sum": 1.5}
    assert [each["logprobs"].data for each in loss.loss_fn_outputs] == [[1, 1], [0, 0, 0]]
