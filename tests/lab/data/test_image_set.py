"""What is made of a data set: classes, blocks, pooled and standardised images, each against a slow computation."""

from __future__ import annotations

import hashlib
import pickle
import struct
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
import torch

from equilibria.errors import EquilibriaError
from equilibria.lab.data import ImageSet, image_set


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


def test_classes_may_be_given_by_name():
    given = some_set()
    for classes in (("d", "a"), ["d", 0], (3.0, "a")):
        found, same = given.select_classes(classes), given.select_classes((3, 0))
        assert found.class_names == ("d", "a") and found.digest == same.digest


@pytest.mark.parametrize(
    ("classes", "got"),
    [
        ((), r"classes=\[\]"),
        ((0, 0), r"classes=\[0, 0\]"),
        (("b", 1), r"classes=\['b', 1\]"),
        ((4,), r"classes=\[4\], but there is no 4"),
        ((-1,), r"classes=\[-1\], but there is no -1"),
        ((0, 1.5), r"classes=\[0, 1.5\], but there is no 1.5"),
        ((True,), r"classes=\[True\], but there is no True"),
        ([[1]], r"classes=\[\[1\]\], but there is no \[1\]"),
        (("a", "e", "f"), r"classes=\['a', 'e', 'f'\], but there is no 'e', no 'f'"),
    ],
)
def test_bad_classes(classes, got):
    expected = "expected labels of 0 to 3, or names, each once, of: a, b, c, d"
    with pytest.raises(EquilibriaError, match=rf"^got {got}; {expected}$"):
        some_set().select_classes(classes)


@pytest.mark.parametrize("classes", [2, "ab", None])
def test_classes_that_are_no_list(classes):
    with pytest.raises(
        EquilibriaError, match=rf"^got classes={classes!r}; expected a list such as \[{classes!r}\]: lab"
    ):
        some_set().select_classes(classes)


def test_many_names_are_not_all_listed():
    given = replace(some_set(), class_names=tuple(f"n{number}" for number in range(30)))
    with pytest.raises(EquilibriaError, match=r"0 to 29, .*: n0, .*, n19, \.\.\.$"):
        given.select_classes(("x",))


def test_one_class_is_singular():
    assert ", 1 class: c; from" in repr(some_set().select_classes((2,)))


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


@pytest.mark.parametrize("step", [3, 5, 7])
def test_pooling_of_other_squares_is_the_nearest_number(step):
    """The mean of uint8 pixels has no more error than the rounding of one division, and mostly has one."""
    given = some_set(20, side=2 * step)
    found, inexact = given.pooled(2), 0
    for image, row, column in product(range(20), range(2), range(2)):
        rows, columns = (slice(at * step, (at + 1) * step) for at in (row, column))
        total = int(given.train_images[image, 2, rows, columns].long().sum())
        pixel = found.train_images[image, 2, row, column]
        assert pixel.item() == torch.tensor(total / step**2, dtype=torch.float64).to(torch.float32).item()
        inexact += Fraction(pixel.item()) != Fraction(total, step**2)
    assert inexact > 40


@pytest.mark.parametrize("size", [3, 16, 0, -4, 2.5, "4", None, True])
def test_bad_size(size):
    with pytest.raises(EquilibriaError, match=rf"^got size={size!r}; expected a divisor of 8: 1, 2, 4, 8$"):
        some_set().pooled(size)


def test_whole_numbers_may_be_floats():
    given = some_set()
    assert torch.equal(given.pooled(4.0).train_images, given.pooled(4).train_images)
    assert torch.equal(given.per_class(5.0, block=1.0).train_images, given.per_class(5, block=1).train_images)


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


def test_counts():
    many = torch.zeros(12_345, 1, 1, 1), torch.zeros(12_345).long()
    assert ImageSet(*many, *many, ("a",), "").counts == "12,345 training and 12,345 test images"


def digest_by_hand(given: ImageSet) -> str:
    """Number by number, with the byte order written out."""
    content = b""
    for images, labels in ((given.train_images, given.train_labels), (given.test_images, given.test_labels)):
        content += repr((*images.shape, 1)).encode()
        content += struct.pack(f"<{images.numel()}f", *images.flatten().tolist())
        content += struct.pack(f"<{len(labels)}q", *labels.tolist())
    return hashlib.sha256(content).hexdigest()[:16]


def test_the_digest_is_that_of_the_numbers_in_any_type_and_order_of_memory():
    given = some_set()
    assert given.digest == digest_by_hand(given) == "e1c14d77147889b7"
    turned = given.train_images.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    for other in (
        replace(given, train_images=given.train_images.float(), train_labels=given.train_labels.int()),
        replace(given, train_images=turned, source="elsewhere", class_names=tuple("wxyz")),
    ):
        assert other.digest == given.digest
    for size in (4, 2):
        small = given.pooled(size).standardised()
        assert small.digest == digest_by_hand(small)


def test_any_change_of_the_inputs_changes_the_digest():
    given = some_set()
    pixel, label = given.train_images.clone(), given.train_labels.clone()
    pixel[-1, -1, -1, -1] ^= 1
    label[-1] = (label[-1] + 1) % 4
    others = [
        replace(given, train_images=pixel),
        replace(given, train_labels=label),
        replace(given, test_images=pixel[30:]),
        replace(given, test_labels=label[30:]),
        replace(given, train_images=given.train_images.flip(0), train_labels=given.train_labels.flip(0)),
        replace(given, train_images=given.train_images.view(60, 3, 4, 16)),
        given.per_class(5),
        given.per_class(5, block=1),
        given.select_classes((1, 0)),
        given.select_classes((0, 1)),
        given.pooled(4),
        given.standardised(),
        given.pooled(4).standardised(),
    ]
    digests = [given.digest, *(other.digest for other in others)]
    assert len(set(digests)) == len(digests)


def test_large_sets_have_a_digest_of_every_few_images_and_all_labels(monkeypatch):
    given = some_set()  # 60 images of 192 numbers, and 30
    monkeypatch.setattr(image_set, "_HASHED", 192 * 25)
    kept, left_out, label = given.train_images.clone(), given.train_images.clone(), given.train_labels.clone()
    kept[57, 0, 0, 0] ^= 1
    left_out[58, 0, 0, 0] ^= 1
    label[58] = (label[58] + 1) % 4
    assert replace(given, train_images=left_out).digest == given.digest
    assert replace(given, train_images=kept).digest != given.digest
    assert replace(given, train_labels=label).digest != given.digest
    assert given.per_class(14).digest != given.digest


def test_a_digest_is_computed_once_for_a_set(monkeypatch):
    given = some_set()
    first = given.digest
    monkeypatch.setattr(image_set.hashlib, "sha256", None)
    assert given.digest == first
    assert pickle.loads(pickle.dumps(given)).digest == first
    with pytest.raises(TypeError):
        given.pooled(4).digest  # noqa: B018
