"""Exported folders render and stop as their models were trained."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import repeats_parts_of

from jaxglue.commands import main
from jaxglue.data.encode import Encoder
from jaxglue.data.files import Row
from jaxglue.data.template import adopt
from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.hf import serving_check
from jaxglue.hf.adapter import save_adapter
from jaxglue.hf.checkpoint import save_tensors
from jaxglue.hf.loading import random_model
from jaxglue.hf.merge import export_adapter
from jaxglue.hf.serving import folder_stops, load_own_tokenizer, stop_tokens
from jaxglue.hf.serving_check import check_serving, read_by_transformers, reading
from jaxglue.models import config_from_hf
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.training.checkpoint_export import FinishedRun
from jaxglue.training.result import export_result
from jaxglue.training.run import Base
from jaxglue.training.vocabulary import read_vocabulary, run_stops
from jaxglue.training.workload import read_architecture

CHAT = [{"role": "user", "content": "What is 1?"}, {"role": "assistant", "content": "It is 1."}]
END_OF_TEXT, START, END = range(3)
TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + 'END' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML whose turns end with END."""


def template(end: str) -> str:
    return TURNS.replace("END", end)


CHATML = template("<|im_end|>\\n")


@pytest.fixture
def make_folder(tmp_path, make_tokenizer):
    """Write a small model's folder: eos token, template, and the end tokens that its files list."""

    def make(name="base", eos="<|endoftext|>", chat=CHATML, config=None, generation=None, new=()):
        tokenizer, folder = make_tokenizer("plain", eos_token=eos), tmp_path / name
        tokenizer.chat_template = chat
        tokenizer.add_tokens(list(new))
        tokenizer.save_pretrained(folder)
        raw = {**SHAPE, **({} if config is None else {"eos_token_id": config})}
        (folder / "config.json").write_text(json.dumps(raw))
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        return folder

    return make


SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 408,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": True,
}


@pytest.fixture
def export(make_config, tmp_path):
    """Write the result of a run that has not moved the weights; return it with the run's tokenizer."""

    def write(folder: Path, *, method="full", **settings):
        config = make_config(model=str(folder), method=method, **settings)
        base = read_architecture(config, folder)
        vocabulary = read_vocabulary(folder, None, base, None)
        adopt(vocabulary.tokenizer, config.data)
        stops = run_stops(vocabulary.tokenizer, folder, config.model.adapter, config.data.stop_tokens)
        run = FinishedRun(
            base=Base.of(config, folder, base, None),
            lora=config.lora if method == "lora" else None,
            dtype=config.model.compute_dtype,
            objective=config.objective.make(),
            vocabulary=vocabulary,
            stops=stops,
        )
        model = random_model(base, dtype=jnp.float32, seed=0)
        params = split_model(model, nnx.Param)[1]
        result = export_result(run, params, tmp_path / "result")
        return result, vocabulary.tokenizer

    return write


def last_target(tokenizer) -> int:
    """Return the last trained token that is no white space, of a chat if there is a template."""
    format, row = ("messages", {"messages": CHAT}) if tokenizer.chat_template else ("text", {"text": "It is 1."})
    encoded = Encoder(tokenizer, format=format, loss_on="assistant").encode([Row("row", row)])
    trained = encoded.tokens[encoded.mask > 0].tolist()
    return next(token for token in reversed(trained) if tokenizer.decode([token]).strip())


