"""Models that answer in one pass, from rows to folders that are measured, embedded and merged."""

import json
from contextlib import nullcontext

import numpy as np
import pytest
from selection import thorough

from jaxglue import evaluate, export, train
from jaxglue.data.read_rows import ending
from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.generation.config import AssistantConfig
from jaxglue.generation.reading import LoadedModel, PartReader, find_record, texts, vectors
from jaxglue.hf.reading import SENTENCE_FILES
from jaxglue.serve.config import EmbedConfig
from jaxglue.serve.measured import embedded_rows, mined_rows
from jaxglue.training.setup import resolve

QUESTIONS = {
    "good": {"type": "noul", "instructions": "Was it good?"},
    "day": {"type": "choice", "criteria": {"one": None, "two": None, "three": None}},
}


def said(text, role="user"):
    return {"role": role, "content": text}


SWIFT = {
    "messages": [said("a")],
    "positive_messages": [[said("b", "assistant")]],
    "negative_messages": [[said("c", "assistant")], [said("d", "assistant")]],
}
"""A row of ms-swift's."""


def decisions(count):
    return [
        {
            "state": f"day {i % 3} was {'good' if i % 2 else 'bad'}",
            "questions": QUESTIONS,
            "gold": {"good": {"noul": 0.9 if i % 2 else 0.1}, "day": {"label": ("one", "two", "three")[i % 3]}},
        }
        for i in range(count)
    ]


def read_metrics(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "eval_loss" in line][-1]


def test_decisions_are_trained_calibrated_and_measured(with_weights, write_jsonl, tmp_path):
    data, held_out = write_jsonl(decisions(24)), write_jsonl(decisions(18), "held_out.jsonl")
    settings = {"objective": "decide", "data": (data,), "eval_data": (held_out,), "steps": 4, "learning_rate": 1e-2}
    summary = train(with_weights(**settings, permute_options=True, seq_len=256))
    values = read_metrics(tmp_path / "run")
    assert {"eval_accuracy", "eval_ece", "eval_ece/calibrated", "eval_nll/choice", "eval_order/flips"} <= values.keys()
    record = json.loads((summary.adapter / "one_pass.json").read_text())
    assert record["kind"] == "decide" and set(record["temperatures"]) == {"noul", "choice", "score"}
    assert record["held_out"]["nll"] == pytest.approx(values["eval_nll"], rel=1e-5)
    checkpoint = export(run=tmp_path / "run", checkpoint="last", output=tmp_path / "checkpoint")
    assert json.loads((checkpoint / "one_pass.json").read_text()) == {"kind": "decide"}  # fits need held-out parts
    assert (tmp_path / "run/reliability.png").read_bytes().startswith(b"\x89PNG")
    found = evaluate(adapter=summary.adapter, data=[held_out])
    assert found["nll/uncalibrated"] == pytest.approx(values["eval_nll"], rel=1e-4)
    assert found["nll"] != found["nll/uncalibrated"]
    with pytest.raises(ValueError, match="labels of different types of questions are the same tokens"):  # Y and N
        export(adapter=summary.adapter, fold_temperatures=True, output=tmp_path / "folded")
    record["temperatures"] = {"noul": 0.5, "choice": 0.5, "score": 2.0}
    (summary.adapter / "one_pass.json").write_text(json.dumps(record))
    found = evaluate(adapter=summary.adapter, data=[held_out])
    folded = export(adapter=summary.adapter, fold_temperatures=True, output=tmp_path / "folded")
    assert json.loads((folded / "config.json").read_text())["tie_word_embeddings"] is False
    of_weights = evaluate(model=folded, data=[held_out])
    assert of_weights["nll"] == of_weights["nll/uncalibrated"] == pytest.approx(found["nll"], rel=2e-3)
    with pytest.raises(ValueError, match="has no temperatures: train decisions with --eval-data"):
        export(base=with_weights().model.model, fold_temperatures=True, output=tmp_path / "none")


@thorough("objectives/test_decide.py")
def test_decisions_by_a_head_are_trained_measured_and_merged(with_weights, write_jsonl, tmp_path):
    data, held_out = write_jsonl(decisions(24)), write_jsonl(decisions(18), "held_out.jsonl")
    settings = {"objective": "decide_head", "data": (data,), "eval_data": (held_out,), "steps": 3}
    summary = train(with_weights(**settings, seq_len=256))
    values = read_metrics(tmp_path / "run")
    merged = export(adapter=summary.adapter, output=tmp_path / "merged")
    for model in ({"adapter": summary.adapter}, {"model": merged}):
        found = evaluate(**model, data=[held_out])
        assert found["nll/uncalibrated"] == pytest.approx(values["eval_nll"], rel=1e-3)
    with pytest.raises(ValueError, match="answers by a head of its own"):
        export(base=merged, fold_temperatures=True, output=tmp_path / "folded")


