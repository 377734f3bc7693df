"""Time a step of GRPO by TRL: sampling by transformers' `generate` or by vLLM, and micro-batches, as JSON lines.

    python benchmarks/rl_step.py --inputs-only FILE.npz
    python benchmarks/peers/grpo.py --inputs FILE.npz --prompts 32 --micro-batches 6
    python benchmarks/peers/grpo.py --inputs FILE.npz --prompts 64 --vllm 0.5 --batch 4 --no-checkpointing

Answers of a part of the prompts are sampled in one call, of forced lengths, so that all of them take as many calls; the
time of all micro-batches follows from some. Random weights, adapters on all linear layers, bf16. With --vllm, vLLM
samples in the trainer's process (TRL's `colocate`), with as much of the GPU's memory as that says; before it samples,
TRL merges the adapters and copies all weights to it, whose time stands apart.
"""

import argparse
import contextlib
import copy
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import engines
import numpy as np
from host import HostMemory
from random_model import random_model

END = 1
"""Token that ends and pads answers: the padding after a short one begins with TRL's end of it."""


class Finished(Exception):  # noqa: N818 - no error
    """All that is timed has run."""


def build_tokenizer():
    """Return a tokenizer that pads; prompts are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": END}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<eos>", eos_token="<eos>")


def forced(lengths: np.ndarray, times: list[float]):
    """Return a criterion that ends answers at their lengths, and notes the time of each step."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Forced(StoppingCriteria):
        def __call__(self, tokens, scores, **_):
            self.began = getattr(self, "began", tokens.shape[1] - 1)
            times.append(time.perf_counter())
            if len(times) % 128 == 0:
                print(json.dumps({"step": len(times), "seconds": round(times[-1] - times[0], 2)}), flush=True)
            return torch.as_tensor(tokens.shape[1] - self.began >= lengths - 1, device=tokens.device)

    return StoppingCriteriaList([Forced()])


