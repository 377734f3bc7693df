"""Images that environments show: their places among an episode's tokens, what is kept of them, what is refused."""

import base64
import io
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, ImageColor
from transformers import AutoTokenizer

from jaxglue.data.images import ImageReader
from jaxglue.data.store import TokenStore
from jaxglue.generation.sight import make_rules
from jaxglue.rl.conversation import ConversationTemplate
from jaxglue.rl.episode_process import EnvironmentKind
from jaxglue.rl.hosts import FunctionHost, GivenConnection, ObjectHost, read_reply
from jaxglue.rl.journal import EpisodeFile
from jaxglue.rl.pack import groups_of, pack_groups
from jaxglue.rl.prompts import Prompt
from jaxglue.rl.record import Generation, RolloutFolder
from jaxglue.settings.recipe import SHIPPED
from jaxglue.vision.images import digest_of, read_image
from tests.rl.forced import converse, make_environment

OBJECTIVE = SimpleNamespace(masks_truncated=False)
FOLDER = SHIPPED / "quickstart" / "seeing"


def png(color, size=(64, 32)):
    Image.new("RGB", size, color).save(data := io.BytesIO(), "PNG")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


def shown(*colors, size=(64, 32)):
    parts = [{"type": "image", "image": png(color, size)} for color in colors]
    return {"role": "user", "content": [*parts, {"type": "text", "text": "And now?"}]}


@pytest.fixture(scope="module")
def seeing():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    return tokenizer, make_rules(FOLDER, tokenizer, files=None)


@pytest.fixture
def hold(seeing):
    """Hold episodes of one prompt, whose turns are alike, with an environment that replies so."""
    tokenizer, rules = seeing
    turns = []

    def features(images):
        patches = {image.cache_key: image.decoded(rules.processor).patches for image in images}
        return {key: each[:: rules.processor.merge**2, :4].astype(np.float32) for key, each in patches.items()}

    def make(reply, *, episodes=1, shows=True, begin=None, **settings):
        template = ConversationTemplate(tokenizer, rules)
        begin = begin or (lambda prompt, seed: FunctionHost(reply, prompt.origin))
        environment = make_environment(tokenizer, begin, template=template, shows=shows, any_tool=False, **settings)
        content = [{"role": "user", "content": "What?"}]
        prompt = Prompt("rows:1", content, template.prompt(content, None), {})

        def write(turn):
            turns.append(turn)
            return "A red cross.<|im_end|>"

        return prompt, converse(environment, [prompt], write, tokenizer, count=episodes, features=features)[0]

    make.turns = turns
    return make


def places_of(seeing, tokens):
    return np.flatnonzero(np.array(tokens) == seeing[1].tokens[0])


@pytest.mark.parametrize("branches", [False, True])
def test_images_stand_in_rows_where_the_template_put_them(seeing, hold, branches):
    rules, replies = seeing[1], iter([shown("red", "blue"), shown("green"), None])
    prompt, (sample,) = hold(lambda messages, last: next(replies), branches=branches)
    assert sample.episode.died is None and len(sample.episode.images) == 3
    groups = groups_of(OBJECTIVE, [prompt], [[sample]], np.ones((1, 1)), rules=rules)
    for row, answer in zip(sample.rows(prompt.tokens), groups[0].answers, strict=True):
        tokens = [*row.prompt, *sample.tokens[row.start : row.end]]
        found = [rules.places(np.array(tokens), first, 8) for first in row.firsts]
        np.testing.assert_array_equal(np.concatenate([[], *found]), places_of(seeing, tokens))
        assert not answer.counted[[first + i for first, _ in answer.images for i in range(8)]].any()
        seen = sample.episode.images[: len(row.firsts)]  # those that were read when the episode went on
        assert all(image is own for (_, image), own in zip(answer.images, seen, strict=True))
    assert [len(row.firsts) for row in sample.rows(prompt.tokens)] == ([0, 2, 3] if branches else [3])
    images = [turn.images for turn in hold.turns]
    assert images[0] is None and [len(each.images) for each in images[1:]] == [2, 3]
    for turn in hold.turns[1:]:
        np.testing.assert_array_equal(turn.images.places, places_of(seeing, turn.prompt))


class Resetting(FunctionHost):
    def __init__(self, color):
        super().__init__(lambda messages, last: None, "rows:1")
        self._color = color

    def reset(self, prompt):
        return read_reply(shown(self._color))


