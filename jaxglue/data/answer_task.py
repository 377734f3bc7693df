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
