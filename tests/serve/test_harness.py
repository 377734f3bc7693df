"""Scores of continuations, and lm-evaluation-harness on a task of its own."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue import commands
from jaxglue.data.batch import Batch
from jaxglue.generation.assistant import Assistant
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.scoring import ContinuationScorer
from jaxglue.ops.segments import pack_segments
from jaxglue.serve.config import EvaluateConfig
from jaxglue.serve.harness import HarnessModel, check_harness

TASK = """
task: local_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}} "
doc_to_target: "{{{{answer}}}}"
doc_to_choice: ["one", "two", "three"]
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def assistant(folders):
    return Assistant(EvaluateConfig(model=folders[0], adapter=folders[1], tasks=("x",)))


def expected(assistant, context, continuation):
    """Score tokens one sequence at a time through the model's own call."""
    scorer = ContinuationScorer(assistant)
    tokens = np.array([context + continuation[:-1]])
    T = tokens.shape[1]
    targets = np.array([(context + continuation)[1:]])
    segments = pack_segments([[T]], seq_len=T)
    batch = Batch(tokens=tokens, targets=targets, loss_weights=jnp.ones((1, T)), segments=segments)
    losses, best = jax.device_get(scorer._executor.token_scores(*scorer._trees, jax.device_put(batch)))
    own = slice(T - len(continuation), T)
    return -losses[0, own].sum(), (best == targets)[0, own].all()


def test_packed_scores_equal_single_ones(assistant):
    rng = np.random.default_rng(0)
    pairs = [
        (rng.integers(0, 200, size=context).tolist(), rng.integers(0, 200, size=length).tolist())
        for context, length in [(1, 1), (5, 3), (120, 7), (200, 2), (2, 30), (3, 1)]
    ]
    found = ContinuationScorer(assistant).score(pairs)
    for pair, (score, greedy) in zip(pairs, found, strict=True):
        wanted, is_greedy = expected(assistant, *pair)
        assert score == pytest.approx(wanted, rel=1e-4)
        assert greedy == is_greedy
    assert ContinuationScorer(assistant).score([]) == []
    assert ContinuationScorer(assistant).score([([1], [])]) == [(0.0, True)]


def test_exact_scores_do_not_depend_on_what_shares_their_row(folders):
    config = EvaluateConfig(model=folders[0], adapter=folders[1], tasks=("x",), dtype="bfloat16", exact=True)
    scorer, rng = ContinuationScorer(Assistant(config)), np.random.default_rng(0)
    pairs = [
        (rng.integers(0, 200, size=context).tolist(), rng.integers(0, 200, size=length).tolist())
        for context, length in [(5, 3), (120, 7)]
    ]
    together = scorer.score(pairs)
    assert [scorer.score(pairs[1:])[0], *scorer.score(pairs[::-1])][::2] == [together[1], together[0]]
    assert scorer.score([pairs[0]]) == together[:1]


def test_greedy_answers_are_recognized(assistant):
    model = HarnessModel(assistant)
    tokens = model.tok_encode("What is 1 plus 2?")
    stream = assistant.engine.stream(
        assistant.adapter, assistant.frozen, tokens, SamplingConfig(temperature=0, max_tokens=4), ()
    )
    answer = list(stream)
    pairs = [(tokens, answer), (tokens, [answer[0], answer[0] ^ 1])]
    (score, greedy), (_, other) = ContinuationScorer(assistant).score(pairs)
    assert greedy and score < 0 and not other


def test_contexts_beyond_the_limit_lose_their_beginning(assistant):
    scorer = ContinuationScorer(assistant)
    scorer.limit = 8
    long, short = list(range(50, 70)), list(range(63, 70))
    assert scorer.score([(long, [1, 2])]) == scorer.score([(short, [1, 2])])
    with pytest.raises(ValueError, match="a continuation has 9 tokens, the model's limit is 8"):
        scorer.score([([1], list(range(9)))])


def test_answers_end_before_a_stop_text(assistant):
    model = HarnessModel(assistant)
    (whole,) = model.generate_until([SimpleNamespace(args=("Hello", {"max_gen_toks": 12}))])
    stop = whole[len(whole) // 2 :][:2]
    limits = {"until": [stop], "max_gen_toks": 12}, {"max_gen_toks": 12}
    cut, uncut = model.generate_until([SimpleNamespace(args=("Hello", options)) for options in limits])
    assert uncut == whole
    assert cut == whole[: whole.index(stop)]


def test_missing_package_is_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"jaxglue evaluate needs lm-evaluation-harness: pip install '\.\[eval"):
        check_harness()


def test_settings_are_checked(folders):
    assert EvaluateConfig(model=folders[0], tasks=("a, b", "c")).tasks == ("a", "b", "c")
    with pytest.raises(ValueError, match="name tasks with --tasks, or files of rows"):
        EvaluateConfig(model=folders[0], tasks=(",",))


@pytest.fixture
def local_tasks(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = [{"question": f"Which is {word}?", "answer": word} for word in ("one", "two", "three")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "sums.yaml").write_text(TASK.format(data=tmp_path / "rows.jsonl"))
    (tasks / "text.yaml").write_text(
        f"task: local_text\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}}}\n"
        "test_split: test\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{question}}'\n"
        "metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]\n"
    )
    return tasks


def test_harness_runs_local_tasks(folders, local_tasks, tmp_path, capsys):
    pytest.importorskip("lm_eval")
    output = tmp_path / "results.json"
    flags = f"--model {folders[0]} --adapter {folders[1]} --tasks local_sums,local_text --include-path {local_tasks}"
    commands.main(["evaluate", *flags.split(), "--output", str(output)])
    results = json.loads(output.read_text())["results"]
    assert 0 <= results["local_sums"]["acc,none"] <= 1
    assert results["local_text"]["word_perplexity,none"] > 1
    assert "local_sums  acc" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        commands.main(["evaluate", "--model", str(folders[0]), "--tasks", "no_such_task"])
    assert "lm-evaluation-harness knows no no_such_task" in capsys.readouterr().err