VARIANTS = {
    "turn end is eos": ({"eos": "<|im_end|>", "config": END}, {}, END, END),
    "turn end is not eos": ({"config": END_OF_TEXT, "generation": {"eos_token_id": END_OF_TEXT}}, {}, [0, 2], [0, 2]),
    "no list anywhere": ({}, {}, [0, 2], [0, 2]),
    "list in generation_config alone": (
        {"config": 0, "generation": {"eos_token_id": [0, 7], "top_p": 0.8}},
        {},
        [0, 2, 7],
        [0, 7, 2],
    ),
    "both listed": ({"config": [0, 2], "generation": {"eos_token_id": [2, 0]}}, {}, [0, 2], [2, 0]),
    "turn end of two tokens": ({"chat": template("<|im_end|><|im_start|>"), "config": 0}, {}, [0, 1], [0, 1]),
    "turn end is an ordinary added token": (
        {"chat": template("<turn>\\n"), "config": 0, "new": ["<turn>"]},
        {},
        [0, 346],
        [0, 346],
    ),
    "turn end inside markers": (
        {
            "chat": template("<|im_end|>").replace(
                "m.content + '<|im_end|>'",
                "'' }}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ ''",
            )
        },
        {},
        [0, 2],
        [0, 2],
    ),
    "texts without template": ({"chat": None, "config": 0}, {}, 0, 0),
    "another eos token": ({"chat": None, "config": 0}, {"eos_token": "<|im_end|>"}, [0, 2], [0, 2]),
    "an ordinary added token becomes eos": (
        {"chat": None, "config": 0, "new": ["<turn>"]},
        {"eos_token": "<turn>"},
        [0, 346],
        [0, 346],
    ),
    "eos token of the template": ({"config": 0}, {"eos_token": "turn_end"}, [0, 2], [0, 2]),
    "further stop tokens": ({"config": 0}, {"stop_tokens": ("<|im_start|>",)}, [0, 1, 2], [0, 1, 2]),
}
"""Model folder, settings of the run, then the lists in config.json and generation_config.json."""


@pytest.mark.parametrize("name", VARIANTS)
def test_results_stop_at_the_trained_end(name, make_folder, export):
    folder, settings, config, generation = VARIANTS[name]
    result, tokenizer = export(make_folder(**folder), **settings)
    lists = [json.loads((result / f"{file}.json").read_text()) for file in ("config", "generation_config")]
    assert [listed["eos_token_id"] for listed in lists] == [config, generation]
    assert last_target(tokenizer) in folder_stops(result)
    assert load_tokenizer(result).eos_token == tokenizer.eos_token
    assert reading(load_tokenizer(result), [{"messages": CHAT, "tools": None}]) == reading(
        tokenizer, [{"messages": CHAT, "tools": None}]
    )
    check_serving(result, tokenizer)
    assert None not in reading(tokenizer, [{"messages": CHAT, "tools": None}]).values()
    assert lists[1].get("top_p") == folder.get("generation", {}).get("top_p")


@repeats_parts_of("test_doctor_compares_transformers_reading")
def test_transformers_reads_a_result_as_trained(make_folder, export, tmp_path):
    (tmp_path / "other.jinja").write_text(template("<|im_start|>"))
    result, tokenizer = export(make_folder(config=0), chat_template=str(tmp_path / "other.jinja"))
    read, stops = read_by_transformers(result, [{"messages": CHAT, "tools": None}])
    assert stops == {END_OF_TEXT, START} and read["tokens of conversation 1"][-1] == START
    assert read == reading(tokenizer, [{"messages": CHAT, "tools": None}])


def test_files_of_the_base_stay_where_they_agree(make_folder, export):
    folder = make_folder(eos="<|im_end|>", config=END, generation={"eos_token_id": END})
    result, _ = export(folder)
    names = [path.name for path in folder.iterdir() if path.is_file()]
    assert len(names) == 5
    before, after = (json.loads((root / "config.json").read_text()) for root in (folder, result))
    assert {key for key in after if before.get(key) != after[key]} <= {"dtype", "torch_dtype"}
    for name in set(names) - {"config.json"}:
        assert (result / name).read_bytes() == (folder / name).read_bytes()


def test_template_of_the_run_replaces_that_of_the_base_everywhere(make_folder, export, tmp_path):
    folder, other = make_folder(), tmp_path / "other.jinja"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "{{ old }}"}))
    other.write_text(template("<|im_end|>"))
    result, _ = export(folder, chat_template=str(other))
    assert (result / "chat_template.jinja").read_text() == other.read_text()
    assert json.loads((result / "tokenizer_config.json").read_text()) == settings | {"chat_template": other.read_text()}


