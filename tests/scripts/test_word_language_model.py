"""An LSTM language model under plain SGD with clipping, its lr divided by four when validation stops improving."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.helpers.scripts import Watch, assert_nothing_alarming, text, trained_twice, words

EPOCHS, LENGTH = 6, 10


class Model(nn.Module):
    def __init__(self, vocabulary: int = 16, width: int = 16) -> None:
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(vocabulary, width), nn.LSTM(width, width)
        self.decoder = nn.Linear(width, vocabulary)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor, hidden: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return self.decoder(output), hidden


def train(watch: Watch) -> nn.Module:
    torch.manual_seed(0)
    model, data, lr = Model(), text(2010, 16).view(-1, 10), 2.0
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    monitor, best = watch(model, optimizer), float("inf")
    for _ in range(EPOCHS):
        hidden = None
        for start in range(0, 150, LENGTH):
            optimizer.zero_grad()
            if hidden is not None:
                hidden = tuple(state.detach() for state in hidden)
            logits, hidden = model(data[start : start + LENGTH], hidden)
            loss = functional.cross_entropy(logits.flatten(0, 1), data[start + 1 : start + LENGTH + 1].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            monitor.log(loss=loss)
        with torch.no_grad():
            logits, _ = model(data[150:200], None)
            validation = functional.cross_entropy(logits.flatten(0, 1), data[151:201].flatten()).item()
        if validation < best:
            best = validation
        else:
            lr /= 4
            optimizer.param_groups[0]["lr"] = lr
    return model


def test_an_lr_that_falls_by_four_is_no_fault():
    run = trained_twice(train)
    assert_nothing_alarming(run)
    assert run.metrics().num_rows == run.step == EPOCHS * 15
    assert "weight decay" not in words(run.findings())  # nothing here looks scale-invariant
