"""Answers held to a grammar: one of numbers for the engine's part, and those of llguidance on a tokenizer."""

import json
from dataclasses import dataclass, replace
from shutil import copytree

import jax
import numpy as np
import pytest
from flax import nnx
from selection import repeat, repeats_parts_of

from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.generation.config import GREEDY, SamplingConfig
from jaxglue.generation.engine import Engine
from jaxglue.generation.grammar import Grammars
from jaxglue.generation.scheduler import Request
from jaxglue.hf.serving import stop_tokens
from jaxglue.models.parameters import split_model
from jaxglue.ops.segments import pack_segments
from jaxglue.serve.answers import generate
from jaxglue.serve.config import GenerateConfig
from jaxglue.text.lark import Rules
from jaxglue.text.thinking import Thought, thought_after

PROMPT = [5, 3, 60, 17, 17, 2, 90, 41]
VOCABULARY = 97


@dataclass
class Thirds:
    """Takes token t at place i if t and i differ modulo 3, up to a length."""

    length: int
    place: int = 0

    def start(self):
        return replace(self)

    @staticmethod
    def allowed(place):
        return np.arange(VOCABULARY) % 3 != place % 3

    def mask(self):
        bits = np.pad(self.allowed(self.place), (0, -VOCABULARY % 32))
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def take(self, tokens):
        fits = [token % 3 != (self.place + i) % 3 for i, token in enumerate(tokens)]
        taken = min([*fits, False].index(False), self.length - self.place)
        self.place += taken
        return taken

    @property
    def is_over(self):
        return self.place == self.length

    is_complete = is_over


def engine_of(model):
    graphdefs, *trees = split_model(model, nnx.LoRAParam)
    return Engine(graphdefs, model.config, dtype="float32"), trees


def forward(model):
    """Return a function from a text's tokens to the logits behind each."""
    run = jax.jit(lambda tokens, segments: model(tokens, segments)[0])

    def logits(tokens):
        tokens = np.array(tokens, np.int32)[None]
        return np.array(run(tokens, pack_segments([[tokens.shape[1]]], seq_len=tokens.shape[1])), np.float64)

    return logits


