"""Make classes/: transformers' sequence classifiers with PEFT's adapters: losses, scores and gradients.

Run with torch, transformers and peft installed (made with torch 2.13, transformers 5.24 and peft 0.21.2, in float32 on
a CPU), after `make_models.py`:

    python tests/goldens/make_classes.py

Contents, of `qwen3_tied` with three labels:
    adapter/          as PEFT saved it, with the score among its modules_to_save
    classes.json      documents, label and labels; of each problem type loss and gradients, (norm, Σ gradient ·
                      cos(index / 10)); scores
"""

import json
import shutil

import torch
from make_models import HERE
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForSequenceClassification

LABELS = 3
DOCUMENTS = [[5, 9, 2, 17], [3, 3, 11], [21, 4, 8, 1, 1, 6], [13], [7, 20, 2, 2, 19]]
LABEL = [2, 0, 1, 2, 0]
SEVERAL = [[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1], [0, 0, 1]]


def classifier(problem: str):
    config = AutoConfig.from_pretrained(HERE / "qwen3_tied", num_labels=LABELS, pad_token_id=0, problem_type=problem)
    options = {"config": config, "dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForSequenceClassification.from_pretrained(HERE / "qwen3_tied", **options)
    lora = LoraConfig(r=1, lora_alpha=2, target_modules=["v_proj"], task_type="SEQ_CLS")
    model, generator = get_peft_model(model, lora).eval(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def our_name(name: str) -> str:
    for part in ("base_model.model.", ".default", ".modules_to_save"):
        name = name.replace(part, "", 1)
    return name.removesuffix(".weight") if ".lora_" in name else name


def case(problem: str) -> dict:
    model = classifier(problem)
    padded = torch.zeros((len(DOCUMENTS), max(map(len, DOCUMENTS))), dtype=torch.long)
    for row, document in zip(padded, DOCUMENTS, strict=True):
        row[: len(document)] = torch.tensor(document)
    labels = torch.tensor(LABEL) if problem.startswith("single") else torch.tensor(SEVERAL, dtype=torch.float32)
    found = model(input_ids=padded, attention_mask=(padded > 0).long(), labels=labels)
    found.loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            values = parameter.grad.double().flatten()
            projection = values @ torch.cos(torch.arange(len(values)).double() / 10)
            gradients[our_name(name)] = [round(float(values.norm()), 9), round(float(projection), 9)]
    scores = [[round(float(score), 6) for score in row] for row in found.logits]
    return {"loss": round(float(found.loss), 7), "scores": scores, "gradients": gradients}


def main() -> None:
    shutil.rmtree(HERE / "classes", ignore_errors=True)
    classifier("single_label_classification").save_pretrained(HERE / "classes/adapter")
    (HERE / "classes/adapter/README.md").unlink(missing_ok=True)
    path = HERE / "classes/adapter/adapter_config.json"
    written = {key: value for key, value in json.loads(path.read_text()).items() if value not in (None, False, {})}
    path.write_text(json.dumps(written | {"base_model_name_or_path": "qwen3_tied"}))
    problems = ("single_label_classification", "multi_label_classification")
    golden = {"documents": DOCUMENTS, "label": LABEL, "labels": SEVERAL} | {name: case(name) for name in problems}
    (HERE / "classes/classes.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