@thorough("objectives/test_embed.py")
def test_embeddings_are_trained_merged_embedded_and_mined(with_weights, write_jsonl, tmp_path):
    rows = [
        {"query": f"where is {i}", "positive": f"box {i} is here", "negative": [f"box {i + 1} is there"]}
        for i in range(24)
    ]
    data, held_out = write_jsonl(rows[:16]), write_jsonl(rows[16:], "held_out.jsonl")
    settings = {"objective": "embed", "data": (data,), "eval_data": (held_out,), "steps": 3, "documents_per_step": 8}
    asked = {"pooling": "mean", "bidirectional": True, "query_prompt": "find ", "matryoshka_dims": (8,)}
    summary = train(with_weights(**settings, **asked, max_text_length=16))
    assert {"eval_ndcg@10", "eval_mrr@10", "eval_recall@1"} <= read_metrics(tmp_path / "run").keys()
    checkpoint = export(run=tmp_path / "run", checkpoint="last", output=tmp_path / "checkpoint")
    for name in ("one_pass.json", *SENTENCE_FILES):
        assert (checkpoint / name).read_bytes() == (summary.adapter / name).read_bytes()
    merged = export(adapter=summary.adapter, output=tmp_path / "merged")
    assert all(ending(load_tokenizer(folder)) for folder in (summary.adapter, merged, checkpoint))
    assert json.loads((merged / "config.json").read_text())["is_causal"] is False
    assert [each["type"].rpartition(".")[2] for each in json.loads((merged / "modules.json").read_text())] == [
        "Transformer",
        "Pooling",
        "Normalize",
    ]
    (merged / "one_pass.json").unlink()  # the files of sentence-transformers say the same
    found = {}
    for name, config in (("adapter", {"adapter": summary.adapter}), ("merged", {"model": merged})):
        config = AssistantConfig(**config)
        reader = PartReader(LoadedModel.load(config), find_record(config))
        found[name] = vectors(reader.read(reader.encode(texts(reader, ["box 3 is here", "x " * 40], query=True))))
    np.testing.assert_allclose(found["adapter"], found["merged"], atol=2e-3)
    plain = write_jsonl([{"text": "box 3"}, {"text": "box 4"}], "texts.jsonl")
    _, embedded = embedded_rows(EmbedConfig(model=merged, data=(plain,), dimensions=8))
    np.testing.assert_allclose(np.linalg.norm(embedded, axis=1), 1, rtol=1e-5)
    mined = list(
        mined_rows(EmbedConfig(model=merged, data=(held_out,), mine=2, output=tmp_path / "m.jsonl", mine_margin=1))
    )
    assert len(mined) == 8 and all(row["positive"] not in row["negative"] for row in mined)


def pair(anchor, positive, *negatives):
    return {"query": anchor, "positive": positive} | ({"negative": [*negatives]} if negatives else {})


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([pair("a", "b")], {}, "no pair has a negative in its step, whose loss is then constant"),
        ([pair("a", "b"), pair("a", "c")], {}, "no pair has a negative in its step"),
        ([pair("a", "b"), pair("c", "b")], {}, "no pair has a negative in its step"),
        ([pair("a", "b"), pair("c", "d")], {"documents_per_step": 1}, "negative in any of the first 2 steps"),
        ([pair("a", "b", "c")], {"documents_per_step": 1}, None),
        ([pair("a", "b"), pair("c", "b", "d")], {}, None),
        ([pair("a", "b"), pair("c", "d")], {}, None),
        (
            [{"sentence1": each, "sentence2": "b", "score": 0.5} for each in "ac"],
            {"embed_loss": "cosent"},
            "all pairs have the same similarity in its step",
        ),
    ],
)
def test_texts_of_which_nothing_is_learned_are_refused(make_config, write_jsonl, rows, settings, message):
    config = make_config(objective="embed", data=(write_jsonl(rows, "texts.jsonl"),), **settings)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        resolve(config)


def test_steps_of_texts_that_train_nothing_are_counted(make_config, write_jsonl, caplog):
    data = write_jsonl([pair("a", "b"), pair("c", "d"), pair("e", "f", "g")], "texts.jsonl")
    resolve(make_config(objective="embed", data=(data,), documents_per_step=1))
    assert "no pair has a negative in 2 of the first 3 steps" in caplog.text


@thorough("objectives/test_rerank.py")
@pytest.mark.parametrize(("objective", "loss"), [("rerank", "listwise"), ("rerank_score", "pairwise")])
def test_rerankers_are_trained_and_measured(with_weights, write_jsonl, tmp_path, objective, loss):
    rows = [{"query": f"find {i}", "positive": f"box {i}", "negative": [f"box {i + 1}", f"bag {i}"]} for i in range(16)]
    data, held_out = write_jsonl(rows[:12]), write_jsonl(rows[12:], "held_out.jsonl")
    settings = {"objective": objective, "rerank_loss": loss, "data": (data,), "eval_data": (held_out,), "steps": 3}
    summary = train(with_weights(**settings, seq_len=256))
    values = read_metrics(tmp_path / "run")
    found = evaluate(adapter=summary.adapter, data=[held_out])
    assert found["ndcg@10"] == pytest.approx(values["eval_ndcg@10"])


