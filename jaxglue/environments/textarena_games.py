"""Games of textarena (https://github.com/LeonGuertler/TextArena) for one player: an answer is a move."""

from contextlib import suppress

with suppress(ImportError):  # ahead: an episode's process is a fork of one that has imported this file
    import textarena  # noqa: F401


class TextArena:
    """A game; the reward is the player's when it ends.

    Args:
        game: name of it, such as Wordle-v0; rows may name others in a column `game`.
        unfinished: reward of a game that the turns end before it does.
    """

    def __init__(self, game: str = "", unfinished: str = "0"):
        self._default, self._unfinished = game, float(unfinished)

    def reset(self, seed: int = 0, game: str = "", **row) -> str:
        """Begin a game from a seed; its first observation is added to the prompt."""
        import textarena

        name = game or self._default
        if not name:
            raise ValueError("name a game, as in --environment 'textarena?game=Wordle-v0', or in a column game")
        self._game = textarena.make(env_id=name)
        self._game.reset(num_players=1, seed=seed)
        self._seen = ""
        return self._observe()

    def __call__(self, message: str, last: bool) -> str | float:
        """Make a move; return what is seen then, or the reward."""
        done, _ = self._game.step(action=message)
        if done:
            rewards, _ = self._game.close()
            return float(rewards[0])
        return self._unfinished if last else self._observe()

    def _observe(self) -> str:
        """Return what is seen; of an observation that tells all from the beginning again, what is new."""
        _, observation = self._game.get_observation()
        text = observation if isinstance(observation, str) else "\n".join(str(part[1]) for part in observation)
        new, self._seen = text.removeprefix(self._seen), text
        return new or text