class Clock:
    """Times of a step's phases.

    Args:
        lengths: of the answers that are sampled.
        given: answers are random tokens, so that training alone takes time.
        longest: tokens after which the answers that are sampled end.
        timed: micro-batches to time after the first.
        total: answers of the whole step.
        batch: answers of a micro-batch.
    """

    def __init__(self, lengths: np.ndarray, *, given: bool, longest: int, timed: int, total: int, batch: int):
        self._lengths, self._given, self._longest = lengths, given, longest
        self._timed, self._total, self._batch = timed, total, batch
        self._ends: list[float] = []
        self.result: dict = {"answers": len(lengths), "answer_tokens": int(lengths.sum())}

    def generate(self, call: Callable) -> Callable:
        """Return `generate` with forced lengths."""
        import torch

        def timed(*args, **kwargs):
            longest = int(self._lengths.max())
            if self._given:
                prompts = kwargs["input_ids"]
                shape = len(prompts), longest
                answers = torch.randint(2, 1000, shape, device=prompts.device)
                places = torch.arange(longest, device=prompts.device)[None]
                ends = torch.as_tensor(self._lengths - 1, device=prompts.device)[:, None]
                return torch.cat([prompts, answers.masked_fill(places >= ends, END)], 1)
            times: list[float] = []
            lengths = np.minimum(self._lengths, self._longest)
            began = time.perf_counter()
            found = call(*args, stopping_criteria=forced(lengths, times), **kwargs)
            self.result["sampling_s"] = round(time.perf_counter() - began, 2)
            steps = np.diff(times)
            for place in sorted({10, len(steps) // 4, len(steps) // 2, len(steps) - 1}):
                if 0 < place < len(steps):
                    near = steps[max(place - 8, 0) : place + 8]
                    self.result.setdefault("ms_by_step", {})[place] = round(float(np.median(near)) * 1e3, 2)
            self.result["sampling_of_all_s"] = round(self.result["sampling_s"] * self._total / len(lengths), 1)
            self.show()
            return found

        return timed

    def sample(self, call: Callable) -> Callable:
        """Return vLLM's `generate` with forced lengths."""

        def timed(prompts, sampling_params, **kwargs):
            lengths = np.minimum(self._lengths, self._longest).tolist()
            forced = [copy.copy(sampling_params) for _ in prompts]
            for each, length in zip(forced, lengths, strict=True):
                each.max_tokens, each.ignore_eos = length, True
            began = time.perf_counter()
            found = call(prompts, sampling_params=forced, **kwargs)
            self.result["sampling_s"] = round(time.perf_counter() - began, 2)
            made = [len(output.token_ids) for request in found for output in request.outputs]
            assert made == lengths, "vLLM's answers have other lengths than the forced ones"
            self.result["sampling_of_all_s"] = round(self.result["sampling_s"] * self._total / len(lengths), 1)
            self.show()
            return found

        return timed

    def synchronize(self, call: Callable) -> Callable:
        """Return TRL's copying of weights to vLLM, timed."""
        import torch

        def timed():
            began = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.result["weights_to_vllm_s"] = round(time.perf_counter() - began, 2)

        return timed

    def end_of_micro_batch(self) -> None:
        """Note the end of a micro-batch; raise Finished after the last."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._ends.append(time.perf_counter())
        if len(self._ends) < 2:
            return
        seconds = statistics.median(np.diff(self._ends))
        self.result["micro_batch_s"] = round(seconds, 3)
        self.result["training_of_all_s"] = round(seconds * self._total / self._batch, 1)
        if torch.cuda.is_available():
            self.result["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        if len(self._ends) > self._timed:
            self.show()
            raise Finished

    def show(self) -> None:
        """Print what is known."""
        print(json.dumps(self.result), flush=True)


def build_trainer(args: argparse.Namespace, clock: Clock, prompts: np.ndarray, config: dict, longest: int):
    """Return TRL's trainer of a random model, whose prompts are tokens and whose rewards are random."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Trainer(GRPOTrainer):
        def _tokenize_prompts(self, rows):
            return [prompts[int(row)].tolist() for row in rows], None, {}

    class Ends(TrainerCallback):
        def on_substep_end(self, *_, **__):
            clock.end_of_micro_batch()

        def on_step_end(self, *_, **__):
            clock.end_of_micro_batch()

    def reward(completions, **_):
        return np.random.default_rng(0).normal(size=len(completions)).tolist()

    answers, folder = args.prompts * args.answers, tempfile.mkdtemp()
    vllm = {}
    if args.vllm:
        write_description(folder, config, args.layers)
        vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": args.vllm}
        vllm["vllm_max_model_length"] = prompts.shape[1] + longest
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=answers // args.batch,
        num_generations=args.answers,
        max_completion_length=longest,
        shuffle_dataset=False,
        max_steps=2,
        learning_rate=1e-5,
        bf16=torch.cuda.is_available(),
        gradient_checkpointing=not args.no_checkpointing,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **({"cache_implementation": args.cache} if args.cache else {}),
        **vllm,
    )
    targets = engines.TARGETS
    lora = LoraConfig(r=engines.RANK, lora_alpha=2 * engines.RANK, target_modules=targets, task_type="CAUSAL_LM")
    trainer = Trainer(
        model=random_model(config, args.layers, eos_token_id=END, pad_token_id=END, _name_or_path=folder),
        args=settings,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": str(row)} for row in range(args.prompts)]),
        processing_class=build_tokenizer(),
        peft_config=lora,
        callbacks=[Ends()],
    )
    if args.vllm:
        sampler = trainer.vllm_generation
        sampler.llm.generate = clock.sample(sampler.llm.generate)
        sampler.sync_weights = clock.synchronize(sampler.sync_weights)
    else:
        trainer.model.generate = clock.generate(trainer.model.generate)
    return trainer


def write_description(folder: str, config: dict, layers: int | None) -> None:
    """Write what vLLM reads of a model whose weights TRL gives it, and let it draw random ones until then."""
    from trl.generation import vllm_generation

    description = config | ({"num_hidden_layers": layers} if layers else {}) | {"torch_dtype": "bfloat16"}
    description |= {"eos_token_id": END, "pad_token_id": END}
    (Path(folder) / "config.json").write_text(json.dumps(description))
    build_tokenizer().save_pretrained(folder)
    vllm_generation.LLM = partial(vllm_generation.LLM, load_format="dummy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--prompts", type=int, default=32, help="whose answers one call samples")
    parser.add_argument("--batch", type=int, default=8, help="answers of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=6, help="that are timed")
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--vllm", type=float, help="sample by vLLM, with this share of the GPU's memory")
    parser.add_argument("--cache", help="transformers' implementation of the cache, such as static")
    parser.add_argument("--longest", type=int, default=1 << 30, help="end sampled answers after so many tokens")
    parser.add_argument("--given", action="store_true", help="answers are random tokens, not sampled")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engines.stay_offline()  # TRL waits for its telemetry
    os.environ.update(engines.VLLM_ENVIRONMENT if args.vllm else {})
    began = time.perf_counter()
    with np.load(args.inputs) as stored:
        prompts, lengths, config = stored["prompts"], stored["lengths"], json.loads(str(stored["config"]))
    total, args.answers = lengths.size, lengths.shape[1]
    # spread over all prompts, with the longest of all answers as every call of so many has one about as long
    chosen = np.linspace(0, len(prompts) - 1, args.prompts).round().astype(int)
    own = lengths[chosen].ravel()
    sizes = {"timed": args.micro_batches, "total": total, "batch": args.batch}
    clock = Clock(own, given=args.given, longest=args.longest, **sizes)
    clock.result |= {"batch": args.batch, "checkpointing": not args.no_checkpointing, "cache": args.cache}
    clock.result |= {"versions": engines.versions(), "vllm": args.vllm}
    host = HostMemory()
    trainer = build_trainer(args, clock, prompts[chosen], config, int(lengths.max()))
    clock.result["load_s"] = round(time.perf_counter() - began, 1)
    clock.show()
    with contextlib.suppress(Finished):
        trainer.train()
    clock.result["host_gib"] = host.added()
    clock.show()
    if args.json:
        engines.write_results(args.json, clock.result)


if __name__ == "__main__":
    main()
