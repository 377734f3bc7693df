"""Settings by which an objective reads and packs preference data."""

from typing import NamedTuple


class AnswerTask(NamedTuple):
    """Treatment of preference data by an objective."""

    labeled: bool = False
    """Answers are judged one by one, each beside another prompt's answer (KTO)."""
    shared_prompt: bool = True
    """Rows hold a pair's prompt once."""
    prompt_loss: bool = False
    """The prompt's tokens count as a part of their own (ORPO)."""
    scored: bool = False
    """Answers are judged at their last token, for reward models."""
    padding: int | None = None
    """Token after which no answer is judged: sequence classifiers skip it at the end."""
