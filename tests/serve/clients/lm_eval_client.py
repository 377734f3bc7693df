"""Run a local task of lm-evaluation-harness by `local-completions`: log-likelihoods, perplexity and answers."""

import json
import sys
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

folder = Path(tempfile.mkdtemp())
rows = [
    {"question": f"What is {a} plus {b}?", "answers": [str(a + b), str(a + b + 1)], "gold": 0}
    for a, b in ((3, 4), (1, 1))
]
(folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
SHARED = f"""
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/rows.jsonl
test_split: test
"""
(folder / "sums.yaml").write_text(
    f"task: sums{SHARED}output_type: multiple_choice\n"
    'doc_to_text: "{{question}} "\ndoc_to_choice: "{{answers}}"\ndoc_to_target: "{{gold}}"\n'
    "metric_list:\n  - metric: acc\n"
)
(folder / "said.yaml").write_text(
    f"task: said{SHARED}output_type: generate_until\n"
    'doc_to_text: "{{question}}"\ndoc_to_target: "{{answers[0]}}"\n'
    'generation_kwargs:\n  until: ["."]\n  max_gen_toks: 8\nmetric_list:\n  - metric: exact_match\n'
)
(folder / "text.yaml").write_text(
    f'task: text{SHARED}output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{{{question}}}}"\n'
    "metric_list:\n  - metric: word_perplexity\n"
)
results = lm_eval.simple_evaluate(
    model="local-completions",
    model_args={"model": "tiny", "base_url": f"{sys.argv[1]}/v1/completions", "max_length": 1024},
    tasks=["sums", "said", "text"],
    task_manager=TaskManager(include_path=str(folder)),
    bootstrap_iters=0,
)["results"]
assert 0 <= results["sums"]["acc,none"] <= 1 and results["text"]["word_perplexity,none"] > 1, results
print("answered")
