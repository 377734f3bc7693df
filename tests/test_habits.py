"""Three habits of coming from another program, each from its file or cells to an answer that is served."""

import json
from pathlib import Path

import pytest
from selection import thorough

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from local_client import TestClient

import jaxglue
from jaxglue.commands import run
from jaxglue.generation.assistant import Assistant
from jaxglue.generation.config import SamplingConfig
from jaxglue.serve.config import ServeConfig
from jaxglue.serve.server import make_app
from jaxglue.serve.service import Service

MODEL = str(Path(jaxglue.__file__).parent / "recipes/quickstart/model")
QUESTION = "What is 3 plus 4?"
AXOLOTL = """
base_model: {model}
model_type: AutoModelForCausalLM
reinit_weights: true
datasets:
  - path: {folder}/chats.json
    type: chat_template
    field_messages: conversations
    message_property_mappings: {{role: from, content: value}}
val_set_size: 0.1
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
sequence_len: 64
sample_packing: true
micro_batch_size: 1
gradient_accumulation_steps: 1
max_steps: 2
learning_rate: 2e-4
optimizer: adamw_torch_fused
lr_scheduler: cosine
bf16: auto
gradient_checkpointing: true
flash_attention: true
wandb_project:
logging_steps: 1
dataset_prepared_path: {folder}/cache
output_dir: {folder}/run
"""

pytestmark = thorough("settings/test_public_recipes.py")


def served_answer(model: str) -> str:
    """Return the greedy answer of a server of the folder."""
    config = ServeConfig(model=model, name="tuned", sampling=SamplingConfig(temperature=0.0))
    assistant = Assistant(config)
    service = Service(assistant, slots=2, length=64, most=8)
    try:
        messages = [{"role": "user", "content": QUESTION}]
        body = {"model": "tuned", "messages": messages, "max_tokens": 6}
        response = TestClient(make_app(assistant, service, config)).post("/v1/chat/completions", json=body)
    finally:
        service.close()
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def generated_answer(model: str) -> str:
    (answer,) = jaxglue.generate(model=model, prompt=(QUESTION,), max_tokens=6, temperature=0.0)
    return "".join(answer[1])


def test_a_recipe_of_axolotl_in_the_terminal(tmp_path):
    turns = [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": "7"}]
    (tmp_path / "chats.json").write_text(json.dumps([{"conversations": turns}] * 20))
    recipe = tmp_path / "axolotl.yml"
    recipe.write_text(AXOLOTL.format(model=MODEL, folder=tmp_path))
    run("train", [str(recipe)])
    run("export", ["--adapter", str(tmp_path / "run/adapter"), "--output", str(tmp_path / "merged")])
    assert served_answer(str(tmp_path / "merged")) == generated_answer(str(tmp_path / "merged"))


def test_cells_of_a_notebook_with_names_of_unsloth_and_trl(tmp_path):
    dataset = [{"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "7"}]}] * 20
    with pytest.raises(ValueError, match=r"train_dataset.* is TRL's: data takes files, and rows in memory"):
        jaxglue.train(model_name=MODEL, train_dataset=dataset)
    summary = jaxglue.train(
        model_name=MODEL,
        random_weights=True,
        data=dataset,
        max_seq_length=64,
        r=8,
        lora_alpha=16,
        lora_dropout=0,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        per_device_train_batch_size=1,
        warmup_steps=1,
        max_steps=2,
        logging_steps=1,
        optim="adamw_8bit",
        lr_scheduler_type="linear",
        random_state=3407,
        report_to="none",
        cache_dir=str(tmp_path / "cache"),
        output_dir=str(tmp_path / "run"),
    )
    jaxglue.export(adapter=str(summary.adapter), output=str(tmp_path / "merged"))
    assert served_answer(str(tmp_path / "merged")) == generated_answer(str(tmp_path / "merged"))


def test_a_program_with_rows_of_its_own(tmp_path):
    rows = ({"prompt": f"What is {n} plus 1?", "completion": str(n + 1)} for n in range(40))
    seen = []

    class Watch(jaxglue.Callback):
        def on_step(self, step, values):
            seen.append(values["loss"])

    summary = jaxglue.train(
        model=MODEL,
        random_weights=True,
        method="full",
        data=rows,
        seq_len=64,
        steps=2,
        callbacks=[Watch()],
        cache_dir=str(tmp_path / "cache"),
        output=str(tmp_path / "run"),
    )
    assert len(seen) == summary.steps == 2
    assert served_answer(str(summary.adapter)) == generated_answer(str(summary.adapter))
