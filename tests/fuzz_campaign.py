"""Bad inputs by the thousand: each must be refused in one line, soon, in little memory, and never be taken.

    JAX_PLATFORMS=cpu python tests/fuzz_campaign.py --seed 1 --count 1500

Every input is bad by construction: a valid one with a value of a wrong type, out of its range or misspelled, with a
part that is missing, or with damaged bytes. `test_fuzz_campaign.py` runs a few.
"""

import argparse
import contextlib
import copy
import importlib
import io
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save

import jaxglue
from jaxglue.commands import COMMANDS
from jaxglue.data.config import Source
from jaxglue.data.encode import Encoder
from jaxglue.data.files import Row
from jaxglue.data.readers import read_rows
from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.hf.adapter import load_adapter
from jaxglue.hf.adapter_check import check_adapter
from jaxglue.hf.checkpoint import read_config, save_tensors
from jaxglue.hf.loading import random_model
from jaxglue.models import abstract_model, config_from_hf
from jaxglue.models.lora import base_shapes
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.settings.config import Kind, every_field, groups
from jaxglue.settings.flags import parse_config
from jaxglue.settings.recipe import load_config
from jaxglue.training.config import TrainConfig
from jaxglue.training.workload import base_identity

GIB = 2**30
CPU_SECONDS, WALL_SECONDS, MEMORY = 20, 300, 3 * GIB
"""Limits of one input; the wall's is for waits, on a busy machine."""
QUICKSTART = Path(jaxglue.__file__).parent / "recipes/quickstart/model"
Case = tuple[str, Callable[[], object]]
"""What is wrong, and the reading of it, which must raise."""


class Fault(NamedTuple):
    """An input that was not refused as it should be."""

    subject: str
    number: int
    kind: str
    """traceback, hang, silent, or memory."""
    what: str
    text: str


class HangError(BaseException):
    """Too much time has passed; nothing catches it."""


class RefusedError(Exception):
    """A refusal that came as an answer, such as HTTP's."""


def attempt(read: Callable[[], object]) -> tuple[str, str] | None:
    """Return what went wrong as (kind, text) with an input; None if it was refused in one line."""

    def stop(*_: object) -> None:
        raise HangError

    for number, timer, seconds in (
        (signal.SIGPROF, signal.ITIMER_PROF, CPU_SECONDS),
        (signal.SIGALRM, signal.ITIMER_REAL, WALL_SECONDS),
    ):
        signal.signal(number, stop)
        signal.setitimer(timer, seconds)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            read()
        return "silent", ""
    except (ValueError, OSError, RefusedError) as error:
        text = str(error).strip()
        is_line = text and len(text) < 20_000 and (len(text.splitlines()) == 1 or isinstance(error, RefusedError))
        is_plain = not isinstance(error, UnicodeError | json.JSONDecodeError)
        return None if is_line and is_plain else ("traceback", f"{type(error).__name__}: {text[:300]!r}")
    except SystemExit as end:
        is_told = end.code in (1, 2) and "error: " in errors.getvalue()
        return None if is_told else ("traceback", f"exit {end.code}: {errors.getvalue()[-300:]}")
    except MemoryError:
        return "memory", "MemoryError"
    except HangError:
        return "hang", traceback.format_exc()[-600:]
    except BaseException:
        return "traceback", traceback.format_exc()[-600:]
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)


def run(subjects: dict[str, Callable[[random.Random], Case]], seed: int, count: int) -> Iterator[Fault]:
    """Try `count` inputs of the subjects in turn; yield the faults."""
    names = list(subjects)
    for number in range(count):
        subject = names[number % len(names)]
        what, read = subjects[subject](random.Random(f"{seed} {subject} {number}"))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if found := attempt(read):
            yield Fault(subject, number, *found[:1], what[:500], found[1])
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if after - before > MEMORY:  # the process may be large already, as one of many tests is
            yield Fault(subject, number, "memory", what[:500], f"{(after - before) / GIB:.1f} GiB")


# Values


def wrong_value(rng: random.Random, kind: Kind) -> Any:
    """Return a value of another type than the field's, outside its range, or none of its choices."""
    table, nested = {"a": 1}, [[1], [2]]
    if kind.scalar is bool:
        return rng.choice(["maybe", 3, table, 0.5, [[True]]])
    if kind.scalar in (int, float):
        values: list[Any] = ["fast", "1x", table, nested, float("nan"), "", "0x10"]
        values += [1.5, 1e-9] if kind.scalar is int else [float("inf")]
        return rng.choice(values)
    return rng.choice([table, nested, *(["nonsense", "Nonsense "] if kind.choices else [])])


