"""Train a draft head for a model that has none: `jaxglue draft --model M --data chats.jsonl --output head`."""

from jaxglue.terminal.lines import echo
from jaxglue.training.draft_config import DraftConfig
from jaxglue.training.eagle import train_head


def main(config: DraftConfig) -> None:
    """Train the head, and print how many of its drafts are accepted."""
    result = train_head(config, echo)
    if result is None:
        echo(f"{config.output} had been written")
        return
    for name, shares in (("greedy", result.greedy), ("sampled", result.sampled)):
        echo(f"accepted, {name}: {', '.join(f'{share:.1%}' for share in shares)}")
    echo(f"wrote {config.output}: {result.tokens:.2f} tokens a step with {config.drafts} drafts, greedy")