def test_adapters_own_tokenizer_and_template_come_first(make_folder, make_tokenizer, tmp_path):
    base = make_folder(config=0)
    model = random_model(config_from_hf(SHAPE), dtype=jnp.float32, seed=0)
    tensors = flatten_names(split_model(model, nnx.Param)[1])
    save_tensors(tmp_path / "weights", tensors)
    (tmp_path / "weights/model.safetensors").rename(base / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    lora = {f"{name}.lora_A": np.ones((2, 8), np.float32), f"{name}.lora_B": np.zeros((8, 2), np.float32)}
    save_adapter(tmp_path / "adapter", lora, LoraConfig(rank=2, targets=("q_proj",)), base)

    export_adapter(tmp_path / "adapter", base, tmp_path / "plain")
    assert folder_stops(tmp_path / "plain") == {END_OF_TEXT, END}

    (tmp_path / "adapter/chat_template.jinja").write_text(template("<|im_start|>"))
    assert load_own_tokenizer(base, tmp_path / "adapter").chat_template == template("<|im_start|>")
    own = make_tokenizer(None, eos_token="<|im_end|>")
    own.chat_template = template("<bye>")
    own.add_special_tokens({"additional_special_tokens": ["<bye>"]})
    own.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter/generation_config.json").write_text('{"eos_token_id": 7}')

    export_adapter(tmp_path / "adapter", base, tmp_path / "merged")
    merged = load_tokenizer(tmp_path / "merged")
    assert merged.chat_template == own.chat_template and merged.eos_token == "<|im_end|>"
    bye = merged.convert_tokens_to_ids("<bye>")
    assert json.loads((tmp_path / "merged/generation_config.json").read_text())["eos_token_id"] == [0, 2, 7, bye]
    tokenizer = load_own_tokenizer(base, tmp_path / "adapter")
    assert stop_tokens(tokenizer, base, tmp_path / "adapter") == {END_OF_TEXT, END, 7, bye}


def doctor(folder: Path, capsys) -> tuple[int, str]:
    """Return status and output of `jaxglue doctor --model`."""
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--model", str(folder)])
    return stop.value.code, " ".join(capsys.readouterr().out.split())


def test_doctor_passes_results_and_names_what_is_wrong(make_folder, export, capsys):
    base = make_folder(config=0, generation={"eos_token_id": 0})
    status, said = doctor(base, capsys)
    assert status == 1 and "<|im_end|> ends texts or turns, but generation_config.json does not list it" in said
    assert "add 2 to eos_token_id" in said
    result, _ = export(base)
    status, said = doctor(result, capsys)
    assert status == 0 and "warn" not in said and "turns end with <|im_end|> ok" in said
    (result / "chat_template.jinja").write_text(template("\\n"))
    status, said = doctor(result, capsys)
    assert status == 1 and "turns end with no token of their own" in said
    (result / "chat_template.jinja").unlink()
    assert doctor(result, capsys)[0] == 0
    (result / "config.json").write_text(json.dumps(SHAPE | {"vocab_size": 300}))
    status, said = doctor(result, capsys)
    assert status == 1 and "token 345, but the model has 300 rows" in said


def test_doctor_compares_transformers_reading(make_folder, monkeypatch):
    folder = make_folder(eos="<|im_end|>", config=END)
    monkeypatch.setattr(serving_check, "_has_torch", lambda: True)
    last = list(serving_check.inspect(folder))[-1]
    assert last == ("transformers", "renders, tokenizes and stops alike", "", False)
    other = make_folder("other", eos="<|im_end|>", config=END, chat=template("<|im_end|>"))
    monkeypatch.setattr(serving_check, "read_by_transformers", lambda _, chats: read_by_transformers(other, chats))
    assert "differs in the text of conversation 1" in list(serving_check.inspect(folder))[-1].found
    with pytest.raises(ValueError, match=r"transformers differs in the text of conversation 1: .* the export failed"):
        check_serving(folder, load_tokenizer(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("chat_template.jinja", "the opened folder differs in the text of conversation 1"),
        ("generation_config.json", r"the opened folder does not stop at <\|im_end\|>; the export failed"),
    ],
)
def test_a_folder_that_lost_a_file_fails(make_folder, export, change, message):
    result, tokenizer = export(make_folder(config=0))
    if change == "chat_template.jinja":
        (result / change).write_text(template("<|im_start|>"))
    else:
        for name in ("config.json", change):
            path = result / name
            path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 0}))
    with pytest.raises(ValueError, match=message):
        check_serving(result, tokenizer)
