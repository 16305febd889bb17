"""Rows: from hand-made probes, in networks with filters of very different sizes, and refuted by scaling."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from equilibria.objectives._objective import objective
from equilibria.symmetry import Rows, symmetries
from equilibria.symmetry._probes import Probe
from equilibria.symmetry._rows import confirmed_rows, find_rows

ZERO = 1e-8


def found_in(radial, size) -> Rows | None:
    """What two probes say whose rows have these derivatives, relative to their sizes, with contrary signs."""
    size = np.array(size, dtype=float)
    radial = np.array(radial) * size
    nothing = np.zeros(1)
    probes = [Probe(nothing, nothing, {"w": sign * radial}, {"w": size}) for sign in (1, -1)]
    return find_rows(probes, zero=ZERO).get("w")


def test_the_finest_blocks():
    assert found_in([0, 0, 0, 0], [1, 1, 1, 1]) == Rows(1, 4, (True,) * 4)
    assert found_in([0.3, -0.3, 0.1, -0.1], [1, 1, 1, 1]) == Rows(2, 4, (True, True))
    assert found_in([0.3, -0.1, -0.1, -0.1], [1, 1, 1, 1]) == Rows(4, 4, (True,))
    assert found_in([0.3, 0.1, 0.1, 0.1], [1, 1, 1, 1]) is None
    assert found_in([0, 0, 0.1, 0.1], [1, 1, 1, 1]) == Rows(1, 4, (True, True, False, False))


def test_a_row_counts_as_zero_relative_to_its_own_size_down_to_a_thousandth_of_the_largest():
    """Rounding of a small row is that of its own size, but not below that of the sums it is computed with."""
    above, below = 10 * ZERO, 0.1 * ZERO
    assert found_in([below, 0], [1, 1]).invariant == (True, True)
    assert found_in([above, 0], [1, 1]).invariant == (False, True)
    # A third row that is not still, for all rows together would hide a small one.
    assert found_in([above, 0, 0.3], [0.01, 1, 1]).invariant == (False, True, False)  # its own size counts
    assert found_in([above, 0, 0.3], [1e-5, 1, 1]).invariant == (True, True, False)  # a thousandth counts
    assert found_in([1000 * above, 0, 0.3], [1e-5, 1, 1]).invariant == (False, True, False)


def test_a_row_without_gradient_is_not_called_invariant():
    """A dead unit: rounding, 1e-16 of others and with cancellation up to 1e-12; real ones were seen at 1e-9."""
    assert found_in([0, 0, 0], [1e-12, 1, 1]) == Rows(1, 3, (False, True, True))
    assert found_in([0, 0, 0], [1e-10, 1, 1]) == Rows(1, 3, (True, True, True))
    assert found_in([0.0, 0.3], [0.0, 1]) is None  # nothing that is alive is still
    assert found_in([0.3, -0.3, 0, 0], [1, 1, 0, 0]) == Rows(2, 4, (True, False))  # dead rows fit any block


def filters(small: float, *, layer: type[nn.Module] = nn.BatchNorm2d) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), layer(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 3))
    with torch.no_grad():
        net[0].weight[3] *= small
    return net


class OwnBatchNorm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, maps):
        centred = maps - maps.mean((0, 2, 3), keepdim=True)
        return self.weight * centred / (centred.square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()


def images() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(24, 1, 6, 6, generator=generator), torch.randint(3, (24,), generator=generator))]


@pytest.mark.parametrize(
    ("small", "layer"),
    [(1e-5, nn.BatchNorm2d), (1e-12, nn.BatchNorm2d), (1e-20, nn.InstanceNorm2d), (1e-5, OwnBatchNorm)],
)
def test_a_filter_much_smaller_than_its_neighbours_is_still_an_invariant_row(small, layer):
    result = symmetries(objective(filters(small, layer=layer), functional.cross_entropy), images())
    assert result.rows["0.weight"] == Rows(1, 8, (True,) * 8)
    assert result.how["0.weight"] == "rows"
    assert result.notes == ()


@pytest.mark.parametrize("small", [1e-5, 1e-12])
def test_a_token_much_smaller_than_others_is_still_an_invariant_row(small):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(6, 8), nn.LayerNorm(8), nn.Flatten(), nn.Tanh(), nn.Linear(24, 3))
    with torch.no_grad():
        net[0].weight[2] *= small
    tokens = torch.randint(6, (32, 3), generator=torch.Generator().manual_seed(1))
    result = symmetries(objective(net, functional.cross_entropy), [(tokens, torch.arange(32) % 3)])
    assert result.rows["0.weight"] == Rows(1, 6, (True,) * 6)


class NormalisedByPair(nn.Module):
    """Rows whose norms matter in pairs, although the derivative in each of them is hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, inputs):
        norms = self.weight.norm(dim=1, keepdim=True)
        share = (norms[::2] / norms[1::2]).detach().repeat_interleave(2, dim=0)
        return torch.tanh(inputs @ (share * self.weight / norms).T)


