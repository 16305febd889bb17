"""PPO in the manner of CleanRL: orthogonal weights, Adam with eps 1e-5, a linear lr, clipping, mini-batches."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributions import Categorical

from tests.helpers.scripts import Watch, assert_nothing_alarming, trained_twice

UPDATES, EPOCHS, ENVIRONMENTS, LENGTH = 8, 4, 8, 16


def orthogonal(layer: nn.Linear, gain: float = 2**0.5) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.constant_(layer.bias, 0.0)
    return layer


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = {"actor": (3, 0.01), "critic": (1, 1.0)}
        for name, (outputs, gain) in shapes.items():
            hidden = orthogonal(nn.Linear(4, 16)), nn.Tanh(), orthogonal(nn.Linear(16, 16)), nn.Tanh()
            self.add_module(name, nn.Sequential(*hidden, orthogonal(nn.Linear(16, outputs), gain)))


def train(watch: Watch) -> nn.Module:
    torch.manual_seed(0)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    monitor = watch(agent, optimizer)
    for update in range(UPDATES):
        optimizer.param_groups[0]["lr"] = 2.5e-3 * (1 - update / UPDATES)
        states = torch.randn(ENVIRONMENTS * LENGTH, 4)
        with torch.no_grad():
            policy = Categorical(logits=agent.actor(states))
            actions = policy.sample()
            before = policy.log_prob(actions)
            rewards = (actions == states[:, :3].argmax(dim=1)).float()
            advantages = rewards - agent.critic(states)[:, 0]
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(states)).split(32):
                policy = Categorical(logits=agent.actor(states[rows]))
                ratio = (policy.log_prob(actions[rows]) - before[rows]).exp()
                gain = (advantages[rows] - advantages[rows].mean()) / (advantages[rows].std() + 1e-8)
                policy_loss = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
                value_loss = (agent.critic(states[rows])[:, 0] - rewards[rows]).square().mean() / 2
                loss = policy_loss - 0.01 * policy.entropy().mean() + 0.5 * value_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        monitor.log(value_loss=value_loss, policy_loss=policy_loss)
    return agent


def test_an_agent_is_measured_and_its_losses_are_kept():
    run = trained_twice(train)
    assert_nothing_alarming(run)
    assert run.findings() == ()
    assert run.step == UPDATES * EPOCHS * ENVIRONMENTS * LENGTH // 32
    assert set(run.metrics()["name"].to_pylist()) == {"value_loss", "policy_loss"}
    assert "All predictions come from a measured growth gain G." in str(run.table()).replace("\n", " ")