def misspelled(rng: random.Random, name: str) -> str:
    """Return a name with another letter in it."""
    place = rng.randrange(len(name))
    return f"{name[:place]}{rng.choice('qxzj')}{name[place:]}_"


def damaged(rng: random.Random, text: str) -> bytes:
    """Return JSON or TOML that ends early, or has a byte that no text of UTF-8 has."""
    data = text.encode()
    place = rng.randrange(1, len(data) - 1)
    return data[:place] + b"\xff\xfe" + data[place:] if rng.random() < 0.5 else data[: data.rindex(b'"')]


# Recipes and flags

FIELDS = [(group, field.name, kind) for group, field, kind in every_field(TrainConfig)]
FOREIGN = {
    "base_model": "m",
    "learning_rate": 1e-4,
    "adapter": "lora",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.1,
    "micro_batch_size": 2,
    "num_epochs": 1,
    "sequence_len": 512,
    "warmup_ratio": 0.1,
    "val_set_size": 0.1,
    "datasets": [{"path": "rows.jsonl", "type": "chat_template"}],
}


def recipes(folder: Path) -> Callable[[random.Random], Case]:
    """Return the maker of bad recipes: ours in TOML, and another program's in YAML."""

    def make(rng: random.Random) -> Case:
        how = rng.choice(["value", "value", "name", "group", "bytes", "foreign name", "foreign value"])
        path = folder / ("recipe.yml" if how.startswith("foreign") else "recipe.toml")
        tables: dict[str, Any] = {"model": {"model": "m"}, "data": {"data": ["rows.jsonl"]}}
        group, name, kind = rng.choice(FIELDS)
        if how.startswith("foreign"):
            settings: dict[str, Any] = dict(FOREIGN)
            key = rng.choice(list(settings))
            if how == "foreign name":
                settings[misspelled(rng, key)] = rng.choice([3, "x", [1]])
            else:
                settings[key] = rng.choice([{"a": 1}, [[1]], [{"b": 2}]])
            data = json.dumps(settings).encode()
        else:
            if how == "value":
                tables.setdefault(group, {})[name] = wrong_value(rng, kind)
            elif how == "name":
                tables.setdefault(group, {})[misspelled(rng, name)] = 1
            elif how == "group":
                tables[misspelled(rng, group)] = {name: 1}
            text = "\n".join(
                f"[{group}]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in table.items())
                for group, table in tables.items()
            )
            data = damaged(rng, text) if how == "bytes" else text.encode()
        path.write_bytes(data)
        return f"{how}: {data!r}", lambda: load_config(TrainConfig, path)

    return make


