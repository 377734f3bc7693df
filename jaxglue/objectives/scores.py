"""Settings that do not go with objectives that train scores; importing them loads no JAX."""

from jaxglue.objectives.objective import Objective
from jaxglue.settings.config import Excludes

SCORES_EXCLUDE = (
    *Objective.excludes,
    Excludes("sample_prompt", "it asks for text, and scores are no text"),
    *(
        Excludes(name, "a score takes the place of lm_head, and trains anyway", lambda modules: "lm_head" in modules)
        for name in ("targets", "modules_to_save")
    ),
)
