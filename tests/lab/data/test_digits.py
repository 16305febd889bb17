"""The digits and their batches: the data themselves, and that only the seed decides the order."""

from __future__ import annotations

import sys
from itertools import islice

import pytest
import torch
from sklearn import datasets

from equilibria.errors import EquilibriaError
from equilibria.lab.data import Batches, load_digits


def test_every_image_is_in_one_part_of_the_split_with_its_label():
    digits, source = load_digits(), datasets.load_digits()
    scale = source.images.max() / (digits.train_images.max() - digits.train_images.min()).item()
    images = torch.cat([digits.train_images, digits.test_images])
    pixels = ((images - images.min()) * scale).round().to(torch.uint8).flatten(1)
    labels = torch.cat([digits.train_labels, digits.test_labels])
    ours = sorted((*row, label) for row, label in zip(pixels.tolist(), labels.tolist(), strict=True))
    theirs = sorted((*row, label) for row, label in zip(source.data.astype(int).tolist(), source.target, strict=True))
    assert ours == theirs


def test_without_scikit_learn_the_message_has_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(EquilibriaError, match=r'pip install "equilibria\[lab\]"'):
        load_digits()


def test_training_images_are_standardised_and_tensors_as_torch_wants_them():
    digits = load_digits()
    assert digits.train_images.mean().item() == pytest.approx(0, abs=1e-5)
    assert digits.train_images.std().item() == pytest.approx(1, abs=1e-5)
    assert (digits.train_images.dtype, digits.train_labels.dtype) == (torch.float32, torch.int64)
    assert digits.test_images.shape == (360, 1, 8, 8)


def test_they_are_the_same_on_every_machine():
    """Sums are exact; the deviation, in float64, is 3e-8 of itself away from where float32 rounds differently."""
    digits = load_digits()
    assert (digits.digest, digits.counts) == ("2c86b855722a06e0", "1,437 training and 360 test images")


def test_both_parts_hold_every_class_about_equally():
    digits = load_digits()
    for labels in (digits.train_labels, digits.test_labels):
        share = torch.bincount(labels, minlength=10) / len(labels)
        assert share.tolist() == pytest.approx([0.1] * 10, abs=4 * (0.09 / len(labels)) ** 0.5)  # standard errors


def test_the_split_does_not_depend_on_the_global_generator():
    torch.manual_seed(1)
    first = load_digits()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(first.test_images, load_digits().test_images)
    assert torch.equal(torch.get_rng_state(), state)


def numbered(count: int, **settings) -> Batches:
    """Images that hold their own number, so that they can be recognised."""
    return Batches(torch.arange(count).float().reshape(-1, 1, 1, 1), torch.arange(count) % 10, **settings)


def test_an_epoch_shows_each_image_at_most_once_and_epochs_differ():
    batches = numbered(100, batch_size=16)
    assert batches.per_epoch == 6
    epochs = [torch.cat([x.flatten() for x, _ in part]) for part in _epochs(batches, 3)]
    assert all(len(epoch.unique()) == 96 for epoch in epochs)
    assert not torch.equal(epochs[0], epochs[1])
    assert all(torch.equal(x.flatten().long() % 10, y) for x, y in islice(batches, 20))


def _epochs(batches, count):
    stream = iter(batches)
    return [list(islice(stream, batches.per_epoch)) for _ in range(count)]


def test_batches_depend_on_the_seed_alone_and_leave_the_global_generator_alone():
    def drawn(seed, global_seed):
        torch.manual_seed(global_seed)
        state = torch.get_rng_state()
        result = torch.cat(
            [torch.cat([x.flatten(), y]) for x, y in islice(numbered(50, batch_size=8, label_noise=0.3, seed=seed), 20)]
        )
        assert torch.equal(torch.get_rng_state(), state)
        return result

    assert torch.equal(drawn(3, 0), drawn(3, 1))
    assert not torch.equal(drawn(3, 0), drawn(4, 0))


def test_label_noise_replaces_the_asked_share_evenly_and_anew_each_time():
    """A replaced label is right by chance in one of ten cases: 0.9 * 0.3 differ. Four standard errors."""
    batches = numbered(100, batch_size=100, label_noise=0.3)
    labels = torch.stack([y[x.flatten().argsort()] for x, y in islice(batches, 200)])
    wrong = labels != torch.arange(100) % 10
    assert wrong.float().mean().item() == pytest.approx(0.27, abs=4 * (0.27 * 0.73 / wrong.numel()) ** 0.5)
    assert wrong.any(0).all()  # no image is spared, none is wrong for good
    assert not wrong.all(0).any()
    counts = torch.bincount(labels[wrong], minlength=10) / wrong.sum()
    assert counts.tolist() == pytest.approx([0.1] * 10, abs=4 * (0.09 / wrong.sum().item()) ** 0.5)


def test_noise_does_not_change_the_order_of_the_images():
    clean, noisy = numbered(40, batch_size=8, seed=5), numbered(40, batch_size=8, seed=5, label_noise=0.5)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(islice(clean, 15), islice(noisy, 15), strict=True))


def test_the_labels_are_left_as_they_were():
    labels = torch.zeros(20, dtype=torch.int64)
    list(islice(Batches(torch.zeros(20, 1), labels, batch_size=10, label_noise=1.0), 10))
    assert not labels.any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "got batch_size=0"),
        ({"batch_size": 11}, "got batch_size=11; expected at most the 10 images"),
        ({"batch_size": 2, "label_noise": 1.5}, "got label_noise=1.5"),
        ({"batch_size": 2, "seed": -1}, "got seed=-1"),
    ],
)
def test_bad_settings_raise(settings, message):
    with pytest.raises(EquilibriaError, match=message):
        numbered(10, **settings)


def test_images_and_labels_must_match():
    with pytest.raises(EquilibriaError, match="got 3 images and 2 labels"):
        Batches(torch.zeros(3, 1), torch.zeros(2), batch_size=1)


def drawn_labels(labels: torch.Tensor, **settings) -> set[int]:
    batches = Batches(torch.zeros(len(labels), 1), labels, batch_size=len(labels), label_noise=1.0, **settings)
    return set(torch.cat([drawn for _, drawn in islice(batches, 50)]).tolist())


def test_noise_draws_the_classes_that_there_are():
    assert drawn_labels(torch.arange(8) % 4) == {0, 1, 2, 3}
    assert drawn_labels(torch.arange(8) % 4, classes=6) == {0, 1, 2, 3, 4, 5}
    assert Batches(torch.zeros(8, 1), torch.arange(8) % 4, batch_size=2).classes == 4


def test_the_number_of_classes_does_not_change_the_order():
    few, many = numbered(40, batch_size=8, classes=10), numbered(40, batch_size=8, classes=1000)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(islice(few, 15), islice(many, 15), strict=True))


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [
        (torch.arange(8), 4, "got labels of 0 to 7; expected 0 to 3 with classes=4"),
        (torch.arange(8) - 1, None, "got labels of -1 to 6; expected labels from 0"),
        (torch.arange(8) - 1, 10, "got labels of -1 to 6; expected 0 to 9"),
        (torch.arange(8) / 2, None, r"got labels of torch.float32 \(8,\); expected whole numbers"),
        (torch.arange(8).view(8, 1), None, r"got labels of torch.int64 \(8, 1\)"),
        (torch.arange(8) % 1, 0, "got classes=0"),
    ],
)
def test_labels_must_be_numbers_of_classes(labels, classes, message):
    with pytest.raises(EquilibriaError, match=message):
        Batches(torch.zeros(8, 1), labels, batch_size=2, classes=classes)
