"""Whatever a file, row or flag holds, it is read, or refused with a ValueError of one line: nothing else is raised."""

import contextlib
import copy
import functools
import io
import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("hypothesis", reason="needs hypothesis: pip install '.[test]'")
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save
from selection import repeats

from jaxglue.data.config import Source
from jaxglue.data.encode import Encoded, Encoder
from jaxglue.data.files import Row
from jaxglue.data.formats import ANSWER_KEYS as PREFERENCES
from jaxglue.data.formats import KEYS
from jaxglue.data.readers import read_rows
from jaxglue.files.json_file import MalformedJSONError
from jaxglue.hf.adapter import load_adapter
from jaxglue.hf.checkpoint import open_checkpoint, read_config
from jaxglue.models import config_from_hf
from jaxglue.models.config import DecoderConfig
from jaxglue.ops.rope import inverse_frequencies
from jaxglue.settings.config import every_field, groups
from jaxglue.settings.flags import parse_config
from jaxglue.settings.recipe import load_config
from jaxglue.training.config import TrainConfig

GOLDENS = Path(__file__).parent / "goldens"
FAMILIES = ("llama_yarn", "qwen3_window_bias", "qwen3_moe_mixed", "gpt_oss_mxfp4")
BOMB = 30_000
"""Nested brackets."""
fuzz = settings(
    max_examples=30,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

numbers = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(), st.sampled_from([0, 1, -1, 2**31, 1e300, 10**400, 1e-300, -0.0])
)
texts = st.one_of(
    st.text(max_size=20), st.sampled_from(["", "none", "nan", "\ud800", "\0", "a" * 5000, "{{", "<|im_end|>"])
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)


def changed(valid, keys=()):
    """Change a few values of a JSON object, at any depth, or drop them, or add keys."""
    paths = list(_paths(valid)) + [(key,) for key in keys]
    change = st.tuples(st.sampled_from(paths), st.one_of(st.just(...), values))
    return st.lists(change, min_size=1, max_size=3).map(lambda changes: _apply(valid, changes))


def _paths(value, path=()):
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths(inner, (*path, key))


def _apply(valid, changes):
    result = copy.deepcopy(valid)
    for (*path, key), value in changes:
        with contextlib.suppress(KeyError, IndexError, TypeError):  # an earlier change removed the place
            inner = result
            for step in path:
                inner = inner[step]
            if value is ...:
                del inner[key]
            else:
                inner[key] = value
    return result


def damaged(data: bytes):
    """Overwrite, cut or insert bytes at some places."""
    places = st.tuples(st.integers(0, len(data)), st.integers(0, 4), st.binary(max_size=4))
    return st.lists(places, min_size=1, max_size=3).map(lambda edits: _edit(data, edits))


def _edit(data, edits):
    for start, length, new in edits:
        data = data[:start] + new + data[start + length :]
    return data


def read(function, *arguments, **keywords):
    """Return the result, or None for a refusal in one line."""
    try:
        return function(*arguments, **keywords)
    except ValueError as error:
        text = str(error)
        assert text.strip() and len(text) < 20_000, text[:500]
        assert len(text.strip().splitlines()) == 1, text
        # A UnicodeError or JSONDecodeError would name no file.
        assert type(error) in (ValueError, MalformedJSONError), repr(error)
        return None


def bombs():
    return st.sampled_from(
        ["[" * BOMB, '{"a":' * BOMB, "[" * BOMB + "]" * BOMB, "[1" + ", 1" * 3, "-" * BOMB, "9" * 9999]
    )


# config.json


def decoder(folder):
    config = config_from_hf(read_config(folder))
    for how in ("nf4", "int8"):
        read(config.quantized, how)
    for rope in {config.rope, *(kind.rope for kind in config.layer_kinds if kind.rope is not None)}:
        frequencies, factor = inverse_frequencies(rope, config.head_dim)
        assert np.isfinite(np.asarray(frequencies)).all() and math.isfinite(factor)
    return config


ALL_FAMILIES = [*FAMILIES, *(path.stem for path in sorted((GOLDENS / "families").glob("*.safetensors")))]


def golden_config(family) -> dict:
    if (file := GOLDENS / family / "config.json").is_file():
        return json.loads(file.read_text())
    with safe_open(GOLDENS / "families" / f"{family}.safetensors", "numpy") as file:
        return json.loads(file.metadata()["config"])


@pytest.mark.parametrize("family", repeats(ALL_FAMILIES, "llama_yarn", *ALL_FAMILIES[len(FAMILIES) :]))
def test_config_json(family, tmp_path):
    valid = golden_config(family)

    @fuzz
    @given(changed(valid, ("rope_scaling", "quantization_config", "sliding_window", "torch_dtype", "head_dim")))
    def run(raw):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        config = read(decoder, tmp_path)
        assert config is None or isinstance(config, DecoderConfig)

    run()


