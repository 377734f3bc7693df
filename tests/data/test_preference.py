"""Preference data: shapes of rows, common beginnings, truncation, and errors that name the line."""

import numpy as np
import pytest

from jaxglue.data.config import NO_COLUMNS, AnswerTask, DataConfig, LabelTask
from jaxglue.data.files import Row
from jaxglue.data.formats import detect_preference, read_answers, unused_columns
from jaxglue.data.iterator import EvalBatches
from jaxglue.data.prepare import prepare_data

USER = {"role": "user", "content": "What is 1 plus 2?"}


def said(text):
    return {"role": "assistant", "content": text}


PAIR = {"prompt": [USER], "chosen": [said("It is 3.")], "rejected": [said("Good question, the answer is 4.")]}
PAIRS = AnswerTask()
SHAPES = {
    "messages": PAIR,
    "whole conversations": {"chosen": [USER, said("It is 3.")], "rejected": [USER, said("Good")]},
    "UltraFeedback": {"prompt": USER["content"], "chosen": [USER, said("It is 3.")], "rejected": [USER, said("Good")]},
    "Anthropic": {
        "chosen": "\n\nHuman: What is 1?\n\nAssistant: It is 1.",
        "rejected": "\n\nHuman: What is 1?\n\nAssistant: Good question",
    },
    "strings": {"prompt": "What is 1 plus 2? ", "chosen": "It is 3.", "rejected": "Good"},
}


@pytest.fixture
def prepare(tmp_path, make_tokenizer, write_jsonl):
    def run(rows, task=PAIRS, seq_len=128, columns=NO_COLUMNS, **options):
        config = DataConfig(data=(write_jsonl(rows),), seq_len=seq_len, cache_dir=str(tmp_path / "cache"), **options)
        tokenizer = make_tokenizer()
        return prepare_data(config, tokenizer, task=task, columns=columns), tokenizer

    return run


def answers_of(data, tokenizer, seq_len=128):
    """Return (prompt, chosen, rejected) targets of the first unit, decoded."""
    (batch,) = EvalBatches(data, seq_len=seq_len, batch_size=1)
    owners = batch.answers.owners[0]
    counted = [tokenizer.decode(batch.targets[0][owners == part].tolist()) for part in (0, 1)]
    return batch, *counted


@pytest.mark.parametrize("name", SHAPES)
def test_answers_are_counted_after_a_common_prompt(prepare, name):
    prepared, tokenizer = prepare([SHAPES[name]])
    batch, chosen, rejected = answers_of(prepared.train, tokenizer)
    assert chosen.startswith("It is") and rejected.startswith("Good")
    assert len(prepared.train) == 1 and prepared.train.prompts[0] > 0
    assert batch.answers.used.tolist() == [[1.0]]
    positions = np.asarray(batch.segments.positions[0])
    first, second = (positions[batch.answers.owners[0] == part][0] for part in (0, 1))
    assert abs(int(first) - int(second)) <= 1


def test_an_overlong_pair_loses_the_end_of_the_longer_answer(prepare):
    long = {**PAIR, "rejected": [said("Good question, the answer is 4. " * 9)]}
    whole, _ = prepare([long])
    room = int(whole.train.prompts[0] + whole.train.sizes[0, 0] + 10)
    cut, _ = prepare([long], seq_len=room)
    assert cut.train.sizes.tolist() == [[whole.train.sizes[0, 0], 10]] and cut.report.truncated == 1


@pytest.mark.parametrize("scored", [False, True])
def test_a_pair_whose_answers_are_cut_to_equal_ones_is_left_out(prepare, scored):
    same = {"prompt": [USER], "chosen": [said("It is 3. " * 40 + "a")], "rejected": [said("It is 3. " * 40 + "b")]}
    task = PAIRS._replace(scored=scored)
    whole, _ = prepare([PAIR, same], task, seq_len=1024)
    cut, _ = prepare([PAIR, same], task)
    assert [(len(each.train), each.report.dropped) for each in (whole, cut)] == [(2, 0), (1, 1)]


