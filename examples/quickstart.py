"""Watch a small network on made-up data, and print what each layer does beside its prediction: no extra needed."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import equilibria as eq

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)

with eq.watch(model, optimizer, every=1) as monitor:
    for inputs in torch.randn(400, 32, 20):
        optimizer.zero_grad()
        cross_entropy(model(inputs), inputs[:, :5].argmax(1)).backward()
        optimizer.step()
print(monitor.table())
