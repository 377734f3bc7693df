"""Rewards: functions of files in processes with limits, named with their rows where they fail, and shipped ones."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from selection import repeat

from jaxglue.rl import checks
from jaxglue.rl.config import RolloutConfig
from jaxglue.rl.given import named_functions
from jaxglue.rl.process import print_lines
from jaxglue.rl.prompts import Prompt
from jaxglue.rl.rewards import Judge, Written, parse_reward
from jaxglue.rl.sampler import Sample

FILE = """
import asyncio
import json
import os
import signal
import subprocess
import sys
import time

print("printed while it is imported")


def single(prompt, completion, wanted, scale="1"):
    print("printed while it judges")
    return None if completion == "skip" else float(scale) * (completion == wanted)


def trl(prompts, completions, completion_ids, wanted, **columns):
    assert [p[0]["content"] for p in prompts] == ["say a"] * 3 and columns["number"] == [7] * 3
    return [len(ids) + (c[0]["content"] == w) for c, ids, w in zip(completions, completion_ids, wanted)]


def any_names(*values, **columns):
    return [float(len(ids)) for ids in columns["completion_ids"]]


def ids_alone(completion_ids, **columns):
    return [len(ids) + len(columns["completions"]) for ids in completion_ids]


def of_a_column(completion, messages="none"):
    return len(messages)


async def reply(messages, wanted):
    return wanted + messages[-1]["content"]


def parrot(messages):
    return messages[-1]


def half(messages):
    return "\\ud83d"


def conversation(completion, messages):
    return 1


def tool(messages, last):
    if last:
        return 0.25
    return [{"role": "tool", "content": messages[-1]["content"]}] * 2 if len(messages) == 2 else ["no message"]


async def later(completion):
    await asyncio.sleep(0.01)
    return 1.5


async def all_later(completions, **columns):
    return [2.5] * len(completions)


def few(completions, **columns):
    return [1.0]


def nan(completion):
    return float("nan")


def wrong(completion):
    return {}["key"]


def unread(completion):
    return json.loads("{")


def slow(completion):
    time.sleep(30)


def large(completion):
    return len(bytes(2**33))


def program(completion):
    return len(subprocess.run("cat", capture_output=True).stdout) + len(sys.stdin.read())


def leave(completion):
    os._exit(3)


def leave_by_exit(completion):
    sys.exit(3)


def fault(completion):
    os.kill(os.getpid(), signal.SIGSEGV)


def killed(completion):
    os.kill(os.getpid(), signal.SIGKILL)


def forks(completion):
    copy = os.fork()
    if copy:
        os.waitpid(copy, 0)
    return {"a": 1, "b": 2, "skip": 3}[completion] if copy else 100


def forks_later(completion):
    if os.fork() == 0:
        time.sleep(0.5)
    return {"a": 1, "b": 2, "skip": 3}[completion]


def slow_for_b(completion):
    time.sleep(30 if completion == "b" else 0)
    return 1


def named_scores(completions, **columns):
    return dict.fromkeys(("1", "2", "3"), 0)


def text_of_numbers(completions, **columns):
    return "123"


def texts(completions, **columns):
    return ["1", "2", "3"]


def a_dict(completion):
    return {"score": 1}


def apart(completion, file):
    subprocess.Popen(["sh", "-c", f"echo $$ > {file}; exec sleep 300"], start_new_session=True)
    time.sleep(30)


def apart_and_leaves(completion, file):
    subprocess.Popen(["sh", "-c", f"echo $$ > {file}; exec sleep 300"], start_new_session=True)
    while not os.path.exists(file) or not open(file).read():
        time.sleep(0.01)
    os._exit(1)


def child(completion, file):
    subprocess.run(["sh", "-c", f"echo $$ > {file}; exec sleep 300"])