def toml(value: Any) -> str:
    """Write a value in TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value).replace("NaN", "nan").replace("Infinity", "inf")


def flags(_: Path) -> Callable[[random.Random], Case]:
    """Return the maker of bad command lines of every command."""
    classes = {}
    for name, command in COMMANDS.items():
        if command.config is not None:
            module, _, attribute = command.config.partition(":")
            classes[name] = getattr(importlib.import_module(module), attribute)
    fields = {
        name: [(field.name, kind) for _, field, kind in every_field(cls)]
        for name, cls in classes.items()
        if groups(cls)
    }

    def make(rng: random.Random) -> Case:
        command = rng.choice(list(fields))
        name, kind = rng.choice(fields[command])
        flag = "--" + name.replace("_", "-")
        wrong = {bool: ["maybe", "2"], int: ["ten", "1.5", "nan", ""], float: ["fast", "nan", "inf", ""]}
        texts = ["nonsense"] if kind.choices else wrong.get(kind.scalar)
        required = ["--model", str(QUICKSTART), "--data", "rows.jsonl"]
        if texts is None or rng.random() < 0.3:
            argv = [rng.choice(["--" + misspelled(rng, name).replace("_", "-"), "stray", "-z"]), *required]
        else:
            argv = [*required, flag, rng.choice(texts)]
        return f"{command} {argv}", lambda: parse_config(classes[command], argv, command=command)

    return make


# Rows

CHAT = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "Two."}]
ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": CHAT},
    "conversations": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    "prompt_completion": {"prompt": "1 + 1?", "completion": "Two."},
    "alpaca": {"instruction": "Add", "input": "1, 1", "output": "2"},
    "question_answer": {"question": "1 + 1?", "answer": "2"},
    "segments": {"segments": [{"text": "1 + 1?", "label": False}, {"text": " Two.", "label": True}]},
    "text": {"text": "One and one is two."},
    "preference": {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [{"role": "assistant", "content": "Three."}]},
    "labeled": {"prompt": "1 + 1?", "completion": "2", "label": True},
}
"""A row of each format; `input` alone may be left out."""


def rows(folder: Path) -> Callable[[random.Random], Case]:
    """Return the maker of bad rows of every format, and of damaged files."""
    tokenizer = load_tokenizer(QUICKSTART)
    encoders = {name: Encoder(tokenizer, format=name, loss_on="assistant") for name in ROWS}

    def make(rng: random.Random) -> Case:
        name = rng.choice(list(ROWS))
        row = copy.deepcopy(ROWS[name])
        keys = [key for key in row if key != "input"]
        how = rng.choice(["missing", "type", "item", "surrogate", "file"])
        if how == "file":
            path = folder / "rows.jsonl"
            lines = [json.dumps(row)] * 5
            data = damaged(rng, "\n".join(lines)) if rng.random() < 0.7 else b"[" * rng.randrange(100, 50_000)
            path.write_bytes(data)
            return f"file: {data[:200]!r}", lambda: list(read_rows(Source(name=str(path))))
        key = rng.choice(keys)
        if how == "missing":
            del row[key]
        elif how == "type" or isinstance(row[key], bool):
            row[key] = rng.choice([7, 1.5, [3], {"a": 1}, [[]], [None], "maybe" if key == "label" else 3])
        elif isinstance(row[key], str):
            row[key] = "a\ud800b" if how == "surrogate" else rng.choice([{}, [], [1, 2]])
        else:
            item = rng.choice(row[key])
            part = rng.choice(list(item))
            if how == "surrogate":
                item[part] = "a\ud800b"
            else:
                item[part] = {"label": "maybe", "role": "narrator", "from": "narrator"}.get(part, rng.choice([7, {}]))
        return f"{name} {how}: {row!r}", lambda: encoders[name].encode([Row("data.jsonl:1", row)])

    return make


# Models and adapters


def architectures(folder: Path) -> Callable[[random.Random], Case]:
    """Return the maker of bad config.json files of the families of the goldens."""
    from test_fuzz import ALL_FAMILIES, golden_config

    configs = {family: golden_config(family) for family in ALL_FAMILIES}

    def make(rng: random.Random) -> Case:
        family = rng.choice(list(configs))
        config = copy.deepcopy(configs[family])
        table = config.get("text_config", config)
        sizes = [
            key for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size") if key in table
        ]
        how = rng.choice(["missing", "size", "size", "type", "rope", "activation", "bytes"])
        if how == "missing":
            del table[rng.choice(sizes)]
        elif how == "size":
            table[rng.choice(sizes)] = rng.choice([0, -4, 1.5, "64", [64], True, 10**30, float("nan"), {}])
        elif how == "type":
            config["model_type"] = rng.choice(["nonsense", 7, ["llama"], "", {"a": 1}])
        elif how == "rope":
            table["rope_parameters"] = table["rope_scaling"] = rng.choice(
                [{"rope_type": "nonsense"}, 7, ["yarn"], {"rope_type": "linear", "factor": "x"}, {"rope_type": 3}]
            )
        elif how == "activation":
            names = [key for key in table if key.endswith(("hidden_act", "hidden_activation"))] or ["hidden_act"]
            for key in names:
                table[key] = rng.choice(["nonsense", 7, ["silu"], {"silu": 1}])
        data = damaged(rng, json.dumps(config)) if how == "bytes" else json.dumps(config).encode()
        (folder / "config.json").write_bytes(data)
        return f"{family} {how}: {data!r}", lambda: config_from_hf(read_config(folder))

    return make


PEFT = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "lora_dropout": 0.1, "target_modules": ["q_proj"], "bias": "none"}


def adapters(folder: Path) -> Callable[[random.Random], Case]:
    """Return the maker of bad adapters of the quickstart's model."""
    config = config_from_hf(read_config(QUICKSTART))
    shapes_of_base = base_shapes(abstract_model(config))
    identity = base_identity(config, QUICKSTART, 0)
    layers, size = config.num_hidden_layers, config.hidden_size
    out = config.num_attention_heads * config.head_dim
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": (2, size), "B": (out, 2)}
    tensors = {name.format(i, ab): np.ones(shapes[ab], np.float32) for i in range(layers) for ab in "AB"}

    def make(rng: random.Random) -> Case:
        peft, arrays = dict(PEFT), dict(tensors)
        key = rng.choice(sorted(arrays))
        how = rng.choice(["setting", "setting", "missing", "shape", "value", "dtype", "name", "bytes"])
        if how == "setting":
            field, values = rng.choice(
                [
                    ("r", [0, -1, 1.5, "x", None, 2**70, [2]]),
                    ("lora_alpha", ["x", float("nan"), [4], {}]),
                    ("lora_dropout", ["x", 1.5, -1, float("nan"), [0.1]]),
                    ("target_modules", [7, [7], {"a": 1}, ["nothing_proj"]]),
                    ("peft_type", ["IA3", 7, None]),
                    ("bias", ["all", 7]),
                ]
            )
            peft[field] = rng.choice(values)
        elif how == "missing":
            del arrays[key]
        elif how == "shape":
            arrays[key] = np.ones(rng.choice([(3, size), (2,), (2, size, 1), (out, 3), (0, size)]), np.float32)
        elif how == "value":
            arrays[key] = np.full_like(arrays[key], rng.choice([np.nan, np.inf, -np.inf]))
        elif how == "dtype":
            arrays[key] = arrays[key].astype(rng.choice([np.int32, np.int8, np.bool_]))
        elif how == "name":
            arrays[misspelled(rng, key)] = arrays.pop(key)
        data = save(arrays)
        if how == "bytes":
            data = rng.choice([data[: rng.randrange(len(data))], rng.randbytes(8) + data[8:], b""])
        (folder / "adapter_config.json").write_text(json.dumps(peft))
        (folder / "adapter_model.safetensors").write_bytes(data)
        changed = peft if how == "setting" else key

        def read() -> None:
            check_adapter(load_adapter(folder), shapes_of_base, identity, "base")

        return f"{how}: {changed}", read

    return make


