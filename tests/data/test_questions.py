"""Rows of decisions: forms of gold, prompts and labels; bad rows are named."""

import math
import pickle

import pytest

from jaxglue.data.decide_rows import DecisionEncoder
from jaxglue.data.files import Row
from jaxglue.data.questions import read_gold, read_question

CHOICE = {"type": "choice", "instructions": "Which?", "criteria": {"red": None, "blue": "as the sky"}}
SCORE = {"type": "score", "instructions": "How many?", "criteria": ["none", "some", "all"]}
STARS = {"type": "score", "instructions": "How many stars?", "criteria": ["1", "2", "3"]}
YES_NO = {"type": "noul", "instructions": "Is it?"}


@pytest.mark.parametrize(
    ("question", "gold", "probabilities"),
    [
        (CHOICE, {"label": "blue"}, [0, 1]),
        (CHOICE, {"probabilities": {"red": 0.25, "blue": 0.75}}, [0.25, 0.75]),
        (CHOICE, "red", [1, 0]),
        (SCORE, {"label": 1}, [0, 1, 0]),
        (SCORE, {"label": "all"}, [0, 0, 1]),
        (SCORE, {"probabilities": {"0": 0.5, "2": 0.5}}, [0.5, 0, 0.5]),
        (STARS, {"label": 3}, [0, 0, 1]),
        (STARS, {"label": "3"}, [0, 0, 1]),
        (STARS, {"probabilities": {"1": 0.25, "3.0": 0.75}}, [0.25, 0, 0.75]),
        ({**SCORE, "criteria": [0.5, 1, 2]}, {"label": 1.0}, [0, 1, 0]),
        ({**SCORE, "criteria": ["0", "1", "2 or more"]}, {"label": 2}, [0, 0, 1]),
        (YES_NO, {"noul": 0.9}, [0.9, 0.1]),
        (YES_NO, True, [1, 0]),
        (YES_NO, {"label": "no"}, [0, 1]),
    ],
)
def test_gold_has_many_forms(question, gold, probabilities):
    assert read_gold("q", read_question("q", question), gold) == pytest.approx(probabilities)


@pytest.fixture
def encoder(make_tokenizer):
    return DecisionEncoder(make_tokenizer())


def row(**changes):
    value = {"state": "It is red.", "questions": {"color": CHOICE}, "gold": {"color": {"label": "red"}}} | changes
    return Row("rows.jsonl:7", value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gold": {}}, "question 'color': no gold answer"),
        (
            {"gold": {"color": {"label": "green"}}},
            "gold 'green' is none of its options: 'red', 'blue'",
        ),
        ({"gold": {"colour": "red"}}, "'gold' answers 'colour', which is no question of the row"),
        *(
            ({"questions": {"a": SCORE}, "gold": {"a": value}}, f"gold {value} is none")
            for value in (math.inf, math.nan)
        ),
        *(
            ({"questions": {"a": STARS}, "gold": {"a": gold}}, "gold '?0'? is none .* not a number from 0")
            for gold in (0, {"label": 0}, {"probabilities": {"0": 0.5, "1": 0.5}})
        ),
        ({"gold": {"color": {"probabilities": {"red": 0.5, "blue": 0.4}}}}, "gold probabilities have the sum 0.9"),
        ({"gold": {"color": {"probabilities": {"red": 1.5, "blue": -0.5}}}}, "1.5 is no probability"),
        (
            {"questions": {"color": {**CHOICE, "criteria": {"red": None, " red": None}}}},
            "'red' and ' red' have the",
        ),
        ({"questions": {"color": {**CHOICE, "criteria": {"red": None}}}}, "1 options, expected 2 to 255"),
        ({"questions": {"color": {**CHOICE, "type": "pick"}}}, "type 'pick' is none of noul, choice, score"),
        ({"questions": {"color": {**CHOICE, "answer": 1}}}, "unknown field 'answer'"),
        ({"questions": {}}, "'questions' must be an object of at least one"),
        ({"state": " "}, "'state' is missing or empty"),
    ],
)
def test_bad_rows_are_named(encoder, changes, message):
    with pytest.raises(ValueError, match=rf"^rows.jsonl:7: .*{message}"):
        encoder.encode([row(**changes)])


def test_a_row_is_a_state_and_a_prompt_for_each_question(encoder):
    questions = {"color": CHOICE, "many": SCORE, "is": {**YES_NO, "criteria": {"true": "it is", "false": None}}}
    gold = {"color": "red", "many": 2, "is": False}
    encoded = encoder.encode([row(questions=questions, gold=gold)])
    tokens, sizes = encoded.tokens.tolist(), encoded.columns["size"].astype(int).tolist()
    prefix = int(encoded.columns["prefix"][0])
    texts, decode = [], encoder.tokenizer.decode
    for size in sizes:
        texts.append(decode(tokens[prefix : prefix + size]))
        prefix += size
    assert decode(tokens[: int(encoded.columns["prefix"][0])]).endswith("user\nIt is red.\n\n")
    wanted = "Question: Which?\nA: red\nB: blue - as the sky\nAnswer with the letter of one option only.<|im_end|>"
    assert texts[0].startswith(wanted)
    levels = "0: none\n1: some\n2: all\nAnswer with the number of one level only."
    assert texts[1].startswith(f"Question: How many?\n{levels}")
    yes, no = encoder.labels.names["noul"]
    assert texts[2].startswith(f"Question: Is it?\n{yes}: it is\nAnswer with {yes} or {no} only.")
    assert encoded.mask.sum() == 3 and encoded.mask[-1] == 1
    assert encoded.columns["gold"].tolist() == [1, 0, 0, 0, 1, 0, 1]


def test_rows_are_sent_by_processes_that_encode_them(encoder):
    encoded = encoder.encode([row()])
    sent = pickle.loads(pickle.dumps(encoded))
    assert sent.tokens.tolist() == encoded.tokens.tolist() and sent.columns.keys() == encoded.columns.keys()
    pickle.dumps(encoder)


def test_special_tokens_in_a_state_are_text(encoder):
    plain, special = (encoder.encode([row(state=f"red {text}")]) for text in ("x", "<|im_end|>"))
    ends = [
        encoded.tokens.tolist().count(encoder.tokenizer.convert_tokens_to_ids("<|im_end|>"))
        for encoded in (plain, special)
    ]
    assert ends[0] == ends[1]
