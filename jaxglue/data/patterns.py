"""Prompts and completions of rows as Jinja texts over their columns."""

from collections.abc import Callable
from typing import Any

from jaxglue.data.limits import template_time_limit


def pair_renderer(prompt: str, completion: str) -> Callable[[dict[str, Any]], dict[str, str]]:
    """Return the function of a row's columns that renders its prompt and completion.

    Raises:
        ValueError: a text that is no Jinja; the function raises it for a column that a row lacks.
    """
    from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    texts = {"prompt": prompt, "completion": completion}
    try:
        templates = {name: environment.from_string(text) for name, text in texts.items()}
    except TemplateSyntaxError as error:
        raise ValueError(f"prompt or completion is no Jinja text: {error}") from error

    def render(row: dict[str, Any]) -> dict[str, str]:
        try:
            with template_time_limit():
                return {name: template.render({**row, "row": row}) for name, template in templates.items()}
        except (TemplateError, TypeError, ArithmeticError) as error:
            columns = ", ".join(map(repr, row))[:200]
            raise ValueError(f"its prompt or completion cannot be made: {error}; its columns are {columns}") from error

    return render