def small_model(folder: Path) -> Path:
    """Write a model of one layer with the quickstart's tokenizer."""
    raw = json.loads((QUICKSTART / "config.json").read_text())
    raw |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model = random_model(config_from_hf(raw), dtype=jnp.float32, seed=5)
    save_tensors(folder, flatten_names(split_model(model, nnx.Param)[1]))
    (folder / "config.json").write_text(json.dumps(raw))
    for path in QUICKSTART.iterdir():
        if path.name != "config.json":
            shutil.copy(path, folder)
    return folder


def gguf(folder: Path) -> Callable[[random.Random], Case]:
    """Return the maker of folders that no file for llama.cpp can be made of."""
    model, output = small_model(folder / "model"), folder / "made"
    (weights,) = model.glob("*.safetensors")
    files = {path.name: path.read_bytes() for path in model.iterdir()}

    def make(rng: random.Random) -> Case:
        for name, data in files.items():
            (model / name).write_bytes(data)
        how = rng.choice(["type", "tokenizer", "weights", "config", "imatrix"])
        settings: dict[str, Any] = {"model": str(model), "gguf": "q8_0", "output": str(output)}
        if how == "type":
            settings["gguf"] = rng.choice(["q9_k", "", 7, "f128", ["q8_0", "nonsense"], {"a": 1}])
        elif how == "tokenizer":
            tokenizer = json.loads(files["tokenizer.json"])
            part = rng.choice(["model", "vocab", "merges", "bytes", "gone"])
            if part == "model":
                tokenizer["model"] = rng.choice([None, 7, {"type": "nonsense"}])
            elif part == "vocab":
                tokenizer["model"]["vocab"] = rng.choice([{"a": "b"}, [1], None, 7])
            elif part == "merges":
                tokenizer["model"]["merges"] = rng.choice([[["a"]], 7, [1, 2], [["no", "such"]]])
            text = json.dumps(tokenizer)
            (model / "tokenizer.json").write_bytes(damaged(rng, text) if part == "bytes" else text.encode())
            if part == "gone":
                (model / "tokenizer.json").unlink()
        elif how == "weights":
            data = files[weights.name]
            weights.write_bytes(rng.choice([data[: rng.randrange(len(data) - 1)], b"", rng.randbytes(8) + data[8:]]))
        elif how == "config":
            (model / "config.json").write_bytes(damaged(rng, files["config.json"].decode()))
        else:
            settings |= {"gguf": "q4_k_m", "imatrix": rng.choice([str(folder / "nowhere.jsonl"), "", 7])}

        def read() -> None:
            try:
                jaxglue.export(**settings)
            finally:
                if output.exists() and any(output.iterdir()):
                    shutil.rmtree(output)
                    raise AssertionError("a refused export left files")

        return f"{how}: {settings}", read

    return make


