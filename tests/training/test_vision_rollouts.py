"""Reinforcement learning and distillation on prompts with images: what is sampled, trained on and kept."""

import json

import numpy as np
import pytest
from selection import repeat, repeats_parts_of
from tiny_runs import make_seeing

from jaxglue.training.record import read_metrics
from tests.training.test_vision import run, write_pictures

REWARD = """
def short(completion_ids, color, **columns):
    assert not {"images", "image"} & columns.keys()
    return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completion_ids]
"""


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """Pictures, and a model of one layer, or of a test's own."""
    layers = getattr(request, "param", ("full_attention",))
    make_seeing((folder := tmp_path_factory.mktemp("seeing")) / "model", *layers, depth=1)
    write_pictures(folder)
    return folder


@pytest.fixture
def rows(folder, tmp_path):
    """Prompts with one picture, two, or none, and their settings."""
    (tmp_path / "rewards.py").write_text(REWARD)
    found = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    pictures = [row for row in found if len(row.get("images", ())) == 1][:4]
    made = [{"messages": row["messages"][:1], "images": row["images"]} for row in pictures[:2]]
    both = [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]
    made.append(
        {"messages": [{"role": "user", "content": both}], "images": pictures[2]["images"] + pictures[3]["images"]}
    )
    made.append({"question": "What is a red cross?"})

    def rollouts(output, **settings):
        lines = [json.dumps(row | {"color": "red"}) for row in made]
        (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
        given = {
            **{"data": [str(tmp_path / "prompts.jsonl")], "objective": "grpo", "num_generations": 4, "epochs": 1},
            **{"generation_batch_size": 16, "max_completion_length": 6, "steps": 2, "seq_len": 256, "batch_size": 1},
            "reward": [f"{tmp_path / 'rewards.py'}:short"],
        }
        _, losses = run(folder, tmp_path / output, **given | settings)
        return losses, read_metrics(tmp_path / output / "metrics.jsonl")

    return made, rollouts


@repeats_parts_of("test_another_picture_is_another_run")
@pytest.mark.parametrize("folder", [("linear_attention", "full_attention")], indirect=True)
@pytest.mark.parametrize("settings", [{}, {"train_vision": "all"}, {"beta": 0.1}])
def test_sampling_and_training_see_the_same_images(rows, settings):
    """A placeholder that sampling shows as a text's token, or another image's, would part them at once."""
    _, metrics = rows[1]("run", **settings)
    assert len(metrics) == 2 and all(values["sampling/sampling_logp_difference/mean"] < 1e-5 for values in metrics)


def test_another_picture_is_another_run(rows, tmp_path):
    made, rollouts = rows

    def log_probs(name, **settings):
        _, metrics = rollouts(name, steps=1, **settings)
        assert metrics[0]["sampling/sampling_logp_difference/mean"] < 1e-5
        lines = (tmp_path / name / "rollouts.jsonl").read_text().splitlines()
        return {json.loads(line)["origin"][-1]: json.loads(line)["log_probs"][0] for line in lines}

    before = log_probs("first")
    made[0]["images"] = made[1]["images"]
    after = log_probs("other", image_features="off")
    same = {number: before[number] == pytest.approx(after[number], abs=2e-4) for number in before}  # in four digits
    assert same == {"1": False, "2": True, "3": True, "4": True}


@repeats_parts_of("test_another_picture_is_another_run")
@pytest.mark.parametrize("teacher_system", ["", repeat("Look at the {color}.")])
def test_a_teacher_sees_the_images_of_the_student(rows, teacher_system):
    settings = {"objective": "distill", "num_generations": None, "lmbda": 1.0, "teacher": "base", "lora_rank": 4}
    if teacher_system:
        settings["teacher_system"] = teacher_system
    losses, _ = rows[1]("run", reward=[], **settings)
    assert np.isfinite(losses).all() and (abs(losses[0]) < 1e-5) == (not teacher_system)


ENVIRONMENTS = """
def reply(messages):
    assert isinstance(messages[0]["content"], str) == ("red cross" in str(messages[0]))
    return [{"role": "user", "content": "Look again."}]


class Game:
    def reset(self, color, **columns):
        assert not {"images", "image"} & columns.keys()
        return " Be short."

    def get_reward(self):
        return 1.0
"""


SHOWING = """
def show(messages, color):
    count = sum(isinstance(message["content"], list) for message in messages)
    number = len(messages[-1]["content"]) + count  # another one in each episode
    parts = [{"type": "image", "image": PICTURES[number % len(PICTURES)]}, {"type": "text", "text": "And here?"}]
    return [{"role": "user", "content": parts}]


class Album:
    def reset(self, **columns):
        import base64, io, random
        from PIL import Image

        picture = Image.open(io.BytesIO(base64.b64decode(PICTURES[0].partition(",")[2])))
        self.turns = 0
        return [{"type": "image", "image": picture}, {"type": "text", "text": random.choice(["What?", "Who?"])}]

    def __call__(self, message):
        self.turns += 1
        return show([{"content": message}], "red") if self.turns < 3 else 1.0
"""


@pytest.mark.parametrize(("name", "history"), [("show", "append"), repeat("show", "branch"), repeat("Album", "append")])
@pytest.mark.parametrize("settings", [{}, repeat({"train_vision": "all"})])
def test_pictures_that_environments_show_are_read_in_training_as_in_sampling(rows, tmp_path, name, history, settings):
    made, rollouts = rows
    pictures = [picture for row in made for picture in row.get("images", ())]
    (tmp_path / "rewards.py").write_text(f"{REWARD}\nPICTURES = {pictures!r}\n{SHOWING}")
    given = {"environment": f"{tmp_path / 'rewards.py'}:{name}", "max_turns": 3, "max_completion_length": 150}
    del made[1:3]
    given |= {"environment_images": True, "image_max_tokens": 16, "history": history, "temperature": 2.0, "seed": 2}
    _, metrics = rollouts("run", steps=1, generation_batch_size=8, reward=[], **given | settings)
    assert metrics[0]["sampling/sampling_logp_difference/mean"] < 1e-5
    lines = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
    shown = [[type(turn["content"]) for turn in line["turns"] if turn["role"] == "user"] for line in lines]
    assert sum(list in types for types in shown) > 1


@repeats_parts_of("test_another_picture_is_another_run")
@pytest.mark.parametrize(("name", "history"), [("reply", "append"), ("reply", "branch"), ("Game", "append")])
def test_episodes_go_on_from_pictures_as_training_reads_them(rows, tmp_path, name, history):
    (tmp_path / "rewards.py").write_text(REWARD + ENVIRONMENTS)
    given = {"environment": f"{tmp_path / 'rewards.py'}:{name}", "max_turns": 3, "max_completion_length": 90}
    _, metrics = rows[1]("run", history=history, steps=1, seed=2, **given)
    assert metrics[0]["sampling/sampling_logp_difference/mean"] < 1e-5
    lines = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
    turns = [len(line["turns"]) for line in lines if not line["origin"].endswith(":4")]  # which has no picture
    assert max(turns) >= (3 if name == "reply" else 2)


@repeats_parts_of("test_another_picture_is_another_run")
def test_reward_models_see_the_images_of_prompts(rows, folder, tmp_path):
    made, rollouts = rows
    pairs = [
        {"prompt": row["messages"], "images": row["images"]}
        | {key: [{"role": "assistant", "content": key}] for key in ("chosen", "rejected")}
        for row in made[:2]
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    run(folder, tmp_path / "start", method="full", steps=1, epochs=1)
    model = {"model": str(tmp_path / "start" / "model"), "random_weights": False}
    given = {"data": [str(tmp_path / "pairs.jsonl")], "objective": "reward", "seq_len": 256, "steps": 2, "epochs": 1}
    run(folder, tmp_path / "reward", **given, **model)
    adapter = tmp_path / "reward" / "adapter"
    del made[2:]
    rollouts("run", steps=1, generation_batch_size=8, reward=[f"model?folder={adapter}"], **model)
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    rewards = [next(iter(line["rewards"].values())) for line in lines]
    assert len(lines) == 8 and len(set(rewards)) > 2
