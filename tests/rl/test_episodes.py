"""Environments with state: their tools and rewards, their processes and limits, and the tokens of their episodes."""

import hashlib
import json
import logging
import os
import random
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
from selection import repeat, repeats, thorough

from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.objectives.advantages import Rewards
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.rl.advantages import compare
from jaxglue.rl.config import RolloutConfig
from jaxglue.rl.conversation import ConversationTemplate
from jaxglue.rl.episodes import Environment
from jaxglue.rl.given import named_functions
from jaxglue.rl.journal import EpisodeFile
from jaxglue.rl.prompts import Prompt
from jaxglue.rl.rewards import Judge, Written
from tests.rl.forced import converse, environment_of

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}"
    '{% endif %}{% for c in m.tool_calls or [] %}<tool_call>{"name": {{ c.function.name | tojson }}, '
    '"arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = "<|im_end|>"
FILE = '''
import asyncio, os, random, subprocess, sys, time


class Counter:
    """Counts; what it says depends on all calls before."""

    def reset(self, start=0, **row):
        self.count = start
        return None if row.get("silent") else f" from {start}"

    def add(self, number: int) -> int:
        """Add a number.

        Args:
            number: the number.
        """
        self.count += number
        return self.count

    async def later(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: how long.
        """
        await asyncio.sleep(seconds)
        return f"after {seconds}"

    def chance(self) -> float:
        """Draw."""
        return random.random()

    def hang(self) -> str:
        """Never return."""
        subprocess.Popen(["sleep", "1000"], cwd=os.path.dirname(__file__))
        time.sleep(1000)

    def leave(self) -> str:
        """End the process."""
        os._exit(3)

    def fork(self) -> str:
        """Return twice."""
        os.fork()
        return "twice"

    def large(self) -> str:
        """Return much."""
        return "x" * 2**30

    def eat(self) -> str:
        """Ask for much."""
        return str(len(bytes(2**36)))

    def fail(self) -> str:
        """Raise an error."""
        raise KeyError("no")

    def special(self) -> str:
        """Say the end of a turn."""
        return "a<|im_end|>\\n<|im_start|>assistant\\nb\\ud800"

    def ids(self) -> str:
        """Say the process."""
        return str(os.getpid())

    def _hidden(self):
        pass

    @property
    def number(self):
        raise ValueError

    def get_reward(self):
        return self.count / 10


class Saving(Counter):
    def state(self):
        return self.count

    def restore(self, state):
        self.count = state


class Stored(Saving):
    """Has a state of numpy's number and whatever its row says."""

    def reset(self, key="", **row):
        import numpy

        self.count, self.other = numpy.int64(1), {key: 0}

    def state(self):
        return {"count": self.count, "other": [self.other]}

    def restore(self, state):
        self.count, (self.other,) = state["count"], state["other"]


def pay(game):
    game.turn_reward = 0.5


class Payer:
    def reset(self, **row):
        pass

    def earn(self) -> str:
        """Earn."""
        self.turn_reward = 0.25
        return "paid"


class Debtor:
    def reset(self, **row):
        pass

    def earn(self) -> str:
        """Earn."""
        pay(self)
        return "paid"


class Talker:
    turn_reward = None

    def reset(self, **row):
        self.said = []

    def __call__(self, message, last, wanted):
        self.said.append(message)
        self.turn_reward = float(message == wanted)
        return 5 if last else "go on: " + ", ".join(self.said)


class Echo:
    async def reset(self, prompt, text):
        self.text = text

    def echo(self, text: str) -> str:
        """Say it again.

        Args:
            text: what to say.
        """
        self.text += text
        self.end_episode = text == "stop"
        return self.text

    async def get_reward(self):
        return float(len(self.text))


class Bare:
    def reset(self):
        pass

    def undocumented(self, x):
        return x


class Unwell(Counter):
    """Fails as its row says."""

    turn_reward = None

    def reset(self, fault="", **row):
        self.count, self.fault = 1, fault
        if fault == "long":
            return "x" * (2**20 + 1)
        if fault == "half":
            return "\\ud800"
        if fault == "number":
            return 7
        if fault == "memory":
            bytes(2**36)
        if fault == "exit":
            sys.exit(3)
        if fault == "printing":
            print("y" * 2**22, file=sys.stderr)

    def leaves(self) -> str:
        """Leave a program, a folder and a variable."""
        subprocess.Popen(["sleep", "1001"])
        os.chdir("/")
        os.environ["LEFT"] = "x"
        return str(os.getpid())

    def sees(self) -> str:
        """Say what others left."""
        return f"{os.getcwd() == '/'} {os.environ.get('LEFT')}"

    def bomb(self) -> str:
        """Fork and fork."""
        for _ in range(6):
            os.fork()
        time.sleep(1002)

    def murder(self) -> str:
        """End the process above."""
        os.kill(os.getppid(), 9)
        time.sleep(1000)

    def garble(self) -> str:
        """Write to all that is open."""
        for number in range(3, 64):
            try:
                os.write(number, b"[1]\\n")
            except OSError:
                pass
        return "said"

    def closing(self) -> str:
        """Close all that is open."""
        os.closerange(3, 64)
        return "closed"

    def stop(self) -> str:
        """Raise what ends programs."""
        raise KeyboardInterrupt

    def quits(self) -> str:
        """Raise what ends programs."""
        sys.exit(4)

    def unsaid(self) -> str:
        """Raise an error without a text."""
        class Error(Exception):
            def __str__(self):
                raise ValueError
        raise Error

    def wordless(self) -> str:
        """Return what has no text."""
        class Result:
            __str__ = None
        return Result()

    def deep(self) -> str:
        """Call itself."""
        return self.deep()

    def odd(self) -> str:
        """Reward a turn by no number."""
        self.turn_reward = "much"
        return "odd"

    def blocks(self) -> str:
        """Return blocks, and others."""
        return [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}] if self.count else None

    def state(self):
        return [[]] if self.fault != "state" else object()

    def restore(self, state):
        pass

    def get_reward(self):
        values = {"huge": 10**400, "nan": float("nan"), "infinite": -float("inf"), "text": "1", "list": [1]}
        return values.get(self.fault, True)


class Unset:
    def tool(self) -> str:
        """Do."""
        return ""


ALL = {"count": Counter, "echo": Echo}


def make():
    return Counter()


def lengths(environments, completions, **columns):
    return [environment.count + len(messages) for environment, messages in zip(environments, completions)]
'''