# Servers


def serve(folder: Path) -> Callable[[random.Random], Case]:
    """Return the maker of bad requests to the server of a small model."""
    from local_client import TestClient

    from jaxglue.generation.assistant import Assistant
    from jaxglue.serve.config import ServeConfig
    from jaxglue.serve.server import make_app
    from jaxglue.serve.service import Service

    config = ServeConfig(model=str(small_model(folder / "served")), name="tiny")
    assistant = Assistant(config)
    client = TestClient(make_app(assistant, Service(assistant, slots=2, length=64, most=8), config))
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    numbers = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "seed", "n")

    def make(rng: random.Random) -> Case:
        path = rng.choice(["/v1/chat/completions", "/v1/completions"])
        is_chat = path.endswith("chat/completions")
        body: dict[str, Any] = {"model": "tiny", "max_tokens": 2, **(chat if is_chat else {"prompt": "Hello"})}
        how = rng.choice(["number", "input", "grammar", "other", "bytes"])
        if how == "number":
            body[rng.choice(numbers)] = rng.choice(["fast", [1], {"a": 1}, -(10**30), 10**30, "1x", -(2.0**70)])
        elif how == "input":
            wrong = [7, {}, [], None, [None], [7.5], [{"a": 1}], "a\ud800b"]
            if is_chat:
                wrong += [[{"role": "narrator", "content": "Hi"}], [{"role": "user", "content": 7}], [{"role": "user"}]]
            body["messages" if is_chat else "prompt"] = rng.choice(wrong)
        elif how == "grammar":
            body |= rng.choice(
                [
                    {"guided_regex": "(" * rng.randrange(1, 9999)},
                    {"guided_regex": 7},
                    {"guided_choice": []},
                    {"guided_choice": [7]},
                    {"guided_json": "{"},
                    {"guided_grammar": "start: nonsense"},
                    {"response_format": {"type": "nonsense"}},
                    {"response_format": 7},
                ]
            )
        elif how == "other":
            body |= rng.choice(
                [
                    {"stop": 7},
                    {"stop": ["x"] * 999},
                    {"stop": [7]},
                    {"stream": "maybe"},
                    {"logit_bias": {"x": 1}},
                    {"logit_bias": 7},
                    {"max_tokens": "two"},
                    {"max_tokens": -1},
                    {"model": 7},
                    {"model": "another"},
                    {"stop_token_ids": ["x"]},
                    {"temperatre": 1},
                ]
            )
        data = json.dumps(body).encode()
        data = damaged(rng, data.decode()) if how == "bytes" else data
        return f"{path} {data[:400]!r}", lambda: refused(client.post(path, content=data))

    return make


def refused(response: Any) -> None:
    """Raise RefusedError with the message of an answer of status 400–499; AssertionError for one above."""
    assert response.status_code < 500, f"status {response.status_code}: {response.text[:300]}"
    if response.status_code >= 400:
        message = response.json()
        while isinstance(message, dict):
            message = message.get("error", message.get("message", message.get("detail", "")))
        raise RefusedError(message)