def test_rows_that_scaling_refutes_are_left_out():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), NormalisedByPair(), nn.Linear(6, 3))
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(24, 4, generator=generator), torch.randint(3, (24,), generator=generator)
    result = symmetries(objective(net, functional.cross_entropy), [data])
    assert result.how["0.weight"] == "rows"
    assert result.how["2.weight"] == "alone"
    assert result.notes == ("rows of 2.weight look invariant one by one, but scaling does not confirm it",)


def test_every_claimed_block_is_really_scaled_each_by_another_factor():
    seen = []
    claimed = {"w": Rows(2, 12, (True, True, False, True, True, True)), "v": Rows(1, 3, (True, True, True))}
    base = {"w": torch.ones(5, 12, dtype=torch.float64), "v": torch.ones(3, dtype=torch.float64)}
    assert confirmed_rows(claimed, base, axes={"w": 1, "v": 0}, stays=lambda point: not seen.append(point)) == claimed
    there, back, *together = seen
    factors = there["w"][0].reshape(6, 2)
    assert torch.equal(factors[:, 0], factors[:, 1])
    assert factors[2, 0] == 1.0
    assert len(factors[:, 0].unique()) == 6
    logs = torch.cat([factors[:, 0], there["v"]]).log2().abs()
    assert ((logs >= 0.5) & (logs <= 2)).sum() == 8
    assert torch.allclose(there["w"] * back["w"], base["w"])
    assert {float(point["w"][0, 0]) for point in together} == {1 / 32, 0.5, 2.0, 32.0, 65536.0}
    for point in together:
        factors = point["w"][0].reshape(6, 2)
        assert torch.equal(factors[[0, 1, 3, 4, 5]], factors[:1].expand(5, 2))
        assert torch.equal(factors[2], torch.ones(2, dtype=torch.float64))


def test_one_refuted_tensor_does_not_drop_others():
    claimed = {name: Rows(1, 2, (True, True)) for name in "abcde"}
    base = {name: torch.ones(2, dtype=torch.float64) for name in claimed}
    kept = confirmed_rows(claimed, base, axes=dict.fromkeys(claimed, 0), stays=lambda point: "d" not in point)
    assert set(kept) == set("abce")
    assert confirmed_rows({}, base, axes={}, stays=lambda point: False) == {}


@pytest.mark.parametrize("small", [0.1, 0.01])
def test_a_tensor_refuted_as_a_whole_has_no_invariant_rows(small):
    """Small filters are far from the clip: a row grown by 4 does not show it."""
    torch.manual_seed(0)
    norm = [nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 3)]
    net = nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.ReLU6(), *norm)
    with torch.no_grad():
        net[0].weight.mul_(small)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(24, 1, 6, 6, generator=generator), torch.randint(3, (24,), generator=generator)
    result = symmetries(objective(net, functional.cross_entropy), [data])
    assert (result.how["0.weight"], result.rows) == ("no", {})


class HalfNormalised(nn.Module):
    """Half of the features are clipped and normalised, the others are not."""

    def __init__(self, clip: float) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(4), nn.Linear(8, 3)
        self.clip = clip

    def forward(self, inputs):
        features = self.first(inputs)
        normalised = self.norm(features[:, :4].clamp(-self.clip, self.clip))
        return self.last(torch.cat([normalised, features[:, 4:].tanh()], dim=1))


@pytest.mark.parametrize(("clip", "how"), [(100.0, "no"), (1e9, "4 of 8 rows")])
def test_rows_are_scaled_far(clip, how):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(24, 4, generator=generator), torch.randint(3, (24,), generator=generator)
    assert symmetries(objective(HalfNormalised(clip), functional.cross_entropy), [data]).how["first.weight"] == how


@pytest.mark.parametrize("small", [1e-9, 1e-12])
def test_a_tiny_filter_does_not_hide_other_tensors(small):
    """Its gradient is as many times larger; the norms of the whole tensor would multiply that by the other filters."""
    net = filters(1.0)
    expected = symmetries(objective(net, functional.cross_entropy), images()).how
    with torch.no_grad():
        net[0].weight[0] *= small
    assert symmetries(objective(net, functional.cross_entropy), images()).how == expected