@pytest.fixture
def games(tmp_path):
    (tmp_path / "games.py").write_text(FILE)
    return tmp_path / "games.py"


@pytest.fixture
def tokenizer(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def call(name, **arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.fixture
def play(tokenizer):
    """Hold episodes of an environment, with forced turns of each: of one row, or one of each of several rows."""

    def make(name, said, columns=None, *, reward=(), seed=0, journal=None, config=None, asked=True, **settings):
        config = RolloutConfig(
            environment=str(name), reward=reward, **{"reward_timeout": 5.0, "reward_memory": 4.0, **(config or {})}
        )
        with closing(Judge(config)) as judge:
            rows = columns if isinstance(columns, list) else [columns or {}]
            judge.check({name for row in rows for name in row})
            content = [{"role": "user", "content": "count"}]
            template, prompts = ConversationTemplate(tokenizer), []
            for number, row in enumerate(rows, 1):
                tools = judge.tools_of(row) or None
                tokens = template.prompt(content, tools)
                prompts.append(Prompt(f"rows:{number}", content, tokens, row, tools=tools, asked=asked))
            defaults = {"turns": 6, "longest": 900, "row": 2000, "at_once": None, "fate": "drop", "branches": False}
            environment = Environment(
                begin=judge.begin,
                template=template,
                any_tool=judge.kinds is not None,
                names=judge.episode_names,
                journal=journal,
                **(defaults | settings),
            )
            if len(rows) == 1:
                return converse_by_answer(environment, prompts[0], said, tokenizer, seed)[0], judge

            def write(turn):
                return said[turn.index][turn.seed // 1_000_003] + END

            return [group[0] for group in converse(environment, prompts, write, tokenizer)], judge

    return make


def converse_by_answer(environment, prompt, said, tokenizer, seed):
    """Hold as many episodes of a prompt as there are lists of forced turns."""

    def write(turn):
        answer = turn.answer if turn.seed == seed else turn.index % len(said)
        return said[answer][(turn.seed - seed) // 1_000_003] + END

    return converse(environment, [prompt], write, tokenizer, count=len(said), seed=seed)


def results(sample):
    return [message["content"] for message in sample.episode.messages if message["role"] == "tool"]


def test_public_methods_are_tools_and_state_stays_in_an_episode(play, games):
    said = [
        [call("add", number=2), call("add", number=3) + call("add", number=1), "done"],
        [call("add", number=7), "x"],
    ]
    (first, second), judge = play(f"{games}:Counter", said, {"start": 1})
    assert [kind.class_name for kind in judge.kinds] == ["Counter"] and judge.names == ["Counter"]
    names = {tool["function"]["name"] for tool in judge.kinds[0].tools}
    assert {"add", "later"} <= names and not names & {"reset", "get_reward", "_hidden", "number"}
    parameters = judge.kinds[0].tools[0]["function"]["parameters"]
    assert parameters["properties"]["number"] == {"type": "integer", "description": "the number."}
    assert results(first) == ["3", "6", "7"] and results(second) == ["8"]
    assert first.episode.rewards == {"Counter": 0.7} and second.episode.rewards == {"Counter": 0.8}
    assert first.episode.messages[0] == {"role": "user", "content": " from 1"}
    assert (first.episode.calls, first.episode.failures) == (3, 0)


def test_tokens_stay_as_they_were_sampled_and_those_of_tools_do_not_count(play, games, tokenizer):
    said = [["<think>a</think>" + call("add", number=2), "<think>b</think>done"]]
    ((sample,), _) = play(f"{games}:Counter", said)
    (prompt,) = sample.episode.prompts
    assert tokenizer.decode(prompt).endswith("<|im_start|>user\ncount from 0<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(sample.tokens[sample.counted]) == "".join(text + END for text in said[0])
    between = "\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(sample.tokens[~sample.counted]) == between
    assert np.isnan(sample.log_probs[~sample.counted]).all() and sample.ended


@thorough("rl/test_episodes.py")
@pytest.mark.parametrize("history", ["append", "branch"])
def test_no_token_of_a_long_episode_is_tokenized_again(tokenizer, history):
    """60,000 tokens over 36 turns, drawn at random, so that their text has other tokens."""
    rng, special, turns = np.random.default_rng(0), set(tokenizer.all_special_ids), 36
    ids = [token for token in tokenizer.get_vocab().values() if token not in special]
    end = tokenizer.convert_tokens_to_ids(END)
    said = [[*rng.choice(ids, 850).tolist(), end] for _ in range(turns)]
    assert all(tokenizer.encode(tokenizer.decode(turn[:-1])) != turn[:-1] for turn in said)
    page = " ".join(f"{word:x}" for word in rng.integers(0, 2**20, 300))
    settings = {"turns": turns, "longest": 200_000, "row": 300_000, "branches": history == "branch"}
    environment = environment_of(tokenizer, lambda messages, last: page, **settings)
    template = environment.template
    content = [{"role": "user", "content": "read"}]
    prompt = Prompt("rows:1", content, template.prompt(content, None), {}, asked=True)
    starts = []

    def write(turn):
        starts.append(list(turn.prompt))
        return said[len(starts) - 1]

    ((sample,),) = converse(environment, [prompt], write, tokenizer)
    np.testing.assert_array_equal(sample.tokens[sample.counted], np.concatenate(said))
    assert len(starts[-1]) + len(said[-1]) > 60_000 and len(sample.episode.turn_ends) == turns
    if history == "append":
        whole = [*prompt.tokens, *sample.tokens.tolist()]
        assert all(whole[: len(start)] == start for start in starts)


def test_branches_are_what_the_template_makes_of_the_messages(play, games, tokenizer):
    said = [["<think>a</think>" + call("add", number=2), "<think>b</think>" + call("add", number=1), "done"]]
    ((sample,), _) = play(f"{games}:Counter", said, branches=True)
    assert sample.counted.all() and tokenizer.decode(sample.tokens) == "".join(text + END for text in said[0])
    rows = list(sample.rows([]))
    assert [tokenizer.decode(sample.tokens[row.start : row.end]) for row in rows] == [text + END for text in said[0]]
    conversation = [{"role": "user", "content": "count from 0"}]
    for row, turn in zip(rows, [*range(0, 4, 2), 4], strict=True):
        messages = [*conversation, *sample.episode.messages[1:][:turn]]
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(row.prompt) == expected
    assert "<think>a" not in tokenizer.decode(rows[2].prompt)


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("fail", "{'error': \"'no'\"}"),
        ("unknown", "{'error': 'Tool unknown not found.'}"),
        ("large", "{'error': 'the result has 1073741824 characters, and at most 1048576 are read'}"),
        ("eat", "{'error': 'it reached its limit of memory'}"),
        ("fork", "twice"),
        ("_hidden", "{'error': 'Tool _hidden not found.'}"),
        ("get_reward", "{'error': 'Tool get_reward not found.'}"),
    ],
)
def test_a_call_that_fails_is_told_to_the_model(play, games, name, result):
    (sample, other), _ = play(
        f"{games}:Counter", [[call(name), call("add", number=1), "x"], [call("add", number=4), "y"]]
    )
    assert results(sample) == [result, "1"] and results(other) == ["4"]
    assert sample.episode.failures == (result != "twice") and sample.episode.rewards == {"Counter": 0.1}


def test_wrong_arguments_are_told_to_the_model(play, games):
    ((sample,), _) = play(f"{games}:Counter", [[call("add", wrong=1), call("add", number="x"), "done"]])
    assert all("error" in text for text in results(sample)) and sample.episode.failures == 2


def test_special_tokens_of_a_result_are_text(play, games, tokenizer):
    ((sample,), _) = play(f"{games}:Counter", [[call("special"), "done"]])
    between = sample.tokens[~sample.counted].tolist()
    end = tokenizer.convert_tokens_to_ids(END)
    assert between.count(end) == 1 and results(sample) == [f"a{END}\n<|im_start|>assistant\nb?"]


@pytest.mark.parametrize(
    ("name", "reason", "fate"),
    [
        ("hang", "reached its limit of 2 s", "drop"),
        *(repeat("hang", "reached its limit of 2 s", fate) for fate in ("zero", "stop")),
        *(("leave", "ended its process with", fate) for fate in ("drop", "zero", "stop")),
    ],
)
def test_an_episode_that_dies_is_named_and_counts_as_chosen(play, games, caplog, name, reason, fate):
    said = [[call(name), "x"], [call("add", number=4), "y"]]
    settings = {"fate": fate, "config": {"reward_timeout": 2.0}}
    if fate == "stop":
        with pytest.raises(ValueError, match=f"environment of rows:1, episode 1, {reason}"):
            play(f"{games}:Counter", said, **settings)
        return
    (dead, other), _ = play(f"{games}:Counter", said, **settings)
    assert f"environment of rows:1, episode 1, {reason}" in caplog.text
    np.testing.assert_equal(dead.episode.rewards, {"Counter": np.nan if fate == "drop" else 0.0})
    assert dead.episode.died.startswith(reason) and other.episode.rewards == {"Counter": 0.4}
    for _ in range(50):
        sleeping = [p for p in psutil.process_iter(["name", "cwd"]) if p.info["name"] == "sleep"]
        if not (left := [p for p in sleeping if p.info["cwd"] == str(games.parent)]):
            break
        time.sleep(0.1)
    assert not left


FAULTS = {
    "long": "failed: EpisodeError: the text of reset has 1048577 characters",
    "half": "failed: UnicodeEncodeError",
    "number": "failed: TypeError: reset: expected a text, parts of a message or None, got 7",
    "memory": "failed: it reached its limit of memory",
    "exit": "failed: SystemExit: 3",
    "huge": "failed: OverflowError",
    "nan": "failed: a reward must be a finite number or None, got nan",
    "infinite": "failed: a reward must be a finite number or None, got -inf",
    "text": "failed: TypeError: get_reward: expected a number or None, got '1'",
    "list": "failed: TypeError: get_reward: expected a number or None, got [",
    "state": "failed: TypeError",
}


@pytest.mark.parametrize(
    "fault", repeats(FAULTS, "half", "number", "memory", "nan", "infinite", "text", "list", "state")
)
def test_a_class_that_fails_harms_no_other_episode(play, games, caplog, tmp_path, fault):
    said = [[call("add", number=2), "x"]] * 2
    with EpisodeFile(tmp_path / "episodes", {}) as journal:
        (dead, other), _ = play(f"{games}:Unwell", said, [{"fault": fault}, {}], journal=journal)
    assert dead.episode.died.startswith(FAULTS[fault]) and other.episode.rewards == {"Unwell": 1.0}
    assert f"environment of rows:1, episode 1, {FAULTS[fault]}" in caplog.text


CALLS = {
    "stop": (None, "ended its process with status 0"),
    "quits": (None, "failed: SystemExit: 4"),
    "unsaid": (None, "failed: ValueError"),
    "wordless": ("{'error': \"'NoneType' object is not callable\"}", None),
    "deep": ("{'error': 'maximum recursion depth exceeded'}", None),
    "odd": (None, "failed: TypeError: turn_reward: expected a number or None, got 'much'"),
    "blocks": ("ab", None),
    "garble": (None, "replied with something else than an object of JSON"),
    "closing": (None, "ended its process with status 0"),
    "murder": (None, "ended with its process"),
    "bomb": (None, "reached its limit of 3 s"),
}


@pytest.mark.parametrize(
    "name", repeats(CALLS, "stop", "unsaid", "wordless", "deep", "odd", "closing", "blocks", "bomb")
)
def test_a_hostile_call_is_told_or_ends_its_episode_alone(play, games, name):
    result, reason = CALLS[name]
    said = [[call(name), "x"], [call("add", number=2), call("sees"), "y"]]
    (first, second), _ = play(f"{games}:Unwell", said, config={"reward_timeout": 3.0})
    assert results(second) == ["3", "False None"] and second.episode.rewards == {"Unwell": 1.0}
    if reason is None:
        assert results(first) == [result] and first.episode.died is None
    else:
        assert first.episode.died.startswith(reason)
    for _ in range(50):
        if not (left := programs("sleep 1000", "sleep 1001", "sleep 1002")):
            break
        time.sleep(0.1)
    assert not left


def test_what_an_episode_leaves_ends_with_it(play, games):
    said = [[call("leaves"), "x"], [call("sees"), call("ids"), "y"]]
    (first, second), _ = play(f"{games}:Unwell", said, at_once=1)
    assert results(second)[0] == "False None" and results(second)[1] != results(first)[0]
    assert not programs("sleep 1001")


def programs(*commands):
    """Return the running programs of these command lines, and forks of environments that sleep."""
    return [p for p in psutil.process_iter(["cmdline"]) if " ".join(p.info["cmdline"] or ()) in commands]


def test_a_run_whose_episodes_all_die_stops(play, games):
    with pytest.raises(ValueError, match=r"all 2 episodes died; environment of rows:1, episode 1, failed: TypeError"):
        play(f"{games}:Echo", [["a"], ["b"]])


def test_async_calls_of_a_turn_wait_together(play, games):
    said = [[call("later", seconds=1.0) + call("add", number=1) + call("later", seconds=1.5), "x"]]
    begin = time.monotonic()
    ((sample,), _) = play(f"{games}:Counter", said, config={"reward_timeout": 2.4})
    assert results(sample) == ["after 1.0", "1", "after 1.5"] and time.monotonic() > begin


def test_rows_choose_among_several_environments(play, games):
    ((sample,), judge) = play(
        f"{games}:ALL", [[call("echo", text="b"), call("add", number=1), "x"]], {"environment": "echo", "text": "a"}
    )
    assert judge.names == ["Counter", "Echo"]
    assert results(sample) == ["ab", "{'error': 'Tool add not found.'}"]
    np.testing.assert_equal(dict(sample.episode.rewards), {"Counter": np.nan, "Echo": 2.0})
    with pytest.raises(ValueError, match="the column environment must name one of count, echo, got 'other'"):
        play(f"{games}:ALL", [["x"]], {"environment": "other"})


def test_an_environment_may_end_an_episode(play, games):
    ((sample,), _) = play(f"{games}:Echo", [[call("echo", text="stop"), "never"]], {"text": "a"})
    assert [m["role"] for m in sample.episode.messages] == ["assistant", "tool"] and sample.counted.all()
    assert sample.episode.rewards == {"Echo": 5.0}


def test_an_environment_that_can_be_called_replies_and_rewards_turns(play, games):
    ((sample,), _) = play(f"{games}:Talker", [["a", "b", "c"]], {"wanted": "b"}, turns=3)
    assert [m["content"] for m in sample.episode.messages] == ["a", "go on: a", "b", "go on: a, b", "c"]
    assert sample.episode.turn_rewards == [0.0, 1.0, 0.0] and sample.episode.rewards == {"Talker": 6.0}
    assert [len(part) for part in np.split(sample.tokens, sample.episode.turn_ends)][-1] == 0


def test_functions_that_judge_may_read_the_environments(play, games):
    ((sample,), judge) = play(f"{games}:Counter", [[call("add", number=2), "x"]], reward=(f"{games}:lengths?weight=2",))
    assert judge.names == ["lengths", "Counter"] and sample.episode.rewards == {"lengths": 6.0, "Counter": 0.2}


def test_a_function_without_parameters_makes_environments(play, games):
    ((sample,), _) = play(f"{games}:make", [[call("add", number=2), "x"]])
    assert results(sample) == ["2"]


def test_classes_given_in_python_run_in_this_process(play):
    class Pid:
        def reset(self, **row):
            pass

        def number(self) -> int:
            """Say the process."""
            return os.getpid()

        def get_reward(self):
            return 1.0

    with named_functions({"environment": Pid}) as settings:
        ((sample,), _) = play(settings["environment"], [[call("number"), "x"]])
    assert results(sample) == [str(os.getpid())]


def test_random_numbers_are_those_of_the_episode(play, games):
    said = [[call("chance"), call("chance"), "x"]] * 2
    before = random.getstate()
    (first, second), _ = play(f"{games}:Counter", said)
    (again, _), _ = play(f"{games}:Counter", said, at_once=1)
    assert results(first) == results(again) != results(second) and random.getstate() == before


def test_processes_serve_one_episode_after_another(play, games):
    samples, _ = play(f"{games}:Counter", [[call("ids") + call("add", number=1), "x"]] * 6, at_once=2)
    assert len({results(sample)[0] for sample in samples}) <= 2
    assert [results(sample)[1] for sample in samples] == ["1"] * 6


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Bare", r"Bare\.undocumented is a tool: describe it and its parameters, .* has no docstring!$"),
        ("Unset", "Unset has no method reset"),
        ("absent", "has no function or class 'absent'; it has .*Bare"),
    ],
)
def test_what_is_no_environment_is_refused(games, name, message):
    with pytest.raises(ValueError, match=message):
        Judge(RolloutConfig(environment=f"{games}:{name}", reward=("exact",)))


def test_a_file_with_an_error_is_told_by_its_own_line(tmp_path):
    (tmp_path / "shop.py").write_text("class Shop:\n    def reset(self)\n        pass\n")
    with pytest.raises(ValueError, match=r"shop.py:Shop: SyntaxError: .* \(shop.py, line 2\)$"):
        Judge(RolloutConfig(environment=f"{tmp_path}/shop.py:Shop", reward=("exact",)))


@pytest.mark.parametrize("counts", [(1, 3, 6), repeat((2, 4, 5, 7))])
def test_episodes_go_on_from_a_journal(play, games, tmp_path, caplog, counts):
    said = [[call("chance") + call("add", number=1), call("chance") + call("add", number=2), "x"]] * 2
    path, run = tmp_path / "rollouts" / "step-0.episodes.jsonl", {"seed": 1}
    with EpisodeFile(path, run) as journal:
        whole, _ = play(f"{games}:Saving", said, journal=journal)
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 2 * 3  # two turns and the end of each
    for count in counts:
        path.write_bytes(b"".join(lines[:count]) + b"cut short")
        caplog.clear()
        with EpisodeFile(path, run) as journal, caplog.at_level(logging.WARNING):
            again, _ = play(f"{games}:Saving", said, journal=journal)
        for sample, other in zip(whole, again, strict=True):
            np.testing.assert_array_equal(sample.tokens, other.tokens)
            np.testing.assert_array_equal(sample.log_probs, other.log_probs)
            np.testing.assert_equal(sample.episode._asdict(), other.episode._asdict())
        assert ("go on from their turn" in caplog.text) == (count > 1)
    with EpisodeFile(path, {"seed": 2}) as journal:
        assert journal.load("0.0") is None


def test_numbers_of_a_state_keep_their_types_and_keys_are_texts(play, games, tmp_path):
    said = [[call("add", number=1), call("add", number=1), "x"]]
    path = tmp_path / "episodes.jsonl"
    with EpisodeFile(path, {}) as journal:
        play(f"{games}:Stored", said, journal=journal)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    with EpisodeFile(path, {}) as journal:
        ((again,), _) = play(f"{games}:Stored", said, journal=journal)
    assert results(again) == ["2", "3"]
    with EpisodeFile(tmp_path / "other.jsonl", {}) as journal, pytest.raises(ValueError, match="a text of the key 1"):
        play(f"{games}:Stored", said, {"key": 1}, journal=journal)


def test_rewards_of_turns_that_a_method_gives_first_are_counted_or_refused(play, games):
    ((sample,), judge) = play(f"{games}:Payer", [[call("earn"), "x"]])
    assert judge.names == ["Payer"] and sample.episode.rewards == {"Payer": 0.25}
    with pytest.raises(ValueError, match=r"give the class turn_reward = None"):
        play(f"{games}:Debtor", [[call("earn"), "x"]], {"answer": "x"}, reward=("exact",))


GOLDENS = Path(__file__).parents[1] / "goldens"
CASES = json.loads((GOLDENS / "environments.json").read_text())["cases"]


@pytest.mark.parametrize("name", CASES)
def test_episodes_are_those_of_trl(name, request):
    """Tokens, masks of tools, rewards and advantages of forced turns; see `make_environments.py`."""
    case, goldens = CASES[name], json.loads((GOLDENS / "environments.json").read_text())
    tokenizer = load_tokenizer(request.config.rootpath / "jaxglue/recipes/quickstart/model")
    tokenizer.chat_template = goldens["template"]
    file, settings = GOLDENS / "environments.py", case["settings"]
    functions = tuple(f"{file}:{function}" for function in case["functions"])
    longest, turns = settings.get("max_completion_length", 400), settings.get("max_tool_calling_iterations", 9) + 1
    with closing(Judge(RolloutConfig(environment=f"{file}:{case['environment']}", reward=functions))) as judge:
        judge.check({column for row in case["rows"] for column in row})
        template, prompts = ConversationTemplate(tokenizer), []
        for number, row in enumerate(case["rows"]):
            columns = {key: value for key, value in row.items() if key != "prompt"}
            tools, content = judge.tools_of(columns), row["prompt"]
            prompts.append(
                Prompt(f"rows:{number}", content, template.prompt(content, tools), columns, None, None, tools)
            )
        environment = Environment(
            judge.begin, template, True, turns, longest, 4000, None, "drop", False, judge.episode_names
        )
        said = case["turns"]

        def write(turn):
            episode = turn.index * 2 + turn.answer if turn.seed == 0 else turn.index
            return said[episode][turn.seed // 1_000_003] + END

        samples = converse(environment, prompts, write, tokenizer, count=2)
        rewards = judge.score([Written(prompt, group) for prompt, group in zip(prompts, samples, strict=True)])
    flat = [sample for group in samples for sample in group]
    ids = [sample.episode.prompts[0] for sample in flat]
    assert [hashlib.sha256(json.dumps(tokens).encode()).hexdigest() for tokens in ids] == case["prompts"]
    for sample, completion, mask in zip(flat, case["completions"], case["masks"], strict=True):
        assert sample.tokens.tolist() == completion and sample.counted.astype(int).tolist() == mask
    expected = np.array(case["rewards"], float)[:, [case["names"].index(name) for name in judge.names]]
    np.testing.assert_allclose(rewards.reshape(expected.shape), expected, atol=5e-5)
    made = compare(ObjectiveConfig(objective="dapo").make(), Rewards(by_function=rewards, weights=judge.weights))
    np.testing.assert_allclose(made.values.ravel(), case["advantages"], atol=5e-5)