@pytest.mark.parametrize("colors", [("red", "blue"), ("red", "red")])
def test_rows_share_no_beginning_with_other_images(seeing, hold, colors):
    """Their tokens are equal."""
    rules, number = seeing[1], count()
    prompt, samples = hold(None, episodes=2, at_once=1, begin=lambda *_: Resetting(colors[next(number)]))
    rows = [next(sample.rows(prompt.tokens)) for sample in samples]
    assert rows[0].prompt == rows[1].prompt
    (group,) = groups_of(OBJECTIVE, [prompt], [samples], np.ones((1, 2)), rules=rules)
    shared = len(set(colors)) == 1
    assert len(group.images) == shared and [len(answer.images) for answer in group.answers] == [not shared] * 2
    assert (len(group.prompt) == len(rows[0].prompt)) == shared
    for answer, row in zip(group.answers, rows, strict=True):
        assert [len(group.prompt) + first for first, _ in answer.images] == ([] if shared else row.firsts)


@pytest.mark.parametrize("lines", [1, 2, 3])
def test_episodes_with_images_go_on_from_a_journal(hold, tmp_path, lines):
    replies = {2: shown("red"), 4: shown("green", "blue"), 6: None}
    path = tmp_path / "rollouts" / "step-0.episodes.jsonl"

    def play():
        with EpisodeFile(path, {}) as journal:
            return hold(lambda messages, last: replies[len(messages)], journal=journal)[1][0]

    whole, before = play(), [turn.images for turn in hold.turns]
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))
    hold.turns.clear()
    again = play()
    np.testing.assert_array_equal(whole.tokens, again.tokens)
    np.testing.assert_equal(whole.episode._asdict(), again.episode._asdict())
    for turn, images in zip(reversed(hold.turns), reversed(before), strict=False):
        assert (turn.images is None) == (images is None)
        if images is not None:
            np.testing.assert_array_equal(turn.images.places, images.places)
            np.testing.assert_array_equal(turn.images.keys, images.keys)
    assert len(hold.turns) == 4 - lines


@pytest.mark.parametrize(
    ("image", "error"),
    [
        ("/etc/hostname", "files are not read here"),
        ("https://example.com/a.png", "not fetched from the network"),
        ("data:image/png;base64,AAAA", "no image that can be read"),
        (png("red")[:82], "a damaged image"),
        (None, "an image"),
    ],
)
def test_what_is_no_image_ends_the_episode(hold, image, error):
    reply = {"role": "user", "content": [{"type": "image", "image": image}]}
    with pytest.raises(ValueError, match=f"rows:1.* failed: .*{error}"):
        hold(lambda messages, last: reply)


def test_images_of_kept_answers_are_those_that_were_shown(seeing, hold, tmp_path):
    replies = iter([shown("red"), shown("green", "blue"), None])
    prompt, (sample,) = hold(lambda messages, last: next(replies))
    values = {"rows": [0], "numbers": [0], "following": 1, "rewards": np.zeros((1, 1, 1)), "sampled": 1}
    folder = RolloutFolder(tmp_path, {}, {}, seeing[1])
    folder.save(0, Generation(prompts=[prompt], samples=[[sample]], **values))
    kept = folder.load(0, [prompt]).samples[0][0].episode
    np.testing.assert_equal(kept._asdict(), sample.episode._asdict())
    assert [image.read() for image in kept.images] == [image.read() for image in sample.episode.images]


def test_images_need_the_setting_that_loads_a_tower(hold):
    with pytest.raises(ValueError, match="--environment-images true"):
        hold(lambda messages, last: shown("red"), shows=False)


def test_rows_of_packed_batches_have_the_images_of_their_answers(seeing, hold):
    rules, replies = seeing[1], iter([shown("red"), shown("green", "blue"), None])
    prompt, (sample,) = hold(lambda messages, last: next(replies))
    groups = groups_of(OBJECTIVE, [prompt], [[sample]], np.ones((1, 1)), rules=rules)
    store = TokenStore(tokens=np.zeros(0), mask=np.zeros(0), offsets=np.zeros(1), info={}, images=None)
    reader = ImageReader(rules=rules, store=store)
    for shared in (True, False):
        packed = pack_groups(groups, seq_len=128, batch_size=1, slots=2, reader=reader, shared=shared)
        images, tokens = packed[0].batch.images, np.asarray(packed[0].batch.tokens)
        np.testing.assert_array_equal(np.flatnonzero(images.index[0] >= 0), places_of(seeing, tokens[0]))
        expected = [digest_of(base64.b64decode(png(color).partition(",")[2])) for color in ("red", "green", "blue")]
        assert [image.key for image in images.rows[0]] == expected
        positions = images.positions[0]
        last = places_of(seeing, tokens[0])[-1]
        assert positions[last + 1, 0] < last + 1  # behind images positions are lower than places


