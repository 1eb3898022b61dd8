"""trl's side of vs_trl.py; runs in the environment of bench/make_trl_env.sh."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import trl
from datasets import Dataset
from resident import peak
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from vs_trl_common import Row, kto_rows, options, read, report

RATE = 1e-5


class Losses(TrainerCallback):
    """The logged loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.values.append(float(logs["loss"]))


class Ids:
    """A mixin: the data set already has the columns that the preparation would make."""

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return dataset


class Sft(Ids, trl.SFTTrainer):
    pass


class Dpo(Ids, trl.DPOTrainer):
    pass


class Kto(Ids, trl.KTOTrainer):
    pass


class Reward(Ids, trl.RewardTrainer):
    pass


def dataset(task: str, rows: Sequence[Row], batch: int) -> Dataset:
    if task == "dpo":
        columns = [
            {"prompt_ids": r["prompt"], "chosen_ids": r["chosen"], "rejected_ids": r["rejected"]}
            for r in rows
        ]
    elif task == "reward":
        columns = [
            {"chosen_ids": r["prompt"] + r["chosen"], "rejected_ids": r["prompt"] + r["rejected"]}
            for r in rows
        ]
    elif task == "kto":
        columns = [
            {
                "prompt_ids": r["prompt"],
                "completion_ids": r["completion"],
                "KL_completion_ids": r["mismatched"],
                "label": r["label"],
            }
            for r in kto_rows(rows, batch)
        ]
    else:
        columns = [
            {"input_ids": r["prompt"] + r["chosen"], "labels": [-100] * len(r["prompt"]) + r["chosen"]}
            for r in rows
        ]
    return Dataset.from_list(columns)


def load(args: Any, tokenizer: Any) -> Any:
    """The model in float32; a reward model with a head of zeros and a padding that ends no turn."""
    if args.task != "reward":
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, dtype=torch.float32, num_labels=1)
    torch.nn.init.zeros_(model.score.weight)
    model.config.pad_token_id = tokenizer.pad_token_id
    return model


def main() -> None:
    args = options()
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = read(args.data)
    imports = peak()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = load(args, tokenizer)
    kinds = {
        "sft": (Sft, trl.SFTConfig),
        "dpo": (Dpo, trl.DPOConfig),
        "kto": (Kto, trl.KTOConfig),
        "reward": (Reward, trl.RewardConfig),
    }
    trainer_class, config_class = kinds[args.task]
    settings: dict[str, Any] = {
        "per_device_train_batch_size": args.batch,
        "num_train_epochs": 1,
        "max_steps": args.steps,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.99,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "max_length": None,
        "train_sampling_strategy": "sequential",
    }
    if args.mode == "agree":
        settings |= {"bf16": False, "gradient_checkpointing": False}
    losses = Losses()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            model=model,
            args=config_class(output_dir=folder, **settings),
            train_dataset=dataset(args.task, rows, args.batch),
            processing_class=tokenizer,
            callbacks=[losses],
        )
        began = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - began
    count = sum(p.numel() for p in model.parameters())
    copies = (
        4 if args.task in ("sft", "reward") else 5
    )  # weights, gradients, two moments, and a reference model
    used = (peak() - imports) / 1e6
    report(args, rows, losses.values, seconds, used, count * 4 * copies / 1e6)


if __name__ == "__main__":
    main()
