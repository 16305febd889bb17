"""nanoGPT's loop: two groups, accumulated gradients, clipping, and an lr that is written into the groups."""

from __future__ import annotations

import torch

from tests.helpers.scripts import Watch, assert_nothing_alarming, of_layer, text, token_batch, trained_twice
from tests.scripts.nanogpt import GPT, warm_up_and_cosine

STEPS = 120


def train(watch: Watch, *, blocks: int = 2) -> GPT:
    torch.manual_seed(0)
    model, tokens, draw = GPT(blocks=blocks), text(4000, 16), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.groups(0.1), lr=3e-3, betas=(0.9, 0.95))
    monitor = watch(model, optimizer)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = warm_up_and_cosine(step, peak=3e-3, warm_up=20, steps=STEPS)
        for _ in range(2):
            _, loss = model(*token_batch(tokens, 4, 16, draw))
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        monitor.log(loss=loss)
    return model


def test_a_gpt_is_measured_without_alarm():
    run = trained_twice(train)
    assert_nothing_alarming(run)
    assert run.findings() == ()
    table = " ".join(str(run.table()).split())
    assert "of 10 layers turn as predicted" in table and "from a measured growth gain G" in table
    assert "transformer.h.0.attn.c_proj" in table and "random steps" in table and "Norms need 1/(2 lr wd) =" in table
    laws = of_layer(run, "transformer.h.0.attn.c_attn.weight")["law"].to_pylist()
    assert laws[-1] == "measured gain" and laws.count(None) == 79  # the last of eight batches of ten steps ends here
    assert "transformer.h.0.attn.c_attn" in table
    logged = run.metrics()
    assert logged["name"].to_pylist() == ["loss"] * STEPS
    assert logged["value"][-1].as_py() < logged["value"][0].as_py() - 0.5  # it learns
    # the lr that the loop wrote before each step is the one that was recorded
    lr = of_layer(run, "transformer.wte.weight")["lr"].to_pylist()
    assert lr == [warm_up_and_cosine(step, peak=3e-3, warm_up=20, steps=STEPS) for step in range(STEPS)]


def test_six_blocks_share_rows_and_a_headline():
    run = trained_twice(lambda watch: train(watch, blocks=6))
    table = str(run.table())
    assert "transformer.h.*.mlp.c_proj" in table and "transformer.h.3.mlp.c_proj" not in table.split("\n\n")[1]
    assert "blocks turn alike" in table or "siblings differ by up to" in table
    assert_nothing_alarming(run)
