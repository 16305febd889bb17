"""A vision transformer under AdamW with one cycle of lr, stepped after every batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.helpers.scripts import Watch, assert_nothing_alarming, images, of_layer, trained_twice

STEPS = 120


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_patch_embedding = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 16), nn.LayerNorm(16))
        self.cls_token, self.pos_embedding = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 17, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.transformer = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.mlp_head = nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        patches = functional.unfold(inputs, 2, stride=2).transpose(1, 2)
        x = self.to_patch_embedding(patches)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embedding
        return self.mlp_head(self.transformer(x)[:, 0])


def train(watch: Watch) -> nn.Module:
    torch.manual_seed(0)
    model, (inputs, labels) = ViT(), images(512)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS)
    watch(model, optimizer)
    for step in range(STEPS):
        chosen = slice(16 * step % 512, 16 * step % 512 + 16)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
        optimizer.step()
        scheduler.step()
    return model


def test_the_end_of_one_cycle_is_described_by_its_own_samples():
    run = trained_twice(train)
    assert_nothing_alarming(run)
    assert run.findings() == ()
    rows = of_layer(run, "mlp_head.weight")
    steps, angles = rows["step"].to_pylist(), rows["angle"].to_pylist()
    line = next(line for line in str(run.table()).splitlines() if line.startswith("mlp_head.weight"))
    shown = float(line.split()[1])
    # the table's angle is of the end, not of the peak; the tail, in which every sample has another lr, is left out
    window = angles[steps.index(89) : steps.index(98) + 1]
    assert "steps 89 to 98; the tail of the schedule" in str(run.table())
    assert min(window) <= shown <= max(window) < max(angles) / 5
    assert steps[-1] == STEPS - 1
    assert "0.003" not in line


def test_blocks_get_the_same_words(monkeypatch):
    """What is predicted of a layer is predicted of its twin; how far each has settled is its own."""
    monkeypatch.setenv("COLUMNS", "200")  # names in one line
    run = trained_twice(train)
    states = {line.split()[0]: line.split()[-1] for line in str(run.table()).splitlines() if ".layers." in line}
    for name, state in states.items():
        if ".layers.0." in name:
            twin = states[name.replace(".layers.0.", ".layers.1.")]
            assert twin == state or {twin, state} == {"settled", "settling"}
