"""transformers' Trainer: a Qwen3 from its configuration, and the same frozen with low-rank adapters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

from equilibria.diagnosis.summary import summarise
from equilibria.integrations.transformers import EquilibriaCallback
from equilibria.watching import WatchedRun
from tests.helpers.scripts import assert_nothing_alarming, text

STEPS, LENGTH = 60, 16


class Adapter(nn.Module):
    """A frozen matrix plus a product of two thin ones; the second starts at zero."""

    def __init__(self, frozen: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = frozen.requires_grad_(False)
        self.lora_A = nn.Linear(frozen.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base_layer(inputs) + self.lora_B(self.lora_A(inputs))


def qwen3() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def with_adapters() -> nn.Module:
    model = qwen3().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = (
            Adapter(layer.self_attn.q_proj),
            Adapter(layer.self_attn.v_proj),
        )
    return model


def train(model: nn.Module, folder: object, *callbacks: EquilibriaCallback, **options: object) -> nn.Module:
    tokens = text(8 * STEPS * LENGTH, 16).view(-1, LENGTH)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **options,
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=list(callbacks)).train()
    return model


def trained_twice(make, folder) -> WatchedRun:
    callback = EquilibriaCallback(every=1, summary=False)
    plain, watched = train(make(), folder), train(make(), folder, callback)
    states = plain.state_dict(), watched.state_dict()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert callback.monitor is not None and callback.monitor.failure is None
    return callback.monitor


def test_normalised_queries_and_keys_get_predictions(tmp_path):
    run = trained_twice(qwen3, tmp_path)
    assert_nothing_alarming(run)
    summaries = summarise(run.samples(), metadata=run.metadata)
    predicted = {summary.name for summary in summaries if summary.angle_predicted is not None}
    assert predicted == {
        summary.name for summary in summaries if ".q_proj." in summary.name or ".k_proj." in summary.name
    }
    assert set(run.metrics()["name"].to_pylist()) == {"loss"}
    assert {finding.kind for finding in run.findings()} <= {"norm_off", "varying_gradient"}


def test_adapters_are_measured_and_nothing_is_demanded(tmp_path):
    run = trained_twice(with_adapters, tmp_path)
    assert_nothing_alarming(run)
    names = [entry["name"] for entry in run.metadata["params"]]
    assert len(names) == 8 and all("lora_" in name for name in names)
    assert run.findings() == ()
