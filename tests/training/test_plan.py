"""The plan shows what people check before they wait for a run; kernels are told when asked for."""

import dataclasses

import pytest
from selection import repeat

from jaxglue.objectives.objective import ObjectiveConfig
from jaxglue.training.report import plan_rows
from jaxglue.training.setup import resolve
from jaxglue.training.train import train


def test_plan_shows_what_people_check(make_config):
    config = make_config(
        rank=4, alpha=8.0, dropout=0.05, targets=("q_proj", "v_proj"), learning_rate=1e-3, weight_decay=0.1, steps=8
    )
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, eval_fraction=0.2),
        run=dataclasses.replace(config.run, eval_every=4, keep="best"),
    )
    rows = {title: str(text) for title, text in plan_rows(resolve(config)).items()}
    assert rows["method"].startswith("lora, rank 4, alpha 8, dropout 0.05, on q_proj, v_proj; ")
    assert rows["template"].startswith("the tokenizer's own; answers end with <")
    assert rows["loss on"] == "the assistant's turns"
    assert "learning rate 0.001, cosine after 0 warm-up steps; weight decay 0.1, " in rows["optimizer"]
    assert rows["steps"].startswith("8 (")
    assert rows["evaluation"] == "every 4 steps and at the end, on the held-out rows"
    assert rows["output"].endswith("run, a checkpoint every 4 steps, the best weights at the end")


@pytest.mark.parametrize(
    ("loss_on", "text"), [("all", "every token"), repeat("last-turn", "the assistant's last turn")]
)
def test_plan_says_what_the_loss_is_on(make_config, loss_on, text):
    config = make_config()
    rows = plan_rows(resolve(dataclasses.replace(config, data=dataclasses.replace(config.data, loss_on=loss_on))))
    assert rows["loss on"] == text


def test_plan_of_pairs(make_config, write_jsonl):
    pair = {"prompt": "What is 1? ", "chosen": "It is 1.", "rejected": "Good"}
    config = make_config(data=(write_jsonl([pair] * 3, "pairs.jsonl"),))
    rows = plan_rows(resolve(dataclasses.replace(config, objective=ObjectiveConfig(objective="dpo"))))
    assert rows["loss on"] == "the answers, after their prompts"
    assert rows["evaluation"].startswith("none: --eval-data names held-out rows")


@pytest.mark.parametrize("explain", [False, True])
def test_kernels_are_told_when_asked_for(make_config, capsys, explain):
    train(make_config(dry_run=True, explain=explain))
    shown = capsys.readouterr().out
    assert ("feed-forward" in shown, "rotation" in shown) == (explain, explain)


def test_plan_says_that_plain_texts_need_no_template(make_config, write_jsonl):
    rows = plan_rows(resolve(make_config(data=(write_jsonl([{"text": "One and one is two."}] * 9, "texts.jsonl"),))))
    assert rows["template"].startswith("not used, as rows are plain text; answers end with <")
    assert rows["loss on"] == "every token"


def test_sample_prompts_are_rendered_before_weights_are_loaded(make_config, model_folder, write_jsonl):
    (model_folder / "chat_template.jinja").write_text("{{ raise_exception('no user') }}")
    config = make_config(sample_prompt=("Hello",), data=(write_jsonl([{"text": "Hello there"}] * 4, "texts.jsonl"),))
    with pytest.raises(ValueError, match="no user"):
        resolve(config)