@pytest.mark.parametrize(
    ("settings", "row"),
    [
        ({"objective": "classify"}, {"text": "a", "label": 1}),
        ({"objective": "rerank"}, {"query": "a", "document": "b", "label": 0.5}),
        ({"objective": "embed", "embed_loss": "cosent"}, {"sentence1": "a", "sentence2": "b", "score": 4.5}),
        ({"objective": "reward"}, {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.25}),
    ],
)
def test_numbers_of_tables_are_those_of_json(make_config, write_jsonl, tmp_path, settings, row):
    rows = [row, row | {list(row)[-1]: 0}]
    lines = [",".join(map(str, line)) for line in ([*row], *(each.values() for each in rows))]
    (tmp_path / "rows.csv").write_text("".join(f"{line}\n" for line in lines))
    paths = write_jsonl(rows, "rows.jsonl"), str(tmp_path / "rows.csv")
    ours, table = (resolve(make_config(data=(path,), **settings)).data.train.store for path in paths)
    assert ours.info["digest"] == table.info["digest"]


def test_dimensions_that_embeddings_do_not_have_are_refused(with_weights, write_jsonl):
    data = (write_jsonl([{"query": "a", "positive": "b"}]),)
    with pytest.raises(ValueError, match=r"--matryoshka-dims 64: embeddings have 32 dimensions"):
        train(with_weights(objective="embed", data=data, matryoshka_dims=(16, 64)))


@pytest.mark.parametrize(
    ("objective", "messages", "named"),
    [
        ("embed", SWIFT, {"query": "a", "positive": "b", "negative": ["c", "d"]}),
        (
            "rerank",
            SWIFT | {"messages": [said("Say so.", "system"), said("a")], "negative_messages": None},
            {"query": "a", "instruction": "Say so.", "positive": ["b"]},
        ),
    ],
)
def test_rows_of_messages_are_those_of_their_texts(make_config, write_jsonl, objective, messages, named):
    paths = [write_jsonl([row] * 2, f"{name}.jsonl") for name, row in (("messages", messages), ("named", named))]
    stores = [resolve(make_config(data=(path,), objective=objective)).data.train.store for path in paths]
    assert stores[0].info["digest"] == stores[1].info["digest"]


@pytest.mark.parametrize(
    ("objective", "row", "message"),
    [
        ("embed", {"query": "a", "positive": "b", "negative": "b"}, "a negative is equal to the positive"),
        ("embed", {"query": "a", "positive": " "}, "'positive' must be a text, got an empty text"),
        ("embed", {"query": "a"}, "a row of texts needs"),
        ("embed", {"sentence1": "a", "sentence2": "b", "score": 1}, "score for --embed-loss cosent; its keys"),
        ("rerank", {"query": "a", "documents": ["b", ""], "labels": [1, 0]}, "document 2 is empty"),
        ("rerank", {"query": "a", "positive": "b", "negative": ["b"]}, "a negative is equal to the positive"),
        ("rerank", {"query": "a", "documents": ["b", "c"], "labels": [1]}, "'labels' must be a list of 2 numbers"),
        ("rerank", {"query": "a", "document": "b", "label": 2}, "a label is 2, expected 0 to 1"),
        ("rerank", {"query": " ", "document": "b", "label": 1}, "'query' must be a text, got an empty text"),
        ("rerank", {"query": 7, "document": "b", "label": 1}, "'query' must be a text, got int"),
        ("decide", {"state": "a", "questions": QUESTIONS, "gold": {}}, "question 'good': no gold answer"),
        ("embed", SWIFT | {"positive_messages": [[said("b")], [said("c")]]}, "a row has one positive, got 2"),
        ("embed", SWIFT | {"messages": [said("s", "system"), said("a")]}, "system message: take it out, and name"),
        ("embed", SWIFT | {"positive_messages": [[said("b"), said("c")]]}, "'positive_messages' must have one message"),
        ("embed", SWIFT | {"positive_images": ["a.png"]}, "'positive_images' are not read beside messages"),
        ("rerank", SWIFT | {"positive_messages": "{}"}, "'positive_messages' must be a list of lists of messages"),
    ],
)
def test_bad_rows_are_named_before_training(with_weights, write_jsonl, objective, row, message):
    good = {
        "embed": {"query": "a", "positive": "c"},
        "rerank": {"query": "a", "document": "c", "label": 1},
        "decide": decisions(1)[0],
    }[objective]
    path = write_jsonl([good, row], "rows.jsonl")
    with pytest.raises(ValueError, match=rf"rows.jsonl:2: .*{message}"):
        train(with_weights(objective=objective, data=(path,), steps=1))
