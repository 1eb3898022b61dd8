"""trl's side of grpo.py; runs in the environment of bench/make_trl_env.sh."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import trl
from datasets import Dataset
from grpo_common import RATE, Meter, Step, options, read, report, reward
from resident import peak
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


class Watch(TrainerCallback):
    """Seconds and peak of every step, and what was logged."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.logs: dict[str, list[float]] = {"loss": [], "grad_norm": []}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.end()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for name, values in self.logs.items():
            if logs and name in logs:
                values.append(float(logs[name]))


class Given(trl.GRPOTrainer):
    """Trains on completions from the file instead of its own."""

    steps: tuple[Step, ...] = ()

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        return [list(ids) for ids in self.steps[self.state.global_step].completions], None


def score(completions: Any, completion_ids: Any, **kwargs: Any) -> list[float]:
    return [reward(ids) for ids in completion_ids]


def main() -> None:
    args = options()
    if args.threads:
        torch.set_num_threads(args.threads)
    steps = read(args.data)
    imports = peak()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    rows = len(steps[0].texts) * args.group
    settings: dict[str, Any] = {
        "per_device_train_batch_size": args.micro,
        "gradient_accumulation_steps": rows // args.micro,
        "num_generations": args.group,
        "max_completion_length": args.new,
        "max_steps": len(steps),
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.99,
        "shuffle_dataset": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "generation_kwargs": {"min_new_tokens": args.new},
    }
    if args.mode != "default":
        settings["gradient_checkpointing"] = False
    if args.mode == "agree":
        settings["bf16"] = False
    watch = Watch()
    kind = Given if args.mode == "agree" else trl.GRPOTrainer
    Given.steps = tuple(steps)
    with tempfile.TemporaryDirectory() as folder:
        trainer = kind(
            model=model,
            reward_funcs=score,
            args=trl.GRPOConfig(output_dir=folder, **settings),
            train_dataset=Dataset.from_list([{"prompt": text} for step in steps for text in step.texts]),
            processing_class=tokenizer,
            callbacks=[watch],
        )
        trainer.train()
    count = sum(p.numel() for p in model.parameters())
    # weights, gradients and two moments, all in float32
    report(
        args,
        watch.meter,
        imports,
        float(count * 16),
        losses=watch.logs["loss"],
        norms=watch.logs["grad_norm"],
    )


if __name__ == "__main__":
    main()
