"""What is made of a data set: classes, blocks, pooled and standardised images, each against a slow computation."""

from __future__ import annotations

import pickle
from fractions import Fraction
from itertools import product

import pytest
import torch

from equilibria.data import ImageSet
from equilibria.errors import EquilibriaError


def some_set(count: int = 60, side: int = 8, classes: int = 4) -> ImageSet:
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(256, (count, 3, side, side), generator=generator, dtype=torch.uint8)
    images[:, 1] //= 3
    labels = torch.randperm(count, generator=generator) % classes
    return ImageSet(images, labels, images[: count // 2], labels[: count // 2], tuple("abcdefghij"[:classes]), "made")


def test_classes_are_selected_and_renumbered_in_order():
    given = some_set()
    found = given.select_classes((3, 0))
    kept = [i for i, label in enumerate(given.train_labels.tolist()) if label in (3, 0)]
    assert torch.equal(found.train_images, given.train_images[kept])
    assert found.train_labels.tolist() == [{3: 0, 0: 1}[given.train_labels[i].item()] for i in kept]
    assert found.class_names == ("d", "a") and found.classes == 2
    assert torch.equal(found.test_images, given.test_images[[i for i in kept if i < 30]])


@pytest.mark.parametrize("classes", [(), (0, 0), (4,), (-1,)])
def test_bad_classes(classes):
    with pytest.raises(EquilibriaError, match=r"classes="):
        some_set().select_classes(classes)


def test_blocks_have_the_same_size_in_each_class_and_nothing_in_common():
    given = some_set()
    blocks = [given.per_class(5, block=block) for block in range(3)]
    for number, block in enumerate(blocks):
        for label in range(4):
            of_class = given.train_images[given.train_labels == label][5 * number : 5 * number + 5]
            assert torch.equal(block.train_images[block.train_labels == label], of_class)
        assert torch.equal(block.test_images, given.test_images)
    with pytest.raises(EquilibriaError, match=r"got count=5, block=3; expected .* at most 15"):
        given.per_class(5, block=3)


@pytest.mark.parametrize("size", [4, 2, 1])
def test_pooling_is_the_exact_mean_of_squares(size):
    given = some_set(5)
    found, step = given.pooled(size), 8 // size
    for image, row, column in product(range(5), range(size), range(size)):
        rows, columns = (slice(at * step, (at + 1) * step) for at in (row, column))
        total = int(given.train_images[image, 2, rows, columns].long().sum())
        assert Fraction(found.train_images[image, 2, row, column].item()) == Fraction(total, step**2)
    assert torch.equal(given.pooled(4).pooled(size).train_images, found.train_images)
    assert given.pooled(8) is given


@pytest.mark.parametrize("size", [3, 16, 0])
def test_bad_size(size):
    with pytest.raises(EquilibriaError, match=f"size={size}"):
        some_set().pooled(size)


@pytest.mark.parametrize("size", [8, 4])
def test_standardised_by_the_training_images(size):
    given = some_set().pooled(size)
    found = given.standardised()
    pixels = given.train_images.double()
    mean, deviation = pixels.mean((0, 2, 3), keepdim=True), pixels.std((0, 2, 3), keepdim=True, correction=0)
    # float32 statistics and two operations: at most four roundings of pixels of up to 255 over a deviation above 10
    assert torch.allclose(found.train_images.double(), (pixels - mean) / deviation, rtol=0, atol=4 * 255 / 10 * 2**-24)
    assert torch.equal(found.test_images, found.train_images[:30])
    assert found.train_images.dtype == torch.float32
    assert torch.equal(given.standardiser()(given.train_images[7:9]), found.train_images[7:9])


def test_the_statistics_do_not_depend_on_the_order_of_the_images():
    given = some_set(5000, side=4)  # more than one chunk
    turned = ImageSet(
        given.train_images.flip(0), given.train_labels, given.test_images, given.test_labels, given.class_names, ""
    )
    for one, other in ((given, turned), (given.pooled(2), turned.pooled(2))):
        assert torch.equal(one.standardiser().mean, other.standardiser().mean)
        assert torch.equal(one.standardiser().deviation, other.standardiser().deviation)


def test_it_can_be_sent_to_another_process():
    given = some_set()
    again = pickle.loads(pickle.dumps(given))
    assert torch.equal(again.train_images, given.train_images) and repr(again) == repr(given)


def test_equal_pixels_cannot_be_standardised():
    images = torch.full((4, 1, 2, 2), 7, dtype=torch.uint8)
    with pytest.raises(EquilibriaError, match="equal pixels"):
        ImageSet(images, torch.zeros(4).long(), images, torch.zeros(4).long(), ("a",), "").standardised()