class Page:
    def reset(self, **row):
        return [{"type": "image", "image": Image.new("RGB", (64, 32), "red")}, {"type": "text", "text": row["ask"]}]

    def look(self):
        return Image.new("RGB", (64, 32), "blue")

    def read(self, kind):
        data = base64.b64decode(png("green").partition(",")[2])
        return {"both": [{"type": "image", "image": data}, {"type": "text", "text": "a\ud800"}], "none": [1, 2]}[kind]

    def __call__(self, message):
        return [{"role": "user", "content": [{"type": "image", "image": self.look()}]}]


def test_objects_show_images_in_resets_results_and_replies():
    connection = GivenConnection(Page, {})
    host = ObjectHost(connection, EnvironmentKind(None, "Page", [], False, False, True), {}, chosen=False)
    try:
        begun = host.reset(Prompt("rows:1", [], [], {"ask": "And now?"}, asked=False))
        calls = [{"id": "1", "function": {"name": "look", "arguments": {}}}]
        calls += [{"id": "2", "function": {"name": "read", "arguments": {"kind": kind}}} for kind in ("both", "none")]
        results = host.reply([{"role": "assistant", "content": "", "tool_calls": calls}], last=False)
        replied = host.reply([{"role": "assistant", "content": "x"}], last=False)
    finally:
        host.close()
    image, text = {"type": "image"}, {"type": "text", "text": "And now?"}
    assert begun.messages == [{"role": "user", "content": [image, text]}]
    contents = [[image], [image, {"type": "text", "text": "a?"}], "[1, 2]"]
    assert results.messages == [{"role": "tool", "content": content} for content in contents]
    assert replied.messages == [{"role": "user", "content": [image]}] and results.failures == 0
    for reply, colors in ((begun, ["red"]), (results, ["blue", "green"]), (replied, ["blue"])):
        pixels = [read_image(source.data).getpixel((0, 0)) for source in reply.images]
        assert pixels == [ImageColor.getrgb(color) for color in colors]


CALLS = """
{%- for call in message.tool_calls or [] %}
{%- set function = {"name": call.function.name, "arguments": call.function.arguments} %}
{{- '<tool_call>\\n' + function | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}"""


def test_results_of_tools_show_images_behind_the_calls_as_they_were_written(seeing):
    tokenizer, rules = AutoTokenizer.from_pretrained(FOLDER), seeing[1]
    tokenizer.chat_template = tokenizer.chat_template.replace(" + '<|im_end|>\\n' }}", " }}" + CALLS)
    template = ConversationTemplate(tokenizer, rules)
    tool = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
    tools, prompt = [{"type": "function", "function": tool}], [{"role": "user", "content": "What?"}]
    written = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>'
    tokens = tokenizer.encode(written, add_special_tokens=False)
    said = template.message(tokens, tools, 0, ended=True)
    assert len(said["tool_calls"]) == 1
    content = [{"type": "image"}, {"type": "text", "text": "the page"}]
    grids = [rules.shown(base64.b64decode(png("red").partition(",")[2])).grid]
    between = template.between(
        prompt, [said], [{"role": "tool", "content": content}], tools, tokens[-1], "rows:1", grids
    )
    image = f"<|vision_start|>{'<|image_pad|>' * 8}<|vision_end|>"
    expected = f"\n<|im_start|>tool\n{image}the page<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(between) == expected and rules.firsts(np.array(between), grids) == [
        between.index(rules.tokens[0])
    ]
    with pytest.raises(ValueError, match=r"--environment, rows:1: the chat template writes 1 places .* for 2 images"):
        template.between(prompt, [said], [{"role": "tool", "content": content}], tools, tokens[-1], "rows:1", grids * 2)