FAMILIES = {
    "llama": {},
    "gemma3_text": {"sliding_window": 5, "sliding_window_pattern": 2},
    "qwen3_5_text": {
        **{"full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    },
}


@pytest.mark.parametrize(
    ("family", "whole"),
    [repeat("llama", True), ("qwen3_5_text", False), repeat("llama", False), repeat("gemma3_text", False)],
)
def test_answers_are_the_likeliest_that_a_grammar_takes(tiny_model, family, whole):
    model = tiny_model(family, initializer_range=0.3, **FAMILIES[family])
    engine, trees = engine_of(model)
    sampling = replace(GREEDY, max_tokens=30)
    requests = [
        Request(PROMPT, sampling, grammar=Thirds(21), n=2),
        Request(PROMPT[:5], sampling),
        Request(PROMPT[:4] * 16, sampling, grammar=Thirds(100)),
        Request(PROMPT, sampling, grammar=Thirds(0), stop={0}),
    ]
    plan = replace(engine.plan(requests, slots=3), pages=5)  # fewer than they need: the last one waits
    found = {(c.number, c.answer): c for c in engine.generate(*trees, requests, plan=plan, whole=whole)}
    logits_behind = forward(model)
    for (number, _), answer in found.items():
        prompt, tokens = requests[number].prompt, answer.tokens.tolist()
        logits = logits_behind([*prompt, *tokens])[len(prompt) - 1 : -1]
        if number != 1:
            logits = [np.where(Thirds.allowed(i), row, -np.inf) for i, row in enumerate(logits)]
        assert tokens == [row.argmax() for row in logits]
        wanted = 21 if number == 0 else 0 if number == 3 else 30
        assert len(tokens) == wanted and answer.finish == ("stop" if number in (0, 3) else "length")


@repeats_parts_of("test_answers_are_the_likeliest_that_a_grammar_takes")
def test_draws_follow_the_probabilities_of_what_a_grammar_takes(llama):
    (model, engine, trees), count = llama, 500
    bias = {4: 21.0, 5: 19.4, 6: 20.8}  # an unlikely one behind one that the second place refuses
    sampling = SamplingConfig(temperature=1.3, top_p=1.0, max_tokens=3, seed=2)
    request = Request(PROMPT, sampling, n=count, logit_bias=bias, grammar=Thirds(3))
    found = list(engine.generate(*trees, [request], slots=256))
    pairs = np.zeros((8, 8))
    for answer in found:
        pairs[tuple(answer.tokens[1:])] += 1
    wanted, logits_behind = np.zeros((8, 8)), forward(model)

    def probabilities(tokens, place):
        logits = logits_behind([*PROMPT, *tokens])[-1]
        logits[list(bias)] += list(bias.values())
        logits /= sampling.temperature
        p = np.exp(logits - np.logaddexp.reduce(logits))
        return p, p * Thirds.allowed(place) / p[Thirds.allowed(place)].sum()

    for first in bias:
        p = probabilities([], 0)[1][first]
        for second in bias if p else ():
            q = p * probabilities([first], 1)[1][second]
            if q:
                wanted[second] += q * probabilities([first, second], 2)[1][:8]
    sigma = np.sqrt(wanted * (1 - wanted) / count)
    assert (np.abs(pairs / count - wanted) <= 4 * sigma + 1e-4).all()
    first = found[0].tokens[0]
    np.testing.assert_allclose(found[0].log_probs[0], np.log(probabilities([], 0)[0][first]), atol=1e-4)


def test_penalties_count_what_a_grammar_took(llama):
    _, engine, trees = llama
    sampling = SamplingConfig(temperature=0, max_tokens=24, repetition_penalty=1e9, frequency_penalty=0.1)
    (found,) = engine.generate(*trees, [Request(PROMPT, sampling, grammar=Thirds(100))])
    text = [*PROMPT, *found.tokens.tolist()]
    assert len(set(text)) == len(set(PROMPT)) + 24
    assert len({token % 3 for token in found.tokens.tolist()[::3]}) == 2


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "sizes": {"type": "array", "items": {"enum": [1, 2]}}},
    "required": ["name", "sizes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars(tokenizer, quickstart):
    pytest.importorskip("llguidance")
    return Grammars(tokenizer, 1024, stop_tokens(tokenizer, quickstart, None))


@pytest.fixture(scope="module")
def llama(tiny_model):
    """A model, an engine of it and its weights."""
    model = tiny_model("llama")
    return model, *engine_of(model)


@pytest.fixture(scope="module")
def ignorant(base):
    """An engine of a model that knows nothing, and its weights."""
    return engine_of(nnx.clone(base[1]))


def written(tokenizer, ignorant, grammar, stops, seed=0, **options):
    """Return the answers of a model that knows nothing, and why they ended."""
    engine, trees = ignorant
    sampling = SamplingConfig(temperature=1.0, top_p=1.0, max_tokens=200, seed=seed, **options)
    requests = [Request(tokenizer.encode("Say it"), sampling, grammar=grammar, n=3)]
    found = engine.generate(*trees, requests, stops)
    return [(tokenizer.decode([t for t in c.tokens.tolist() if t not in stops]), c.finish) for c in found]


@repeats_parts_of("test_generate_follows_a_schema_or_expression")
def test_any_model_writes_json_of_a_schema(tokenizer, quickstart, ignorant, grammars):
    stops = stop_tokens(tokenizer, quickstart, None)
    ended = [(text, finish) for text, finish in written(tokenizer, ignorant, grammars.json(SCHEMA), stops)]
    assert "stop" in {finish for _, finish in ended}
    for text, finish in ended:
        if finish == "stop":
            value = json.loads(text)
            assert value.keys() == {"name", "sizes"} and set(value["sizes"]) <= {1, 2} and len(value["name"]) <= 8


def test_answers_are_choices_expressions_and_grammars(tokenizer, quickstart, ignorant, grammars):
    stops = stop_tokens(tokenizer, quickstart, None)
    for grammar, texts in [
        (grammars.choice(["yes, so", 'a "no"']), {"yes, so", 'a "no"'}),
        (grammars.regex(r"a/b?[0-9]"), {f"a/{b}{n}" for b in ("", "b") for n in range(10)}),
        (grammars.lark('start: "x" y\ny: "1" | "2" "3"'), {"x1", "x23"}),
    ]:
        found = written(tokenizer, ignorant, grammar, stops)
        assert {text for text, _ in found} <= texts and {finish for _, finish in found} == {"stop"}


ANALYSIS = "<|channel|>analysis<|message|>Is it < 3?<|end|><|start|>assistant"
THOUGHTS = {
    "tags": ([], "<think>", "\nIs it < 3?\n</think>\n\n"),
    "tokens": ([], "<think>", "\nIs it < 3?\n</think>\n\n"),
    "special tags": (["<think>", "</think>"], "<think>", "\nIs it < 3?\n</think>\n\n"),
    "mistral": (["[THINK]", "[/THINK]"], "[THINK]", "Is it < 3?[/THINK]"),
    "gemma": (["<|channel>", "<channel|>"], "<|channel>thought\n", "Is it < 3?\n<channel|>"),
}


def grammars_of(quickstart, specials, template=None, plain=()):
    pytest.importorskip("llguidance")
    tokenizer = load_tokenizer(quickstart)
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    tokenizer.add_tokens(plain, special_tokens=False)
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer, Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


def fits(tokenizer, grammar, text):
    matcher, tokens = grammar.start(), tokenizer.encode(text, add_special_tokens=False)
    return matcher.take(tokens) == len(tokens) and matcher.is_complete


@pytest.mark.parametrize("form", THOUGHTS)
def test_an_answer_that_thinks_follows_the_grammar_after_it(quickstart, form):
    specials, begin, rest = THOUGHTS[form]
    plain = ["<think>", "</think>"] if form == "tokens" else []
    tokenizer, grammars = grammars_of(quickstart, specials, f"{begin}{rest}", plain)
    for make, value, answer in [
        (grammars.choice, ["yes", "no"], "yes"),
        (grammars.regex, "a+/", "aa/"),
        (grammars.json, {"type": "integer"}, "12"),
        (grammars.lark, 'start: a\na: "x"', "x"),
    ]:
        thought = begin + rest
        for thinks, wanted in [
            (Thought.BEGUN, {rest + answer: True, answer: False, f"{rest}No": False}),
            (Thought.POSSIBLE, {rest + answer: False, thought + answer: True, answer: True, f"{thought}No": False}),
            (Thought.NONE, {thought + answer: False, answer: True}),
        ]:
            grammar = make(value, thinks=thinks)
            assert {text: fits(tokenizer, grammar, text) for text in wanted} == wanted


def test_tokens_that_are_special_to_llguidance_are_known(quickstart):
    names = ["<think>", "</think>", "[THINK]", "<｜tool▁sep｜>", "<tool_call|>", '<|"|>', "<x\ny>", "<a", "b>", "plain"]
    tokenizer, grammars = grammars_of(quickstart, ["[INST]"], plain=names)
    special = {n for n in ("[INST]", *names) if grammars._tokens.is_special_token(tokenizer.convert_tokens_to_ids(n))}
    assert special == {n for n in ("[INST]", *names) if Rules(tokenizer).text(n).startswith("<[")}


def test_each_adapters_template_tells_how_it_thinks(quickstart):
    (tokenizer, grammars), (other, _) = grammars_of(quickstart, [], "{{ 1 }}"), grammars_of(quickstart, [], "</think>")
    for made, wanted in ((grammars, False), (grammars.of(other), True), (grammars.of(tokenizer), False)):
        grammar = made.json({"type": "integer"}, thinks=Thought.POSSIBLE)
        assert fits(tokenizer, grammar, "<think>Hm.</think>12") == wanted and fits(tokenizer, grammar, "12")


def test_an_answer_in_channels_follows_the_grammar_in_the_final_one(quickstart):
    specials = ["<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>"]
    tokenizer, grammars = grammars_of(quickstart, specials, "<|channel|>")
    grammar = grammars.json({"type": "integer"}, thinks=Thought.POSSIBLE)
    final = "<|channel|>final<|message|>"
    for text, wanted in [
        (f"{ANALYSIS}{final}12", True),
        (f"{ANALYSIS}{ANALYSIS}<|channel|>final <|constrain|>json<|message|>12", True),
        (f"{final}12", True),
        ("12", False),
        (f"{ANALYSIS}{final}twelve", False),
    ]:
        assert fits(tokenizer, grammar, text) == wanted
    assert fits(tokenizer, grammars.json({"type": "integer"}), "12")


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("assistant\n", Thought.POSSIBLE),
        ("assistant\n<think>\n", Thought.BEGUN),
        ("assistant\n<think>\n\n</think>\n\n", Thought.NONE),
        ("<｜Assistant｜></think>", Thought.NONE),
        ("<|turn>model\n<|channel>thought\n", Thought.BEGUN),
        ("<|turn>model\n<|channel>thought\n<channel|>", Thought.NONE),
        ("<|start|>assistant", Thought.POSSIBLE),
        ("<|start|>assistant<|channel|>final<|message|>", Thought.NONE),
    ],
)
def test_the_end_of_a_prompt_tells_how_its_answer_begins(prompt, wanted):
    assert thought_after(prompt) == wanted