@fuzz
@given(
    st.one_of(
        damaged((GOLDENS / "qwen3_moe/config.json").read_bytes()), bombs().map(str.encode), st.binary(max_size=50)
    )
)
def test_config_json_that_is_damaged(tmp_path, data):
    (tmp_path / "config.json").write_bytes(data)
    read(decoder, tmp_path)


# Recipes and flags

FIELDS = {
    group: [field.name for owner, field, _ in every_field(TrainConfig) if owner == group]
    for group in groups(TrainConfig)
}
names = st.one_of(st.sampled_from([name for group in FIELDS.values() for name in group]), texts)


def toml_value(value) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value)


tables = st.dictionaries(
    st.one_of(st.sampled_from([*FIELDS]), st.text(max_size=5)), st.dictionaries(names, values, max_size=4), max_size=4
)


def recipe_text(tables) -> str:
    blocks = [f"[{json.dumps(name)}]" for name in tables]
    lines = [[f"{json.dumps(key)} = {toml_value(value)}" for key, value in table.items()] for table in tables.values()]
    return "\n".join(line for block, rows in zip(blocks, lines, strict=True) for line in [block, *rows])


@pytest.mark.parametrize("suffix", ["toml", "yaml"])
def test_recipe(suffix, tmp_path):
    @fuzz
    @given(st.one_of(tables.map(recipe_text if suffix == "toml" else json.dumps), bombs(), st.text(max_size=50)))
    @example("a = " + "[" * BOMB)
    @example("a" + ".a" * BOMB + " = 1")
    @example(
        "a: &a [1]\n" + "".join(f"b{i}: &b{i} [{', '.join([f'*b{i - 1}' if i else '*a'] * 9)}]\n" for i in range(9))
    )
    def run(text):
        path = tmp_path / f"recipe.{suffix}"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        config = read(load_config, TrainConfig, path)
        assert config is None or isinstance(config, TrainConfig)

    run()


flags = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from([name for group in FIELDS.values() for name in group]).map(
                lambda name: "--" + name.replace("_", "-")
            ),
            st.one_of(
                texts, numbers.map(str), st.sampled_from(["none", "true", "auto", "nan", "inf", "-1", "0", "1e400"])
            ),
        ),
        st.tuples(texts),
    ),
    max_size=5,
).map(lambda parts: [part for pair in parts for part in pair])


@fuzz
@given(flags)
@example(["--config", "\0"])
@example(["--config", "."])
@example(["--config", "a" * 5000])
@example(["--mesh", "data=" + "9" * 5000])
def test_flags(argv):
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            config = parse_config(TrainConfig, ["--model", "m", "--data", "d", *argv])
        assert isinstance(config, TrainConfig)
    except SystemExit as stop:
        assert stop.code in (0, 2)
        assert stop.code == 0 or ": error: " in errors.getvalue()


# Rows

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is 1 plus 1?"}]},
    {"role": "assistant", "content": "Two.", "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "name": "add"},
    {"role": "assistant", "content": "Two.", "weight": 1, "train": True},
]
ROWS = {
    "messages": {"messages": CHAT, "tools": [{"type": "function", "function": {"name": "add"}}]},
    "conversations": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    "prompt_completion": {"prompt": CHAT[:2], "completion": [{"role": "assistant", "content": "Two."}]},
    "alpaca": {"instruction": "Add", "input": "1, 1", "output": "2"},
    "alpaca_chat": {"instruction": "Add", "input": "1, 1", "output": "2"},
    "question_answer": {"question": "1 + 1?", "answer": "2"},
    "segments": {"segments": [{"text": "1 + 1?", "label": False}, {"text": " Two.", "label": True}]},
    "text": {"text": "One and one is two."},
    "preference": {"prompt": CHAT[:2], "chosen": CHAT[4:], "rejected": [{"role": "assistant", "content": "Three."}]},
    "labeled": {"prompt": "1 + 1?", "completion": "2", "label": True},
}
NASTY = [
    *(None, "", " ", "\0", "\ud800", "\U000f0000", "\u202e\ufeff", "<|im_end|>", "[" * 99, "a" * 5000),
    *(10**400, -(2**63), 1e308, math.nan, -0.0, True, 0, 2, b"a"),
    *([], {}, [None], [[]], [{}], {"": ""}, {"role": "assistant"}, ["a", 1, None, {}], {"type": "text", "text": 1}),
    functools.reduce(lambda inner, _: [inner], range(60), []),
    functools.reduce(lambda inner, _: {"a": inner}, range(60), {}),
]
"""Values to put into every place of a row."""


