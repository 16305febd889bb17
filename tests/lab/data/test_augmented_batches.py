"""Flips, crops, the point to go on from, and that a seed means the same batches everywhere."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from equilibria.errors import EquilibriaError
from equilibria.lab.data import Batches, ImageSet, imagenet
from equilibria.lab.data.batches import crop, flip
from equilibria.lab.data.pictures import class_folders
from equilibria.lab.data.windows import NUMBERS, random_window, resized_windows

IMAGES = torch.arange(1, 40 * 2 * 6 * 5 + 1).view(40, 2, 6, 5)
LABELS = torch.arange(40) % 10

PINNED = [
    ([9, 4, 2, 11, 5], [0, 0, 1, 2, 2]),
    ([8, 3, 7, 0, 6], [2, 0, 1, 0, 1]),
    ([4, 3, 7, 2, 10], [2, 2, 1, 2, 1]),
]
PINNED_PIXELS = [[0, 1, 2, 3], [3, 2, 0, 0], [1, 0, 3, 2]]


def batches(**settings) -> Batches:
    images = IMAGES.float() if settings.get("resized") else IMAGES
    return Batches(images, LABELS, **{"batch_size": 8, **settings})


def test_flip_of_each_image():
    marks = torch.arange(40) % 3 == 0
    for image, mark, found in zip(IMAGES, marks, flip(IMAGES, marks), strict=True):
        assert torch.equal(found, image[:, :, [4, 3, 2, 1, 0]] if mark else image)


@given(st.integers(1, 7), st.data())
def test_crop_of_each_image(padding, data):
    corners = data.draw(st.lists(st.tuples(*2 * [st.integers(0, 2 * padding)]), min_size=3, max_size=3))
    found = crop(IMAGES[:3], torch.tensor(corners), padding=padding)
    for image, (top, left), window in zip(IMAGES, corners, found, strict=False):
        for row in range(6):
            for column in range(5):
                y, x = row + top - padding, column + left - padding
                expected = image[:, y, x] if 0 <= y < 6 and 0 <= x < 5 else torch.zeros(2)
                assert window[:, row, column].tolist() == expected.tolist()


def test_half_of_the_images_are_flipped_and_all_offsets_come_equally_often():
    """Four standard errors of counts; an image's own pixels say where its window was."""
    flips, corners = [], []
    for images, _ in islice(batches(flip=True), 500):
        flips.append(images[:, 0, 0, 0] > images[:, 0, 0, 1])
    assert torch.cat(flips).float().mean().item() == pytest.approx(0.5, abs=4 * 0.5 / 4000**0.5)
    for images, _ in islice(batches(crop=1), 500):
        inside = (images[:, 0, 2, 2] - 1) % 30  # the pixel of the original that came to row 2, column 2
        corners.append(torch.stack([inside // 5 - 1, inside % 5 - 1], 1))
    counts = torch.bincount((torch.cat(corners) * torch.tensor([3, 1])).sum(1), minlength=9) / 4000
    assert counts.tolist() == pytest.approx([1 / 9] * 9, abs=4 * (8 / 81 / 4000) ** 0.5)


def test_flip_and_crop_change_neither_order_nor_noise():
    plain = batches(label_noise=0.5, seed=2)
    for settings in ({"flip": True}, {"crop": 2}, {"flip": True, "crop": 1}):
        for (a, noisy_a), (b, noisy_b) in zip(
            islice(plain, 12), islice(batches(label_noise=0.5, seed=2, **settings), 12), strict=True
        ):
            assert torch.equal(noisy_a, noisy_b)
            largest = a.flatten(1).max(1).values  # images have their own range of numbers
            assert ((b.flatten(1).max(1).values - 1) // 60 == (largest - 1) // 60).all()


@pytest.mark.parametrize("step", [0, 1, 5, 13])
def test_going_on_from_a_step_is_as_if_nothing_had_happened(step):
    settings = {"label_noise": 0.4, "flip": True, "crop": 1, "seed": 7}
    through = list(islice(batches(**settings), step + 6))[step:]
    for (a, x), (b, y) in zip(through, islice(batches(**settings).starting_at(step), 6), strict=True):
        assert torch.equal(a, b) and torch.equal(x, y)


def test_the_transform_comes_last():
    plain = islice(batches(flip=True, crop=1), 3)
    transformed = islice(batches(flip=True, crop=1, transform=lambda images: images / 2 + 1), 3)
    assert all(torch.equal(a / 2 + 1, b) for (a, _), (b, _) in zip(plain, transformed, strict=True))


def test_the_frame_is_black_where_pixels_are_standardised_behind_the_crop():
    """The other way round it has the mean colour, 0."""
    pixels = torch.randint(256, (40, 2, 6, 5), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    images = ImageSet(pixels, LABELS, pixels, LABELS, tuple("abcdefghij"), "random")
    black = images.standardiser()(torch.zeros(1, 2, 1, 1, dtype=torch.uint8))
    assert (black < -1).all()
    settings = {"batch_size": 40, "crop": 2, "seed": 1}
    behind, _ = next(iter(Batches(pixels, LABELS, transform=images.standardiser(), **settings)))
    before, _ = next(iter(Batches(images.standardised().train_images, LABELS, **settings)))
    frame = before == 0
    assert 0.1 < frame.float().mean() < 0.9
    assert torch.equal(behind[frame], black.expand_as(behind)[frame])
    assert torch.equal(behind[~frame], before[~frame])


def test_a_seed_means_these_images_on_any_machine():
    images = torch.arange(12).view(12, 1, 1, 1)
    drawn = islice(Batches(images, torch.arange(12) % 3, batch_size=5, classes=3, label_noise=0.5, seed=11), 3)
    assert [(x.flatten().tolist(), y.tolist()) for x, y in drawn] == PINNED
    many = Batches(torch.arange(50_000), torch.zeros(50_000).long(), batch_size=128)  # as many as CIFAR-10 has
    assert next(iter(many))[0][:8].tolist() == [36044, 49165, 37807, 11341, 6091, 16904, 36293, 28026]
    pixels = torch.arange(4).view(1, 1, 2, 2).expand(3, 1, 2, 2)
    turned = next(iter(Batches(pixels, torch.zeros(3).long(), batch_size=3, flip=True, crop=1, seed=11)))[0]
    assert turned.flatten(1).tolist() == PINNED_PIXELS


def drawn_windows(count: int, height: int, width: int) -> torch.Tensor:
    numbers = torch.rand(count, NUMBERS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.tensor([random_window(each, height=height, width=width) for each in numbers.tolist()])


def test_windows_are_inside_and_as_large_and_wide_as_inceptions():
    top, left, height, width = drawn_windows(20_000, 256, 256).double().T
    assert (top >= 0).all() and (left >= 0).all() and (top + height <= 256).all() and (left + width <= 256).all()
    share, shape = height * width / 256**2, width / height
    assert share.min() > 0.078 and share.max() <= 1 and shape.min() > 0.735 and shape.max() < 1.36
    assert abs(float(shape.log().mean())) < 0.005  # as often high as wide
    # Below 3/4 of the image windows of every ratio fit, so that the share is uniform there.
    small = share[share < 0.7]
    assert float(small.mean()) == pytest.approx((0.08 + 0.7) / 2, abs=0.005)
    room = 256 - height
    assert float((top[room > 20] / (room[room > 20] + 1)).mean()) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(("height", "width", "middle"), [(2, 400, [0, 198, 2, 3]), (400, 3, [198, 0, 4, 3])])
def test_where_no_window_fits_it_is_the_largest_of_an_allowed_shape_in_the_middle(height, width, middle):
    assert drawn_windows(5, height, width).tolist() == 5 * [middle]


def resized_by_pillow(picture: Image.Image, window, size: int) -> np.ndarray:
    top, left, height, width = window
    cut = picture.crop((left, top, left + width, top + height))
    return np.asarray(cut.resize((size, size), Image.Resampling.BILINEAR)).transpose(2, 0, 1)


def test_resizing_a_window_is_that_of_pillow():
    pixels = np.random.default_rng(0).integers(0, 256, (3, 40, 30), np.uint8)
    numbers = torch.rand(6, NUMBERS, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = resized_windows(torch.from_numpy(np.stack([pixels] * 6)), numbers, size=12)
    for image, drawn in zip(found.numpy(), numbers.tolist(), strict=True):
        window = random_window(drawn, height=40, width=30)
        expected = resized_by_pillow(Image.fromarray(pixels.transpose(1, 2, 0)), window, 12)
        assert np.abs(image.astype(int) - expected).max() <= 1


def picture_folder(folder, *, count: int = 3) -> dict[str, np.ndarray]:
    """PNG files, which lose nothing, of several sizes and of grey ones too, in two classes."""
    generator, drawn = np.random.default_rng(0), {}
    for place in range(2 * count):
        name = f"{'ab'[place % 2]}/{place}.png"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shape = (300 + 20 * place, 260, 3) if place else (280, 320)
        drawn[name] = generator.integers(0, 256, shape, np.uint8)
        Image.fromarray(drawn[name]).save(folder / name)
    return drawn


def test_pictures_give_windows_of_the_whole_picture_and_the_middles(tmp_path):
    drawn = picture_folder(tmp_path)
    pictures, labels, names = class_folders(tmp_path)
    assert names == ("a", "b") and labels.tolist() == [0, 0, 0, 1, 1, 1] and pictures.shape == (6, 3, 224, 224)
    files = [Image.open(path).convert("RGB") for path in pictures.paths]
    batch, found = next(iter(Batches(pictures, labels, batch_size=6, resized=16, seed=4)))
    order = torch.randperm(6, generator=torch.Generator().manual_seed(4))
    assert found.tolist() == labels[order].tolist()
    numbers = next(Batches(pictures, labels, batch_size=6, resized=16, seed=4)._draws()).windows.tolist()
    for image, place, each in zip(batch.numpy(), order.tolist(), numbers, strict=True):
        wide, high = files[place].size
        window = random_window(each, height=high, width=wide)
        assert np.array_equal(image, resized_by_pillow(files[place], window, 16))
    middle = pictures[1:2].numpy()[0]
    wide, high = files[1].size
    resized = files[1].resize((256, int(high * 256 / wide)), Image.Resampling.BILINEAR)
    assert np.array_equal(
        middle, np.asarray(resized).transpose(2, 0, 1)[:, round((resized.size[1] - 224) / 2) :][:, :224, 16:240]
    )
    assert len(drawn) == len(pictures)
    for file in files:
        file.close()


def test_imagenet_is_read_from_pictures(tmp_path):
    picture_folder(tmp_path / "imagenet" / "train")
    picture_folder(tmp_path / "imagenet" / "val", count=2)
    images = imagenet(tmp_path)
    assert images.classes == 2 and images.test_images.shape == (4, 3, 224, 224) and len(images.digest) == 16
    assert images.train_images.dtype == torch.uint8 and images.train_images[:2].shape == (2, 3, 224, 224)
    again = imagenet(tmp_path)  # from the array that the first call wrote
    assert torch.equal(again.test_images, images.test_images) and again.digest == images.digest
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name] == []
    (tmp_path / "imagenet" / "val" / "b" / "1.png").unlink()
    with pytest.raises(EquilibriaError, match="remove it to decode it again"):
        imagenet(tmp_path)
    (tmp_path / "imagenet" / "train" / "a" / "0.png").write_bytes(b"no picture")
    with pytest.raises(EquilibriaError, match=r"0\.png cannot be read .*; expected a picture"):
        images.train_images[:1]
    (tmp_path / "imagenet" / "train" / "c").mkdir()
    with pytest.raises(EquilibriaError, match="3 classes in train and 2 in val"):
        imagenet(tmp_path)


def test_resized_batches_have_the_order_and_labels_of_others():
    plain, resized = next(iter(batches(seed=3))), next(iter(batches(seed=3, resized=4)))
    assert torch.equal(plain[1], resized[1]) and resized[0].shape[2:] == (4, 4)
    again = list(islice(batches(seed=3, resized=4, flip=True), 4))[3:]
    assert torch.equal(next(batches(seed=3, resized=4, flip=True).starting_at(3))[0], again[0][0])
    with pytest.raises(EquilibriaError, match="got crop=1 and resized=4; expected one of the two"):
        batches(crop=1, resized=4)


def test_shares_are_the_parts_of_a_batch():
    settings = {"label_noise": 0.4, "flip": True, "resized": 4, "seed": 7, "batch_size": 8}
    whole = list(islice(batches(**settings), 3))
    parts = [list(islice(batches(**settings, share=(rank, 4)), 3)) for rank in range(4)]
    for step, (images, labels) in enumerate(whole):
        assert torch.equal(torch.cat([part[step][0] for part in parts]), images)
        assert torch.equal(torch.cat([part[step][1] for part in parts]), labels)
    for share in ((4, 4), (0, 3), (-1, 2)):
        with pytest.raises(EquilibriaError, match=rf"got share=\({share[0]}, {share[1]}\) of batches of 8"):
            batches(**settings, share=share)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"crop": -1}, "crop=-1"), ({"crop": 0.5}, "crop=0.5"), ({"resized": -1}, "resized=-1")],
)
def test_bad_settings(settings, message):
    with pytest.raises(EquilibriaError, match=message):
        batches(**settings)


def test_only_images_can_be_flipped():
    with pytest.raises(EquilibriaError, match=r"got images of \(4, 3\)"):
        Batches(torch.zeros(4, 3), torch.zeros(4), batch_size=2, flip=True)
    with pytest.raises(EquilibriaError, match="step=-1"):
        batches().starting_at(-1)


def test_a_batch_size_may_be_a_float_if_it_is_whole():
    images, labels = torch.arange(10.0).view(10, 1), torch.arange(10) % 2
    one, two = (next(iter(Batches(images, labels, batch_size=size))) for size in (4, 4.0))
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
