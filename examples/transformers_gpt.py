"""A small GPT learns to go on counting, watched inside of transformers' trainer: `python examples/transformers_gpt.py`.

It is built like Qwen3, which normalises queries and keys: the weights that make them are scale-invariant, and have a
predicted angle. Those of GPT-2 are not: there the angles are measured, and nothing is predicted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments, set_seed

from equilibria.integrations.transformers import EquilibriaCallback

WORDS, LENGTH = 64, 32


def make_texts(count: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that go up in steps of 1 to 7, from anywhere."""
    start, stride = torch.randint(WORDS, (count, 1)), torch.randint(1, 8, (count, 1))
    texts = (start + stride * torch.arange(LENGTH)) % WORDS
    return [{"input_ids": text, "labels": text} for text in texts]


def main(folder: Path, steps: int) -> None:
    set_seed(0)
    size = Qwen3Config(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
    )
    arguments = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        weight_decay=3.0,  # so large that they settle within the example
        lr_scheduler_type="constant",
        save_steps=steps,
        logging_steps=steps // 4,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    with EquilibriaCallback(folder / "run", every=5) as callback:  # tells what it found when the training ends
        Trainer(Qwen3ForCausalLM(size), arguments, train_dataset=make_texts(4096), callbacks=[callback]).train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/transformers_gpt"))
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    main(given.folder, given.steps)
