"""Fitted constants: each has its record, and all are in one file."""

import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxglue.planner import calibration
from jaxglue.planner.calibration import Fitted
from jaxglue.planner.gpus import find_gpu

ROOT = Path(__file__).parents[2]


def records(value: Any) -> Iterator[Any]:
    """Yield the numbers in a constant."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple):
        for each in value:
            yield from records(each)
    elif isinstance(value, float):
        yield value


CONSTANTS = {
    name: list(records(value)) for name, value in vars(calibration).items() if name.isupper() and name[0] != "_"
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_tells_its_unit_gpu_and_measurement(name):
    assert CONSTANTS[name]
    for number in CONSTANTS[name]:
        assert isinstance(number, Fitted) and number > 0
        assert all((number.unit, number.gpu, number.method))
        for path in re.findall(r"(?:benchmarks|docs)/\S+?\.\w+", number.method):
            assert (ROOT / path).exists(), path


def test_every_constant_is_used():
    modules = (ROOT / "jaxglue").rglob("*.py")
    text = "".join(path.read_text() for path in modules if path.name != "calibration.py")
    assert not [name for name in CONSTANTS if not re.search(rf"\b{name}\b", text)]


def test_records_are_kept_where_a_gpu_is_sent_to_another_process():
    gpu = find_gpu("H100")
    assert pickle.loads(pickle.dumps(gpu)) == gpu
    assert pickle.loads(pickle.dumps(calibration.FP8_GAIN)).method == calibration.FP8_GAIN.method