def tinker(folder: Path) -> Callable[[random.Random], Case]:
    """Return the maker of bad requests to the server of the `tinker` SDK."""
    from local_client import TestClient

    from jaxglue.tinker.server import TinkerServer

    model = str(small_model(folder / "tinker"))
    server = TinkerServer(
        api_key="tml-test", model=model, dtype="float32", seq_len=64, compilation_cache=None, cache_dir=str(folder)
    )
    client = TestClient(server.app, headers={"X-API-Key": "tml-test"})
    create = {"session_id": "s", "base_model": model, "lora_config": {"rank": 2, "train_unembed": False}}
    made = client.post("/api/v1/create_model", json=create).json()
    name = client.post("/api/v1/retrieve_future", json=made).json()["model_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    adam = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    valid: dict[str, dict[str, Any]] = {
        "create_model": create,
        "optim_step": {"model_id": name, "adam_params": adam},
        "save_weights": {"model_id": name, "path": "a"},
        "load_weights": {"model_id": name, "path": "tinker://nowhere/a"},
        "asample": {"base_model": model, "prompt": prompt, "num_samples": 1, "sampling_params": {"max_tokens": 2}},
        "unload_model": {"model_id": "nobody"},
        "retrieve_future": {"request_id": "nothing"},
    }
    wrong: dict[str, list[dict[str, Any]]] = {
        "create_model": [
            {"base_model": 7},
            {"base_model": "nothing"},
            *({"lora_config": {"rank": rank, "train_unembed": False}} for rank in (0, -1, 1.5, "x", 10**9)),
            {"lora_config": 7},
        ],
        "optim_step": [
            {"model_id": 7},
            {"model_id": "nobody"},
            {"adam_params": 7},
            *({"adam_params": adam | {key: value}} for key in adam for value in ("x", [1], float("nan"), -1)),
        ],
        "save_weights": [{"path": path} for path in ("../a", "a/b", "", 7, "a" * 999, "\0")],
        "load_weights": [{"path": path} for path in ("../a", 7, "", "tinker://../../etc", None)] + [{}],
        "asample": [
            {"prompt": 7},
            {"prompt": {"chunks": []}},
            {"prompt": {"chunks": [{"type": "image"}]}},
            {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [10**9]}]}},
            {"prompt": {"chunks": [{"type": "encoded_text", "tokens": ["x"]}]}},
            {"num_samples": "x"},
            {"num_samples": 10**9},
            {"num_samples": 0},
            *({"sampling_params": {"max_tokens": n}} for n in ("x", -1, [1])),
            *({"sampling_params": {"max_tokens": 2, "temperature": t}} for t in ("x", -1, [1])),
        ],
        "unload_model": [{}, {"model_id": 7}],
        "retrieve_future": [{}, {"request_id": 7}],
    }

    def make(rng: random.Random) -> Case:
        how = rng.choice(["value", "value", "value", "bytes", "loss"])
        endpoint = "forward_backward" if how == "loss" else rng.choice(list(valid))
        data = json.dumps(valid.get(endpoint, {}) | rng.choice(wrong.get(endpoint, [{}]))).encode()
        if how == "bytes":
            data = rng.choice([damaged(rng, data.decode()), b"[1]", b"7"])
        if how == "loss":
            data = rng.choice([rng.randbytes(rng.randrange(1, 60)), b"\x0a\x05ab", b"\xff" * 12, b""])

        def read() -> None:
            response = client.post(f"/api/v1/{endpoint}", content=data)
            refused(response)
            answer = response.json()
            if isinstance(answer, dict) and "request_id" in answer and endpoint != "retrieve_future":
                response = client.post("/api/v1/retrieve_future", json={"request_id": answer["request_id"]})
                refused(response)
                if isinstance(answer := response.json(), dict) and "error" in answer:
                    assert answer.get("category") != "server", f"an error of the server's: {answer}"
                    raise RefusedError(answer["error"])

        return f"{endpoint} {data[:400]!r}", read

    return make


SUBJECTS: dict[str, Callable[[Path], Callable[[random.Random], Case]]] = {
    "recipes": recipes,
    "flags": flags,
    "rows": rows,
    "architectures": architectures,
    "adapters": adapters,
    "gguf": gguf,
    "serve": serve,
    "tinker": tinker,
}


def prepared(names: list[str], folder: Path) -> dict[str, Callable[[random.Random], Case]]:
    """Return the makers of these subjects' inputs, each with a folder of its own."""
    made = {}
    for name in names:
        (folder / name).mkdir()
        made[name] = SUBJECTS[name](folder / name)
    return made


def main() -> None:
    """Run a campaign; exit with 1 after any fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1500)
    parser.add_argument("--subjects", nargs="*", choices=SUBJECTS, default=list(SUBJECTS))
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (8 * GIB, 8 * GIB))  # of all; what an input takes is measured
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for fault in run(prepared(args.subjects, Path(folder)), args.seed, args.count):
            counts[fault.kind] = counts.get(fault.kind, 0) + 1
            print(f"{fault.kind}: {fault.subject} {fault.number}: {fault.what}\n    {fault.text}", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    print(f"{args.count:,} inputs of seed {args.seed}: {counts or 'no fault'}; at most {peak:.1f} GiB")
    sys.exit(bool(counts))


if __name__ == "__main__":
    main()