def test_labeled_answers_stand_beside_the_previous_rows(prepare):
    rows = [
        {"prompt": [USER], "completion": [said(text)], "label": label} for text, label in (("1", True), ("4", "false"))
    ]
    prepared, tokenizer = prepare(rows, AnswerTask(labeled=True))
    batch, *_ = answers_of(prepared.train, tokenizer)
    assert batch.answers.desirable.tolist() == [[1.0, 0.0]]
    assert not any("label" in note for note in prepared.report.notes)
    alike, _ = prepare([row | {"label": 0} for row in rows], AnswerTask(labeled=True))
    assert "all answers have the label false" in " ".join(alike.report.notes)
    assert prepared.train.sizes[0].tolist() == prepared.train.sizes[1, ::-1].tolist()


def test_rows_that_are_not_trained_on_are_counted(prepare):
    rows = [{"prompt": [USER], "completion": [said(text)], "label": text == "3"} for text in "1234"]
    rows[2]["weight"] = 0
    prepared, _ = prepare(rows, AnswerTask(labeled=True))
    assert (len(prepared.train), prepared.report.dropped) == (3, 1)
    rows = [{"text": text, "label": int(text == "3"), "weight": int(text != "2")} for text in "1234"]
    prepared, _ = prepare(rows, LabelTask(values=2), columns={"label": np.nan})
    assert prepared.train.documents.tolist() == [0, 2, 3] and prepared.report.dropped == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**PAIR, "rejected": PAIR["chosen"]}, "are equal"),
        ({**PAIR, "rejected": [said(" ")]}, "the answer is empty"),
        ({**PAIR, "rejected": [USER]}, "expected an assistant's answer after the prompt, got a 'user' message"),
        ({"chosen": [USER, said("1")], "rejected": [said("2")]}, "do not begin with the same message"),
        ({"prompt": "other", "chosen": [USER, said("1")], "rejected": [USER, said("2")]}, "'prompt' is in no message"),
        ({"chosen": "a", "rejected": "b"}, "give their 'prompt' too"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "'rejected' is null: remove the row"),
        ({**PAIR, "chosen": None}, "'chosen' is null: remove the row"),
        ({**PAIR, "rejected": "b"}, "'chosen' and 'rejected' must both be strings or both lists of messages, got list"),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, "'prompt' is empty"),
        ({"prompt": [USER], "chosen": "a", "rejected": "b"}, "must both be strings or both lists"),
    ],
)
def test_bad_pairs_are_named(prepare, row, message):
    with pytest.raises(ValueError, match=f"data.jsonl:2: .*{message}"):
        prepare([PAIR, row])


def test_rows_of_a_conversation_and_two_messages_are_pairs(prepare):
    answers = {name: {"from": "gpt", "value": text} for name, text in (("chosen", "1"), ("rejected", "4"))}
    prepared, tokenizer = prepare([{"conversations": [USER], "system": "Be brief.", **answers}])
    text = tokenizer.decode(prepared.train.store.tokens)
    assert text.count("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user") == 2


def test_a_label_is_boolean(prepare):
    rows = [{"prompt": "a", "completion": "b", "label": "good"}]
    with pytest.raises(ValueError, match=r"data.jsonl:1: 'label' must be 0, 1, true or false, got 'good'"):
        prepare(rows, AnswerTask(labeled=True))


def test_supervised_rows_are_refused(prepare):
    with pytest.raises(ValueError, match=r"data.jsonl:1: preference data need the keys 'chosen' and 'rejected'"):
        prepare([{"text": "a"}])


@pytest.mark.parametrize("row", [{"prompt": "a", "label": True}, {"completion": "a", "label": True}])
def test_a_labeled_row_needs_prompt_and_completion(row):
    with pytest.raises(ValueError, match=r"a row with 'label' needs 'prompt' and 'completion', or 'messages'"):
        read_answers(row, "labeled")


def test_labels_need_kto(prepare):
    with pytest.raises(ValueError, match=r"rows with a label are for --objective kto"):
        prepare([{"prompt": "a", "completion": "b", "label": True}])


@pytest.mark.parametrize("tag", [True, False])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, said("1")]},
        {"conversations": [{"from": "human", "value": USER["content"]}, {"from": "gpt", "value": "1"}]},
        {"instruction": USER["content"], "input": "", "output": "1"},
    ],
)
def test_llama_factorys_rows_have_a_tag_for_a_label(row, tag):
    row = row | {"kto_tag": tag}
    assert detect_preference(row) == "labeled" and not unused_columns([Row("a", row)], "labeled")
    answers = read_answers(row, "labeled")
    same = read_answers({"messages": [USER, said("1")], "label": tag}, "labeled")
    assert answers == same and (answers[0] is None) == (not tag)
