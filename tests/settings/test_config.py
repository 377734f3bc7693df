import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pytest

from jaxglue.objectives.objective import OBJECTIVES
from jaxglue.settings.config import (
    Alias,
    Config,
    Excludes,
    PositiveFloat,
    PositiveInt,
    Range,
    Requires,
    every_field,
    groups,
    plain_fields,
)
from jaxglue.training.config import ModelConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    method: Literal["lora", "full"] = "lora"
    steps: Annotated[PositiveInt, Alias("max_steps")] | None = None
    share: Annotated[float, Range(ge=0, lt=1)] = 0.5
    rate: PositiveFloat = 1.0
    files: tuple[str, ...] = ()
    output: Path = Path("out")
    resume: bool = False

    def validate(self) -> None:
        if self.resume and self.steps is None:
            raise ValueError("resume needs steps")


@dataclass(frozen=True, kw_only=True)
class Group(Config):
    settings: Settings


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("method", "qlora", "method: expected lora | full, got 'qlora'"),
        ("method", 1, "method: expected lora | full, got 1"),
        ("steps", 0, "steps: expected int >= 1 | none, got 0"),
        ("steps", 1.5, "steps: expected int >= 1 | none, got 1.5"),
        ("steps", True, "steps: expected int >= 1 | none, got True"),
        ("share", 1, "share: expected float >= 0 and < 1, got 1"),
        ("rate", "1", "rate: expected float > 0, got '1'"),
        ("rate", math.nan, "rate: expected float > 0, got nan, which is not finite"),
        ("rate", math.inf, "rate: expected float > 0, got inf, which is not finite"),
        ("files", ("a", 1), "files: expected list of str, got 1"),
        ("output", None, "output: expected Path, got None"),
        ("resume", True, "resume needs steps"),
    ],
)
def test_wrong_value_is_refused(field, value, message):
    with pytest.raises(ValueError) as error:
        Settings(**{field: value})
    assert str(error.value) == message
    with pytest.raises(ValueError):
        replace(Settings(), **{field: value})


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_path_is_refused(text):
    for read in (plain_fields(Settings)["output"][1].read_text, lambda text: Settings(output=text)):
        with pytest.raises(ValueError, match="an empty name"):
            read(text)


def test_values_are_converted_to_the_declared_type():
    settings = Settings(rate=2, files="a.jsonl", output="runs", share=0)
    assert settings == Settings(rate=2.0, files=("a.jsonl",), output=Path("runs"), share=0.0)
    assert isinstance(settings.rate, float) and isinstance(settings.output, Path)
    assert Settings(files=["a", "b"]).files == Settings(files=[Path("a"), Path("b")]).files == ("a", "b")
    assert type(Settings(steps=3.0).steps) is type(Settings(steps=np.int64(3)).steps) is int
    assert type(Settings(rate=np.float32(0.5)).rate) is float


def test_group_of_another_type_is_refused():
    assert Group(settings=Settings()).settings.method == "lora"
    with pytest.raises(ValueError, match=r"settings: expected Settings, got \{\}"):
        Group(settings={})


def test_python_refuses_what_the_command_line_refuses():
    with pytest.raises(ValueError, match=r"method: expected lora \| full, got 'qlora': give --method lora"):
        ModelConfig(model="folder", method="qlora")


def test_values_of_a_field_exclude_and_require_others():
    @dataclass(frozen=True, kw_only=True)
    class Oven(Config):
        heat: Annotated[
            int,
            Excludes("open", "it burns", when=lambda heat: heat > 100),
            Excludes("rack", "it is too high", lambda rack: rack == 4, unless=lambda settings: settings["fan"]),
            Requires(("clock", "bell"), "someone must look"),
        ] = 0
        open: bool = False
        rack: int = 1
        fan: bool = False
        clock: str | None = None
        bell: bool = False

    Oven(open=True, rack=4)
    Oven(heat=100, clock="noon", open=True)
    Oven(heat=200, bell=True, rack=4, fan=True)
    with pytest.raises(ValueError, match=r"^--open is not for --heat 101: it burns: leave it out$"):
        Oven(heat=101, bell=True, open=True)
    with pytest.raises(ValueError, match=r"^--rack 4 is not for --heat 1: it is too high"):
        Oven(heat=1, bell=True, rack=4)
    with pytest.raises(ValueError, match=r"^--heat 1 needs --clock or --bell: someone must look$"):
        Oven(heat=1)


def test_relations_name_settings_of_a_run():
    fields = [*every_field(TrainConfig)]
    names = {field.name for _, field, _ in fields} | {*groups(TrainConfig)}
    relations = [relation for _, _, kind in fields for relation in kind.relations]
    for objective in map(OBJECTIVES.__getitem__, OBJECTIVES):
        relations += (*objective.excludes, *objective.requires)
    named = {name for each in relations for name in (each.settings if isinstance(each, Requires) else (each.setting,))}
    assert len(named) > 30 and named <= names
