"""Tasks of reasoning-gym (https://github.com/open-thought/reasoning-gym), asked again where an answer is wrong.

Rows have an `entry` of a dataset: `python -m jaxglue.environments.reasoning_tasks chain_sum size=1000 > prompts.jsonl`.
"""

import json
import sys
from contextlib import suppress

with suppress(ImportError):  # ahead: an episode's process is a fork of one that has imported this file
    import reasoning_gym  # noqa: F401


class ReasoningGym:
    """A task with its answer; the reward is the score of the last answer.

    Args:
        again: what is said to a wrong answer.
    """

    def __init__(self, again: str = "That is wrong, try again."):
        self._again = again

    def reset(self, entry, prompt=None, **row) -> str | None:
        """Take a task; its question is the prompt of a row without one."""
        from reasoning_gym import create_dataset

        self._entry, self._tries = entry, 0
        self._score = create_dataset(entry["metadata"]["source_dataset"], size=1, seed=0).score_answer
        return entry["question"] if prompt is None else None

    def __call__(self, message: str, last: bool) -> str | float:
        """Return the score of an answer, or ask again."""
        self._tries += 1
        value = float(self._score(message.strip(), self._entry))
        return value if value == 1 or last else self._again

    def state(self) -> dict:
        """Return the task and the tries so far."""
        return {"entry": self._entry, "tries": self._tries}

    def restore(self, state: dict) -> None:
        """Go on from a state."""
        self.reset(state["entry"], prompt="")
        self._tries = state["tries"]


def main(name: str, *settings: str) -> None:
    """Print a row for each task of a dataset, with settings such as `size=100` or `min_terms=2`."""
    from reasoning_gym import create_dataset

    options = {key: json.loads(value) for key, _, value in (text.partition("=") for text in settings)}
    for entry in create_dataset(name, **options):
        sys.stdout.write(json.dumps({"entry": entry}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
