"""Episodes whose turns are forced: a stand-in for the model writes given texts."""

import numpy as np

from jaxglue.generation.engine import Completion
from jaxglue.rl.conversation import ConversationTemplate
from jaxglue.rl.episodes import Environment, Episodes
from jaxglue.rl.hosts import FunctionHost


def environment_of(tokenizer, reply, **settings):
    """Return what episodes with a function that replies are held with."""
    return make_environment(tokenizer, lambda prompt, seed: FunctionHost(reply, prompt.origin), **settings)


def make_environment(tokenizer, begin, **settings):
    """Return what episodes are held with."""
    defaults = {"turns": 4, "longest": 900, "row": 2000, "at_once": None, "fate": "drop", "branches": False}
    defaults |= {"names": ["environment"], "any_tool": True, "journal": None}
    defaults["template"] = ConversationTemplate(tokenizer)
    return Environment(begin=begin, **(defaults | settings))


def converse(environment, prompts, write, tokenizer, *, numbers=None, count=1, ended=True, seed=0, features=None):
    """Return the episodes, whose turns are the texts, or the tokens, that `write` returns for a `Turn`."""
    numbers = numbers or range(len(prompts))
    with Episodes(environment, prompts, numbers, count, seed, features=features) as episodes:
        (source,) = episodes.sources(1)
        while True:
            for turn in source.ready():
                said = write(turn)
                ids = tokenizer.encode(said, add_special_tokens=False) if isinstance(said, str) else said
                tokens = np.array(ids[: turn.most], np.int32)
                zeros = np.zeros(len(tokens), np.float32)
                source.take(turn, Completion(0, turn.answer, tokens, zeros, zeros, None, "stop" if ended else "length"))
            if source.is_over:
                return episodes.samples()
            source.wait()