@repeats_parts_of("test_generate_follows_a_schema_or_expression")
def test_generate_holds_what_follows_the_thinking_to_a_schema(folders, tmp_path, grammars):
    folder = copytree(folders[0], tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}{# </think> #}")
    prompts = ("Where?", "<think>", "<think>\n\n</think>\n\n")
    settings = {"model": folder, "prompt": prompts, "sampling": SamplingConfig(max_tokens=4, temperature=1)}
    for batch_size in (1, None):
        held = generate(GenerateConfig(**settings, regex="x{9}", batch_size=batch_size))
        first, *others = ("".join(pieces) for _, pieces in held)
        assert first == "xxxx" or "<think>".startswith(first)
        assert others == ["", "xxxx"]  # four tokens of thinking, which is not shown


def test_generate_follows_a_schema_or_expression(folders, tmp_path, grammars):
    (tmp_path / "schema.json").write_text(json.dumps({"enum": ["north", "south"]}))
    sampling = SamplingConfig(temperature=1.0, max_tokens=40)
    options = {"model": folders[0], "prompt": ("Where?", "And then?"), "sampling": sampling}
    texts = {"json_schema": {'"north"', '"south"'}, "regex": {"left", "right"}}
    for flag, value, batch_size in (("json_schema", tmp_path / "schema.json", 1), ("regex", "left|right", None)):
        found = generate(GenerateConfig(**options, **{flag: value}, batch_size=batch_size))
        assert {"".join(pieces) for _, pieces in found} <= texts[flag]
    for wrong, message in [
        ({"json_schema": tmp_path / "schema.json", "regex": "a"}, "an answer follows one of them"),
        ({"json_schema": tmp_path / "none.json"}, "--json-schema: no such file"),
    ]:
        with pytest.raises(ValueError, match=message):
            GenerateConfig(**options, **wrong)


def test_malformed_grammars_are_refused(grammars):
    for make, text, message in [
        (grammars.regex, "(yes", "a regular expression is not understood: (?s:.*)unclosed group"),
        (grammars.lark, "start: foo", "a grammar is not understood: (?s:.*)unknown name"),
        (grammars.json, {"type": "nope"}, "a JSON schema is not understood: .*nope"),
        (grammars.regex, "a" * 70_000, "at most 65,536"),
    ]:
        with pytest.raises(ValueError, match=message):
            make(text)