@pytest.fixture
def check_row(make_tokenizer):
    """Return the check of a row of a format: it is encoded, or refused in one line."""

    def make(format):
        names = [(name, on) for name in ("plain", "marked") for on in ("assistant", "all")]
        encoders = [Encoder(make_tokenizer(name), format=format, loss_on=on) for name, on in names]

        def check(row):
            for encoder in encoders:
                encoded = read(encoder.encode, [Row("data.jsonl:1", row)])
                assert encoded is None or isinstance(encoded, Encoded)
                assert encoded is None or len(encoded.tokens) == len(encoded.mask) == encoded.lengths.sum()

        return check

    return make


@pytest.mark.parametrize("format", [*KEYS, *PREFERENCES])
def test_row(format, check_row):
    fuzz(given(changed(ROWS[format], ("weight", "tools", "train", "margin")))(check_row(format)))()


@pytest.mark.parametrize("format", [*KEYS, *PREFERENCES])
def test_row_with_a_nasty_value_in_every_place(format, check_row):
    check = check_row(format)
    for path in [*_paths(ROWS[format]), *((key,) for key in ("weight", "train", "tools", "margin"))]:
        for value in NASTY:
            check(_apply(ROWS[format], [(path, value)]))


JSONL = "".join(json.dumps(row) + "\n" for row in ROWS.values()).encode()
TABLE = b'instruction,input,output\nAdd,"1, 1",2\n"Say\n""hi""",,hi\n'


def parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([ROWS["alpaca"], ROWS["alpaca"]]), sink, row_group_size=1)
    return sink.getvalue().to_pybytes()


FILES = {
    "jsonl": JSONL,
    "json": b"[" + b",".join(JSONL.splitlines()) + b"]",
    "parquet": parquet(),
    "csv": TABLE,
    "tsv": TABLE.replace(b",", b"\t"),
    "jsonl.gz": pa.compress(JSONL, "gzip", asbytes=True),
    "csv.zst": pa.compress(TABLE, "zstd", asbytes=True),
}


@pytest.mark.parametrize("suffix", FILES)
def test_data_file(suffix, tmp_path):
    @fuzz
    @given(st.one_of(damaged(FILES[suffix]), damaged(JSONL), bombs().map(str.encode), st.binary(max_size=60)))
    def run(data):
        path = tmp_path / f"data.{suffix}"
        path.write_bytes(data)
        rows = read(lambda: list(read_rows(Source(name=str(path)))))
        assert rows is None or all(isinstance(row.value, dict) for row in rows)

    run()


# Adapters

ADAPTER = {
    **{f"base_model.model.model.layers.0.self_attn.q_proj.lora_{kind}.weight": np.ones(shape, np.float32)
       for kind, shape in (("A", (2, 8)), ("B", (8, 2)))},
}  # fmt: skip
EXPERTS = GOLDENS / "qwen3_moe_adapter"


def write_adapter(folder, config, tensors):
    (folder / "adapter_config.json").write_bytes(config)
    (folder / "adapter_model.safetensors").write_bytes(tensors)


def adapter(folder):
    found = load_adapter(folder)
    assert math.isfinite(found.config.alpha) and found.config.rank >= 1 and 0 <= found.config.dropout < 1
    assert all(np.isfinite(array).all() for array in found.tensors.values())


PEFT = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "lora_dropout": 0.1,
    "use_rslora": False,
    "init_lora_weights": True,
    "target_modules": ["q_proj"],
    "bias": "none",
}


@fuzz
@given(changed(PEFT, ("rank_pattern", "target_parameters", "modules_to_save")))
def test_adapter_config(tmp_path, raw):
    write_adapter(tmp_path, json.dumps(raw).encode(), save(ADAPTER))
    read(adapter, tmp_path)


@fuzz
@given(st.one_of(damaged(save(ADAPTER)), st.binary(max_size=60)))
@example(save({name: array * np.nan for name, array in ADAPTER.items()}))
@example((BOMB + 20).to_bytes(8, "little") + b'{"a":' + b"[" * BOMB)
def test_adapter_file(tmp_path, data):
    write_adapter(tmp_path, json.dumps(PEFT).encode(), data)
    read(adapter, tmp_path)


@fuzz
@given(
    st.one_of(
        changed({"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).map(
            json.dumps
        ),
        bombs(),
    )
)
def test_safetensors_index(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    (tmp_path / "model-1.safetensors").write_bytes(save(ADAPTER))
    read(open_checkpoint, tmp_path)
