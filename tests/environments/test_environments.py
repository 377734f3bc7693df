"""Shipped environments: a sandbox for programs, and tasks of other packages where these are installed."""

import json
import shutil
import socket
import subprocess
import sys
import time
from contextlib import closing

import pytest

from jaxglue.environments.openenv_client import OpenEnv
from jaxglue.environments.reasoning_tasks import ReasoningGym
from jaxglue.environments.sandbox import Sandbox
from jaxglue.environments.textarena_games import TextArena
from jaxglue.rl.config import RolloutConfig
from jaxglue.rl.prompts import Prompt
from jaxglue.rl.rewards import Judge, parse_environment
from tests.rl.forced import converse, make_environment


def test_shipped_environments_have_names():
    spec = parse_environment("textarena?game=Wordle-v0&weight=2")
    assert spec.file.endswith("environments/textarena_games.py") and spec.function == "TextArena"
    assert spec.options == {"game": "Wordle-v0"} and spec.weight == 2
    with pytest.raises(ValueError, match=r"expected a class or function of a file, .* sandbox, reasoning_gym"):
        parse_environment("textareana")


def test_programs_are_refused_without_a_sandbox(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match=r"--environment .*programs that a model writes run in bubblewrap alone"):
        Judge(RolloutConfig(environment="sandbox", reward=("exact",)))


@pytest.fixture(params=["yes", "no"])
def sandbox(request):
    if request.param == "no" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    with Sandbox(seconds="2", memory="1", unsafe=request.param) as sandbox:
        sandbox.reset()
        yield sandbox


def test_programs_print_and_keep_files(sandbox):
    assert sandbox.python("open('a', 'w').write('kept'); print(1 + 1)") == "2"
    assert sandbox.shell("cat a; exit 3") == "kept\n[status 3]"
    assert sandbox.python("pass") == "[no output]"
    assert sandbox.shell("yes | head -c 20000").endswith("[cut]")
    assert "MemoryError" in sandbox.python("bytes(2**31)")


def test_programs_end_with_their_time(sandbox):
    begin = time.monotonic()
    assert sandbox.shell("sleep 100 & sleep 100") == "[ended after 2 s]"
    assert time.monotonic() - begin < 30


def test_programs_see_neither_files_nor_network(sandbox, tmp_path, monkeypatch):
    if sandbox._unsafe:
        pytest.skip("it is none")
    (tmp_path / "secret").write_text("s3cr3t")
    monkeypatch.setenv("SECRET_TOKEN", "s3cr3t")
    assert "s3cr3t" not in sandbox.shell(f"cat {tmp_path}/secret; ls /root /home; env")
    assert "No such file" in sandbox.shell("cat /etc/shadow")
    tried = "import socket; socket.create_connection(('1.1.1.1', 53), timeout=1)"
    assert "Network is unreachable" in sandbox.python(tried)
    assert "Read-only" in sandbox.shell("touch /usr/a")


def test_a_task_of_reasoning_gym_is_asked_until_it_is_right():
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset("chain_sum", size=1, seed=3, min_terms=2, max_terms=2)[0]
    task = ReasoningGym()
    assert task.reset(entry) == entry["question"] and task.reset(entry, prompt=[]) is None
    assert task("0", last=False) == "That is wrong, try again."
    other = ReasoningGym()
    other.restore(task.state())
    assert other(f" {entry['answer']} ", last=False) == 1.0 and other("x", last=True) < 1


def test_a_game_of_textarena_ends_with_a_reward():
    pytest.importorskip("textarena")
    game = TextArena("GuessTheNumber-v0")
    assert "number" in game.reset(seed=1).lower()
    for number in range(1, 21):
        reply = game(f"[{number}]", last=False)
        if isinstance(reply, float):
            break
    assert isinstance(reply, float)
    with pytest.raises(ValueError, match="name a game"):
        TextArena().reset()


SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int | str


class Seen(Observation):
    text: str = ""


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, wanted=5, **others):
        self.wanted, self.tries = wanted, 0
        return Seen(text="guess")

    def step(self, action, timeout_s=None, **others):
        self.tries += 1
        done = int(action.number) == self.wanted
        return Seen(text="right" if done else "wrong", done=done, reward=done / self.tries)

    @property
    def state(self):
        return State(step_count=self.tries)


uvicorn.run(create_fastapi_app(Game, Guess, Seen), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture
def server():
    pytest.importorskip("openenv")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port)])
    for _ in range(300):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


def test_sessions_of_an_openenv_server_are_episodes(server):
    with OpenEnv(server, message="number") as first, OpenEnv(server, message="number") as second:
        assert (first.reset(reset={"wanted": 7}), second.reset()) == ("guess", "guess")
        assert first.step({"number": 5}) == "wrong" and (first.turn_reward, first.end_episode) == (0.0, False)
        assert second.step({"number": 5}) == "right" and (second.turn_reward, second.end_episode) == (1.0, True)
        assert first("7", last=False) is None and (first.turn_reward, first.end_episode) == (0.5, True)


GUESSING = """
import verifiers.v1 as vf


class Number(vf.TaskData):
    number: int


class Guess(vf.Task[Number]):
    @vf.reward(weight=2.0)
    async def found(self, trace):
        return float(trace.branches[-1].messages[-1].content == str(self.data.number))

    @vf.reward
    async def turns(self, trace):
        return float(trace.num_turns)


class Game(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as player:
            said = await player.turn()
            while not said.terminated and said.last_reply != str(task.data.number):
                said = await player.turn("higher" if int(said.last_reply) < task.data.number else "lower")


class Guesses(vf.Taskset[Guess]):
    def load(self):
        for number in (7, 2):
            yield Guess(Number(number=number, prompt="Guess.", system_prompt="Digits."), self.config.task)


__all__ = ["Guesses", "Game"]
"""


def test_a_taskset_of_verifiers_is_played_to_its_rewards(tmp_path, monkeypatch, make_tokenizer, capsys):
    pytest.importorskip("verifiers")
    from jaxglue.environments import verifiers_tasks

    (tmp_path / "guessing.py").write_text(GUESSING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    verifiers_tasks.main("guessing", "tasks=5")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    content = [{"role": "system", "content": "Digits."}, {"role": "user", "content": "Guess."}]
    assert rows == [{"task": 0, "prompt": content}, {"task": 1, "prompt": content}]

    tokenizer = make_tokenizer()
    prompts = [Prompt(f"rows:{row['task']}", content, [1, 2], {"task": row["task"]}, asked=True) for row in rows]
    said = {0: ["3", "9", "7", "x"], 1: ["5", "1", "4", "3"]}
    with closing(Judge(RolloutConfig(environment="verifiers?taskset=guessing", reward=()))) as judge:
        environment = make_environment(tokenizer, judge.begin, names=judge.episode_names, turns=4)

        def write(turn):
            return said[turn.index][turn.seed // 1_000_003] + "<|im_end|>"

        (first,), (second,) = converse(environment, prompts, write, tokenizer)
    assert [message["content"] for message in first.episode.messages] == ["3", "higher", "9", "lower", "7"]
    assert first.episode.rewards == {"Verifiers": 5.0} and second.episode.rewards == {"Verifiers": 4.0}
    assert [message["content"] for message in second.episode.messages][-1] == "3"
