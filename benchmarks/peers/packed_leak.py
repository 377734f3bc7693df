"""Print the loss of each packed row's last document by transformers, with documents told apart by `position_ids`.

python benchmarks/peers/packed_leak.py FOLDER < ROWS
"""

import json
import sys

import torch
import transformers


def main() -> None:
    folder, rows = sys.argv[1], json.load(sys.stdin)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def loss(row: list[list[int]]) -> float:
        tokens = torch.tensor([[token for document in row for token in document]])
        positions = torch.tensor([[place for document in row for place in range(len(document))]])
        logits = model(tokens, position_ids=positions, use_cache=False).logits[0, -len(row[-1]) : -1]
        return float(torch.nn.functional.cross_entropy(logits, torch.tensor(row[-1][1:])))

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    print(json.dumps({"losses": {"transformers, position_ids": [loss(row) for row in rows]}, "versions": versions}))


if __name__ == "__main__":
    main()
