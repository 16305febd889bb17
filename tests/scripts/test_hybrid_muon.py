"""Matrices of the blocks under Muon, embeddings and gains under AdamW, in two optimizers that step together."""

from __future__ import annotations

import torch

from tests.helpers.scripts import Watch, assert_nothing_alarming, text, token_batch, trained_twice, words
from tests.scripts.nanogpt import GPT, warm_up_and_cosine

STEPS = 100


def train(watch: Watch) -> GPT:
    torch.manual_seed(0)
    model, tokens, draw = GPT(), text(4000, 16), torch.Generator().manual_seed(1)
    matrices = [param for param in model.transformer.h.parameters() if param.ndim == 2]
    chosen = set(map(id, matrices))
    others = [param for param in model.parameters() if id(param) not in chosen]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1)
    adamw = torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    watch(model, [muon, adamw])
    for step in range(STEPS):
        for optimizer, peak in ((muon, 0.02), (adamw, 3e-3)):
            optimizer.param_groups[0]["lr"] = warm_up_and_cosine(step, peak=peak, warm_up=10, steps=STEPS)
        _, loss = model(*token_batch(tokens, 8, 16, draw))
        loss.backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    return model


def test_both_optimizers_have_their_law_and_step_together():
    run = trained_twice(train)
    assert_nothing_alarming(run)
    assert run.step == STEPS
    laws = {entry["name"]: entry["law"] for entry in run.metadata["params"]}
    assert laws["transformer.h.0.mlp.c_fc.weight"] == "Muon" and laws["transformer.wte.weight"] == "AdamW"
    assert "no law" not in words(run.findings())