"""


def group(*texts: str) -> Written:
    prompt = Prompt("prompts.jsonl:4", [{"role": "user", "content": "say a"}], [5, 6], {"wanted": "a", "number": 7})
    samples = [Sample(np.arange(n, dtype=np.int32), np.zeros(n), True, text) for n, text in enumerate(texts, 1)]
    return Written(prompt, samples)


@pytest.fixture
def score(tmp_path):
    """Score answers a, b and skip by functions of a file."""
    file = tmp_path / "rewards.py"
    file.write_text(FILE)

    def run(*names: str, **limits):
        config = RolloutConfig(reward=tuple(f"{file}:{name}" for name in names), reward_workers=1, **limits)
        with closing(Judge(config)) as judge:
            judge.check(["wanted", "number"])
            return judge.score([group("a", "b", "skip")]).tolist()

    return run


def test_functions_judge_one_answer_or_all_at_once_or_none(score):
    found = score("single?scale=2", "trl", "later", "all_later")
    assert np.array_equal(found, [[[2, 2, 1.5, 2.5], [0, 2, 1.5, 2.5], [np.nan, 3, 1.5, 2.5]]], equal_nan=True)


def test_functions_of_any_names_judge_all_answers_at_once_and_messages_are_a_column(score):
    assert score("any_names", "ids_alone", "of_a_column") == [[[1, 4, 4], [2, 5, 4], [3, 6, 4]]]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("few", "few of prompts.jsonl:4: expected a reward for each of 3 answers, got 1"),
        ("nan", "nan of prompts.jsonl:4: expected finite numbers or None, got nan"),
        ("conversation", "conversation: ValueError: nothing is given for its parameter messages; there are prompt, "),
        ("wrong", r"wrong of prompts.jsonl:4: KeyError: 'key' \(rewards.py:\d+\)"),
        ("unread", r"unread of prompts.jsonl:4: JSONDecodeError: .* \(rewards.py:\d+\)"),
        ("leave", "leave of prompts.jsonl:4: it ended its process with status 3"),
        ("leave_by_exit", "leave_by_exit of prompts.jsonl:4: SystemExit: 3"),
        ("fault", "fault of prompts.jsonl:4: its process was ended by SIGSEGV"),
        ("killed", "killed of prompts.jsonl:4: its process was killed 3 times in a row"),
        ("named_scores", "named_scores of prompts.jsonl:4: TypeError: expected a list of numbers or None, got {'1"),
        (
            "text_of_numbers",
            "text_of_numbers of prompts.jsonl:4: TypeError: expected a list of numbers or None, got '1",
        ),
        ("texts", "texts of prompts.jsonl:4: TypeError: texts: expected a number or None, got '1'$"),
        ("a_dict", "a_dict of prompts.jsonl:4: TypeError: "),
        ("absent", "has no function or class 'absent'; it has .*single"),
        ("single?scal=2", "rewards.py:single: ValueError: no parameter scal; it has prompt, completion, wanted, scale"),
    ],
)
def test_a_failing_function_is_named_with_its_row(score, name, text):
    with pytest.raises(ValueError, match=text):
        score(name)


@pytest.mark.parametrize(("name", "limits"), [("slow", {"reward_timeout": 0.5}), ("large", {"reward_memory": 1.0})])
def test_answers_beyond_a_limit_have_no_reward(score, name, limits, caplog):
    assert np.array_equal(score(name, "later", **limits), [[[np.nan, 1.5]] * 3], equal_nan=True)
    assert f"reward {name} of prompts.jsonl:4 reached its limit" in caplog.text


def test_a_limit_of_time_begins_anew_after_each_answer_beyond_it(score):
    began = time.monotonic()
    score("slow", reward_timeout=0.2)
    assert time.monotonic() - began < 25  # an import may take two minutes, and has no part in it


def test_functions_and_their_programs_read_no_requests(score):
    assert score("program", "later", reward_timeout=20) == [[[0.0, 1.5]] * 3]


@pytest.mark.parametrize("name", [repeat("child"), repeat("apart"), "apart_and_leaves"])
def test_programs_of_a_function_end_with_it_whatever_their_session(score, tmp_path, name):
    with suppress(ValueError):  # of one that leaves
        score(f"{name}?file={tmp_path / 'pid'}", reward_timeout=1)
    process = Path("/proc") / (tmp_path / "pid").read_text().strip()
    deadline = time.monotonic() + 10
    while process.exists() and "Z" not in (process / "stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_copies_of_a_process_that_a_function_forks_answer_nothing(score):
    assert score("forks", "later", "forks_later") == [[[1, 1.5, 1], [2, 1.5, 2], [3, 1.5, 3]]]


def test_an_answer_beyond_its_time_takes_none_of_the_others(score, caplog):
    assert np.array_equal(score("slow_for_b", reward_timeout=0.5), [[[1], [np.nan], [1]]], equal_nan=True)
    assert "reached its limit of 0.5 s with 1 of 3 answers; it gives none" in caplog.text


def test_what_functions_print_steers_no_terminal(capfd):
    printing = [sys.executable, "-c", r"import sys; sys.stderr.write('\x1b]0;title\x07a\n')"]
    print_lines(subprocess.Popen(printing, stderr=subprocess.PIPE))
    assert r"\x1b]0;title\x07a" in (said := capfd.readouterr().err) and "\x1b" not in said


def test_a_file_that_reaches_a_limit_when_it_is_imported_is_refused(tmp_path):
    (tmp_path / "large.py").write_text("held = bytes(2**33)\n\n\ndef judge(completion):\n    return 1.0\n")
    config = RolloutConfig(reward=(f"{tmp_path}/large.py:judge",), reward_workers=1, reward_memory=1.0)
    with (
        closing(Judge(config)) as judge,
        pytest.raises(ValueError, match=r"judge: its import reached its limit of mem"),
    ):
        judge.check(["wanted", "number"])


def test_a_file_that_changed_within_a_second_is_read_anew(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    file, found = tmp_path / "changing.py", []
    for number in (1, 2):
        file.write_text(f"def judge(completion):\n    return {number}\n")
        os.utime(file, (1e9, 1e9))
        with closing(Judge(RolloutConfig(reward=(f"{file}:judge",), reward_workers=1))) as judge:
            found.append(judge.score([group("a")]).tolist())
    assert found == [[[[1]]], [[[2]]]] and not (tmp_path / "__pycache__").exists()


def test_environments_reply_also_when_async_and_are_named_by_their_flag(tmp_path):
    (tmp_path / "rewards.py").write_text(FILE)
    config = RolloutConfig(environment=f"{tmp_path}/rewards.py:reply", reward_workers=1)
    said = {"role": "assistant", "content": "!"}

    def replies(judge, *said, last=False):
        return judge.begin(group().prompt, "").reply([*group().prompt.content, *said], last=last)

    with closing(Judge(config)) as judge:
        judge.check(["wanted", "number"])
        assert replies(judge, said).messages == [{"role": "user", "content": "a!"}]
    several = Judge(replace(config, environment=f"{tmp_path}/rewards.py:tool"))
    with closing(several) as judge:
        assert replies(judge, said).messages == [{"role": "tool", "content": "!"}] * 2
        assert replies(judge, said, last=True).reward == 0.25
        with pytest.raises(ValueError, match=r"prompts.jsonl:4 failed: expected a text, .* got \['no message'\]"):
            replies(judge, said, said)
    parrot, message = (
        replace(config, environment=f"{tmp_path}/rewards.py:parrot"),
        "a role other than assistant, .* got",
    )
    with closing(Judge(parrot)) as judge, pytest.raises(ValueError, match=message):
        replies(judge, said)
    half = replace(config, environment=f"{tmp_path}/rewards.py:half")
    with closing(Judge(half)) as judge, pytest.raises(ValueError, match=r"prompts.jsonl:4 failed: a text holds half"):
        replies(judge, said)
    absent = replace(config, environment=f"{tmp_path}/rewards.py:absent")
    with pytest.raises(ValueError, match=r"--environment .*has no function or class 'absent'"):
        Judge(absent)
    with pytest.raises(ValueError, match=r"--environment exact: expected a class or function of a file"):
        Judge(replace(config, environment="exact"))


def test_rewards_of_one_function_have_names_of_their_own():
    twice = ("regex?pattern=^a", "regex?pattern=b$&as=end&weight=2", "model?folder=x", "model?folder=y&as=second")
    judge = Judge(RolloutConfig(reward=twice[:2]))
    with closing(judge):
        assert judge.names == ["regex", "end"] and judge.weights.tolist() == [1, 2]
        judge.check([])
        assert judge.score([group("a", "ab", "b")]).tolist() == [[[1, 0], [1, 1], [0, 1]]]
    assert [(spec.name, str(spec.folder)) for spec in map(parse_reward, twice[2:])] == [("model", "x"), ("second", "y")]
    with pytest.raises(ValueError, match=r"two are named regex, .* let &as= name one"):
        Judge(RolloutConfig(reward=(twice[0], twice[0])))


def test_functions_given_in_python_judge_and_reply_in_this_process():
    seen = []

    def judged(completion, wanted):
        seen.append(completion)
        return 0.5 if completion == wanted else None

    async def said(messages, last):
        return f"{last} {messages[-1]['content']}"

    with named_functions({"reward_funcs": [judged, "exact"], "environment": said, "steps": 3}) as settings:
        assert settings == {"reward_funcs": ["given:judged", "exact"], "environment": "given:said", "steps": 3}
        config = RolloutConfig(reward=("given:judged?weight=2",), environment="given:said", reward_workers=1)
        with closing(Judge(config)) as judge:
            judge.check(["wanted"])
            assert np.array_equal(judge.score([group("a", "b")])[0, :, 0], [0.5, np.nan], equal_nan=True)
            said = [*group().prompt.content, {"role": "assistant", "content": "!"}]
            reply = judge.begin(group().prompt, "").reply(said, last=False)
            assert reply.messages == [{"role": "user", "content": "False !"}] and seen == ["a", "b"]
            with pytest.raises(ValueError, match=r"--reward judged: .* nothing is given for its parameter wanted"):
                judge.check([])
    both = {"reward_funcs": [judged, "regex?pattern=a"], "reward_weights": [0.5, 2]}
    with named_functions(both) as settings:
        assert settings == {"reward_funcs": ["given:judged?weight=0.5", "regex?pattern=a&weight=2"]}
    with pytest.raises(ValueError, match="expected one for each of 2"), named_functions(both | {"reward_weights": [1]}):
        pass
    other = type("judged", (), {"__call__": judged})()
    with (
        pytest.raises(ValueError, match="two functions are named judged"),
        named_functions({"reward": [judged, other]}),
    ):
        pass
    with named_functions({"reward": other}) as settings:  # the first one is forgotten
        assert settings == {"reward": "given:judged"}
    config = replace(config, environment=None)
    with closing(Judge(config)) as judge, pytest.raises(ValueError, match="judged was given as a function: give it a"):
        judge.check(["wanted"])


def test_digests_tell_functions_given_in_python_apart():
    def judged(completion):
        return 1.0 if completion in {"a", "b"} else sum(0.0 for _ in "x")

    def digest(function) -> str:
        function.__name__ = "judged"
        with named_functions({"reward": function}), closing(Judge(RolloutConfig(reward=("given:judged",)))) as judge:
            return judge.digests["judged"]

    again = eval(f"lambda completion: {1.0}"), eval(f"lambda completion: {1.0}"), eval("lambda completion: 2.0")
    first, same, other = map(digest, again)
    assert first == same != other != digest(judged) != ""


def test_mathematics_needs_a_column_to_compare_with():
    message = "--reward math needs a column answer or solution; rows have target"
    with closing(Judge(RolloutConfig(reward=("math",)))) as judge, pytest.raises(ValueError, match=message):
        judge.check(["target"])


def test_shipped_rewards(tmp_path):
    assert checks.exact(" 7\n", 7) == 1 and checks.exact("The sum is 7", 7) == 0
    assert checks.exact("7", 7.0) == checks.exact("7.0", 7.0) == 1 and checks.exact("0.0000001", 1e-7) == 1
    assert checks.regex("<think>\n1</think>2", "^<think>.*</think>.+$") == 1 and checks.regex("2", "^a") == 0
    assert [checks.length([0] * n, "4", "8") for n in (3, 4, 6, 8, 20)] == [0, 0, -0.5, -1, -1]
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "object", "required": ["a"]}))
    judged = {
        '{"a": 1}': 1,
        '```json\n{"a": 1}```': 1,
        '<think>{"b": 1}</think>\n{"a": 1}': 1,
        '{"a": 1}</think>{"b": 1}': 0,
        '<think>{"a": 1}': 0,
        '{"a": NaN}': 0,
        "[" * 100_000: 0,
    }
    assert {text: checks.json_schema(text, str(schema)) for text in judged} == judged


def test_exact_and_mathematics_judge_what_follows_the_thinking():
    assert [checks.exact(text, "7") for text in ("<think>7</think>8", "7</think>\n7 ", "<think>7")] == [0, 1, 0]
    assert checks.math("<think>\\boxed{7}</think> I do not know.", "7") == 0
    assert checks.math("<think>\\boxed{8}</think>\\boxed{7}", "7") == 1


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "", "  ", True, ["7"], {"a": 7}])
@pytest.mark.parametrize("name", ["exact", "math"])
def test_rows_without_a_text_or_number_to_compare_with_are_refused(name, value):
    prompts = [Prompt(f"data.jsonl:{row}", "a", [5], {"answer": answer}) for row, answer in enumerate(["7", value])]
    message = f"--reward {name}, data.jsonl:1: the column .* has .*, and an answer is compared with a text or a number"
    with closing(Judge(RolloutConfig(reward=(name,), reward_workers=1))) as judge:
        judge.check(["answer"])
        judge.check_rows(prompts[:1])
        with pytest.raises(ValueError, match=message):
            judge.check_rows(prompts)


def test_rows_without_a_column_of_a_function_are_named(tmp_path):
    (tmp_path / "rewards.py").write_text(FILE)
    rows = [Prompt(f"data.jsonl:{row}", "a", [5], columns) for row, columns in enumerate([{"wanted": "a"}, {}])]
    with closing(Judge(RolloutConfig(reward=(f"{tmp_path}/rewards.py:single",), reward_workers=1))) as judge:
        judge.check(["wanted"])
        with pytest.raises(ValueError, match=r"single, data.jsonl:1: ValueError: nothing is given for its .*wanted"):
            judge.check_rows(rows)


GOLDS = {  # a column's value: answers that are right, and answers that are wrong
    "3\\sqrt{13}": (["So it is $\\boxed{3\\sqrt{13}}$.", "3\\sqrt{13}"], ["\\boxed{3}", "3"]),
    "6 + 9i": (["\\boxed{6+9i}"], ["\\boxed{9}", "9"]),
    "p - q": (["\\boxed{p - q}"], ["\\boxed{q}"]),
    "[2,5)": (["\\boxed{[2,5)}"], ["\\boxed{5}"]),
    "\\text{Evelyn}": (["\\boxed{\\text{Evelyn}}", "Evelyn"], ["\\boxed{\\text{Bob}}", "Bob"]),
    "2, 3": (["\\boxed{3, 2}"], ["3"]),
    "\\$36": (["$36", "36 dollars"], ["35"]),
    "3 + 4 is 7, and 65 more are\n#### 72": (["The answer is 72."], ["\\boxed{7}"]),
    "5 apples": (["He has 5 apples.", "5"], ["\\boxed{4}"]),
    "18": (["18", "In total it takes 18 days."], ["8"]),
    3: (["\\boxed{3}"], ["3\\sqrt{13}", "1" * 5000, "\\frac{" * 200]),
    1e-7: (["\\boxed{0.0000001}"], ["\\boxed{1}"]),
}


@pytest.mark.parametrize("gold", [*GOLDS])
def test_mathematics_is_read_as_a_whole_with_or_without_marks(gold):
    right, wrong = GOLDS[gold]
    assert [checks.math(answer, gold) for answer in (*right, *wrong)] == [1.0] * len(right) + [0.0] * len(wrong)


def test_special_tokens_around_thinking_separate_it_from_the_answer(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    tokens = tokenizer.encode("[THINK]a[/THINK]b", add_special_tokens=False)
    answer = Sample(np.array(tokens, np.int32), np.zeros(len(tokens)), True, "ab")
    with closing(Judge(RolloutConfig(reward=("exact",), reward_workers=1))) as judge:
        judge.load_models(tokenizer)
        asked = Written(Prompt("data.jsonl:1", "a", [5], {"answer": "b"}), [answer])
        assert judge.score([asked]).tolist() == [[[1]]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exat", "expected a function of a file, as in rewards.py:exat, or one of exact, math"),
        ("exact?weight=much", "weight: expected a number"),
        ("exact?weight=nan", "weight: expected a number"),
        ("regex?pattern=(", "unterminated subpattern"),
        (":judge", "expected a file and a function of it"),
        ("rewards.py:", "expected a file and a function of it"),
        ("length?soft=nan&hard=8", "expected numbers of tokens with soft ≤ hard"),
        ("length?soft=9&hard=8", "expected numbers of tokens with soft ≤ hard"),
        ("length?soft=4&hard=many", "could not convert string to float: 'many'"),
        ("json_schema?schema=absent.json", "no such file: absent.json"),
        ("model", "name the reward model's folder"),
        ("model?folder=a&weigth=2", "unknown weigth: a reward model has a folder and a weight"),
    ],
)
def test_malformed_names_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_reward(text)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "is no JSON"),
        ('{"type": 7}', r"is no JSON schema: \$.type: 7 is not"),
        ('{"$ref": "https://example.com/schema"}', r"\$ref https://example.com/schema is not in the file"),
        ('{"properties": {"a": {"$ref": "#/$defs/b"}}}', r"\$ref #/\$defs/b is not in the file"),
    ],
)
def test_schemas_are_checked_before_an_answer_is(tmp_path, schema, message):
    (tmp_path / "schema.json").write_text(schema)
    with pytest.raises(ValueError, match=message):
        parse_reward(f"json_schema?schema={tmp_path}/schema.json")


def test_digests_are_of_all_files_that_judge(tmp_path):
    schema, file = tmp_path / "schema.json", tmp_path / "rewards.py"
    schema.write_text('{"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}')
    file.write_text("import helper\n\ndef judge(completion):\n    from package import inner\n    return 1.0\n")
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "package").mkdir()
    inner = tmp_path / "package" / "inner.py"
    (tmp_path / "package" / "__init__.py").write_text("")
    inner.write_text("from .. import none\nfrom . import __init__\n")

    def digests() -> dict[str, str]:
        with closing(Judge(RolloutConfig(reward=(f"{file}:judge", f"json_schema?schema={schema}")))) as judge:
            return judge.digests

    before = digests()
    assert before.keys() == {str(path) for path in (file, schema, inner, inner.parent / "__init__.py")} | {
        str(tmp_path / "helper.py")
    }
    for path in map(Path, before):
        changed = path.read_text()
        path.write_text(changed + "\n")
        assert {name for name, digest in digests().items() if digest != before[name]} == {str(path)}
        path.write_text(changed)


def test_the_end_of_a_run_ends_rewards_under_way(tmp_path, caplog):
    """As after Ctrl-C: the judge is closed while a function runs."""
    begun = tmp_path / "begun"
    (tmp_path / "endless.py").write_text(
        "import pathlib, time\n\n\ndef endless(completion):\n"
        f"    pathlib.Path({str(begun)!r}).touch()\n    time.sleep(60)\n"
    )
    config = RolloutConfig(reward=(f"{tmp_path}/endless.py:endless",), reward_workers=1, reward_timeout=20)
    judge = Judge(config)
    judge.check(["wanted", "number"])
    with ThreadPoolExecutor(1) as threads:
        scored = threads.submit(judge.score, [group("a")])
        while not begun.exists():
            time.sleep(0.05)
        judge.close()
        assert np.isnan(scored.result()).all()
    assert "reached" not in caplog.text
