"""Environments behind OpenEnv's servers (https://github.com/meta-pytorch/OpenEnv): a session for each episode."""

import json
from contextlib import suppress
from typing import Any

with suppress(ImportError):  # ahead: an episode's process is a fork of one that has imported this file
    import openenv.core.generic_client  # noqa: F401


class OpenEnv:
    """A session of a server; its rewards are those of turns, and where it is done the episode ends.

    Rows may have a column `reset` with the arguments of the server's reset.

    Args:
        url: of the server, such as http://127.0.0.1:8000.
        message: field of an action that a turn without a call is; by default such a turn ends the episode.
        seconds: the most time of a reply.
    """

    turn_reward: float | None = None
    end_episode = False

    def __init__(self, url: str, message: str = "", seconds: str = "60"):
        self._url, self._message, self._seconds = url, message, float(seconds)
        self._client: Any = None

    def __enter__(self) -> "OpenEnv":
        return self

    def __exit__(self, *error: object) -> None:
        if self._client is not None:
            self._client.close()

    def reset(self, reset: dict | None = None, **row) -> str:
        """Begin a session; its first observation is added to the prompt."""
        from openenv.core.generic_client import GenericEnvClient

        self._client = GenericEnvClient(base_url=self._url, message_timeout_s=self._seconds).sync()
        self._client.connect()
        return _text(self._client.reset(**(reset or {})).observation)

    def step(self, action: dict) -> str:
        """Take an action in the environment and return what is seen then.

        Args:
            action: an object with the fields of an action.
        """
        result = self._client.step(action)
        self.turn_reward = None if result.reward is None else float(result.reward)
        self.end_episode = bool(result.done)
        return _text(result.observation)

    def __call__(self, message: str, last: bool) -> str | None:
        """Take a turn's text as an action."""
        if not self._message or self.end_episode:
            return None
        seen = self.step({self._message: message})
        return None if last or self.end_episode else seen


def _text(observation: Any) -> str:
    """Return an observation as a text: its only text field, or JSON."""
    if isinstance(observation, dict):
        texts = [value for value in observation.values() if isinstance(value, str) and value]
        shown = {name: value for name, value in observation.items() if name not in ("done", "reward", "metadata")}
        return texts[0] if len(texts) == 1 == len(shown) else json.dumps(shown, default=str)
    return str(observation)
