"""CIFAR-10 in all the forms in which people have it: the same tensors from each, and clear words where it is not."""

from __future__ import annotations

import hashlib
import pickle
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from tests.helpers.official_files import (
    binary_files,
    official_meta,
    python2_pickle,
    python_files,
    some_batches,
    write_archive,
    write_npz,
)

from equilibria.errors import EquilibriaError
from equilibria.lab.data import cifar, cifar10, cifar10_2k
from equilibria.lab.data.cifar import read_batch, read_names, read_records, write_records

BATCHES = some_batches()


def write(form: str, folder) -> None:
    files = python_files(BATCHES)
    if form == "python archive":
        write_archive(folder / "cifar-10-python.tar.gz", files, folder="cifar-10-batches-py")
    elif form == "binary archive":
        write_archive(folder / "cifar-10-binary.tar.gz", binary_files(BATCHES), folder="cifar-10-batches-bin")
    elif form == "npz":
        write_npz(folder, BATCHES)
    else:
        inner = folder / "cifar-10-batches-py" if form == "unpacked" else folder
        inner.mkdir(exist_ok=True)
        for name, content in files.items():
            (inner / name).write_bytes(content)


@pytest.mark.parametrize("form", ["python archive", "binary archive", "unpacked", "the unpacked folder itself", "npz"])
def test_every_form_gives_the_same_tensors(form, tmp_path):
    write(form, tmp_path)
    found = cifar10(tmp_path, verify=False)
    images, labels = (np.concatenate([BATCHES[f"data_batch_{n}"][part] for n in range(1, 6)]) for part in (0, 1))
    assert torch.equal(found.train_images, torch.from_numpy(images))
    assert torch.equal(found.train_labels, torch.from_numpy(labels).long())
    assert torch.equal(found.test_images, torch.from_numpy(BATCHES["test_batch"][0]))
    assert found.test_labels.tolist() == BATCHES["test_batch"][1].tolist()
    assert (found.train_images.dtype, found.train_labels.dtype) == (torch.uint8, torch.int64)
    assert found.class_names[3] == "cat" and str(tmp_path.parent) not in found.source


@pytest.mark.parametrize("form", ["python archive", "binary archive", "unpacked"])
def test_official_files_are_verified(form, tmp_path, monkeypatch):
    """A stand-in is refused, with both checksums; with its own checksums it passes; one changed bit does not."""
    write(form, tmp_path)
    with pytest.raises(
        EquilibriaError, match=r"(data_batch_1|binary.tar.gz) has MD5 [0-9a-f]{32}; expected [0-9a-f]{32}"
    ):
        cifar10(tmp_path)
    known = {name: hashlib.md5(content).hexdigest() for name, content in python_files(BATCHES).items()}
    monkeypatch.setattr(cifar, "PYTHON_MD5", known)
    if form == "binary archive":
        archive = (tmp_path / "cifar-10-binary.tar.gz").read_bytes()
        monkeypatch.setattr(cifar, "BINARY_MD5", hashlib.md5(archive).hexdigest())
    assert len(cifar10(tmp_path).train_images) == 100
    if form == "unpacked":
        file = tmp_path / "cifar-10-batches-py" / "test_batch"
        content = bytearray(file.read_bytes())
        content[-100] ^= 1
        file.write_bytes(content)
        with pytest.raises(EquilibriaError, match=f"test_batch has MD5 .*; expected {known['test_batch']}"):
            cifar10(tmp_path)


def test_npz_files_are_verified_by_their_images(tmp_path, monkeypatch):
    """Whatever wrote them: by the binary version's files with the same images. Each file is, and one bit is enough."""
    write_npz(tmp_path, BATCHES)
    with pytest.raises(
        EquilibriaError,
        match=r"cifar10_train_1\.npz has images of SHA-256 [0-9a-f]{64}; expected cee91656.*"
        "read from Python alone, with verify=False",
    ):
        cifar10(tmp_path)
    official = [hashlib.sha256(content).hexdigest() for content in binary_files(BATCHES).values()]
    names = [*(f"cifar10_train_{number}.npz" for number in range(1, 6)), "cifar10_test.npz"]
    monkeypatch.setattr(cifar, "NPZ_SHA256", dict(zip(names, official, strict=True)))
    x, y = BATCHES["data_batch_4"]
    np.savez_compressed(tmp_path / "cifar10_train_4.npz", x=np.asfortranarray(x), y=y.astype(">i4"))
    assert len(cifar10(tmp_path).train_images) == 100
    for name, (x, y) in zip(names, BATCHES.values(), strict=True):
        for changed in ({"x": x ^ (np.arange(x.size) == 5).astype(np.uint8).reshape(x.shape)}, {"y": np.roll(y, 1)}):
            np.savez(tmp_path / name, **{"x": x, "y": y, **changed})
            with pytest.raises(EquilibriaError, match=f"{name} has images of SHA-256"):
                cifar10(tmp_path)
        np.savez(tmp_path / name, x=x, y=y)
    assert len(cifar10(tmp_path).train_images) == 100


def test_fewer_npz_files_are_fewer_images_and_a_warning_but_a_gap_raises(tmp_path):
    write_npz(tmp_path, BATCHES, numbers=(1, 2, 3))
    expected = r"only 60 of its 50,000 training images: .* has no cifar10_train_4\.npz, cifar10_train_5\.npz$"
    with pytest.warns(UserWarning, match=expected) as caught:
        found = cifar10(tmp_path, verify=False)
    assert [warning.filename for warning in caught] == [__file__]
    assert found.source == "cifar10_train_1.npz, cifar10_train_2.npz, cifar10_train_3.npz"
    assert found.counts == "60 training and 20 test images"
    (tmp_path / "cifar10_train_2.npz").unlink()
    with pytest.raises(EquilibriaError, match=r"has .*train_1.npz, cifar10_train_3.npz; expected no gap"):
        cifar10(tmp_path, verify=False)


def test_2k_of_fewer_files_is_the_same_2k(tmp_path):
    """Nothing is missing then, and nothing is said: warnings are errors here."""
    write_npz(tmp_path, some_batches(2500), numbers=(1,))
    assert cifar10_2k(tmp_path, verify=False).counts == "2,000 training and 2,500 test images"


def test_2k_is_the_first_200_of_each_class_in_order(tmp_path):
    batches = some_batches(500, seed=1)
    write_npz(tmp_path, batches)
    found = cifar10_2k(tmp_path, verify=False)
    images, labels = (np.concatenate([batches[f"data_batch_{n}"][part] for n in range(1, 6)]) for part in (0, 1))
    seen, taken = [0] * 10, []
    for index, label in enumerate(labels):
        if seen[label] < 200:
            taken.append(index)
        seen[label] += 1
    assert len(taken) == 2000
    assert torch.equal(found.train_images, torch.from_numpy(images[taken]))
    assert found.train_labels.tolist() == labels[taken].tolist()
    assert len(found.test_images) == 500

    for number in range(1, 6):
        (tmp_path / f"cifar10_train_{number}.npz").unlink()
    np.savez(tmp_path / "cifar10_2k.npz", x=images[taken], y=labels[taken], index=taken)
    again = cifar10_2k(tmp_path, size=16, classes=(5, 2), verify=False)
    assert torch.equal(again.train_images, found.select_classes((5, 2)).pooled(16).train_images)
    with pytest.raises(EquilibriaError, match="was not found"):  # 2,000 images are not CIFAR-10
        cifar10(tmp_path)


def test_missing_files_are_reported_once_with_where_to_get_them(tmp_path, monkeypatch):
    with pytest.raises(EquilibriaError) as caught:
        cifar10(tmp_path)
    for part in (str(tmp_path), "cifar-10-python.tar.gz", "cs.toronto.edu", "EQUILIBRIA_DATA", "folder="):
        assert part in str(caught.value)
    assert "cifar10_2k.npz" not in str(caught.value)
    with pytest.raises(EquilibriaError, match=r"looked for .* or cifar10_2k\.npz with cifar10_test\.npz"):
        cifar10_2k(tmp_path)
    monkeypatch.setenv("EQUILIBRIA_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(EquilibriaError, match="elsewhere"):
        cifar10()
    monkeypatch.delenv("EQUILIBRIA_DATA")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(EquilibriaError, match=r"home/\.cache/equilibria/data"):
        cifar10()


def test_the_environment_variable_is_used_and_an_argument_wins(tmp_path, monkeypatch):
    write_npz(tmp_path, BATCHES)
    monkeypatch.setenv("EQUILIBRIA_DATA", str(tmp_path))
    assert len(cifar10(verify=False).test_images) == 20
    with pytest.raises(EquilibriaError, match="was not found"):
        cifar10(tmp_path / "other")


def test_incomplete_and_damaged_files(tmp_path):
    write("unpacked", tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(EquilibriaError, match="has data_batch_1 but not data_batch_4"):
        cifar10(tmp_path, verify=False)
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").unlink()
    write("python archive", tmp_path)
    archive = tmp_path / "cifar-10-python.tar.gz"
    archive.write_bytes(archive.read_bytes()[:-3000])
    with pytest.raises(EquilibriaError, match="cannot be read"):
        cifar10(tmp_path, verify=False)
    write_archive(archive, {"data_batch_1": b""}, folder="x")
    with pytest.raises(EquilibriaError, match="has no data_batch_2"):
        cifar10(tmp_path, verify=False)
    with pytest.raises(EquilibriaError, match="is a file; expected the folder"):
        cifar10(archive)


PIXELS = np.zeros((2, 3, 32, 32), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((2, 32, 32, 3), np.uint8), "y": np.zeros(2, int)}, r"x of uint8 \(2, 32, 32, 3\)"),
        ({"x": PIXELS.astype(np.float32), "y": np.zeros(2, int)}, r"x of float32 \(2, 3, 32, 32\)"),
        ({"x": PIXELS, "y": np.zeros(3, int)}, r"y of \(3,\); expected"),
        ({"x": PIXELS, "y": np.array(3)}, r"y of \(\); expected"),
        ({"x": np.array(3, np.uint8), "y": np.array(3)}, r"x of uint8 \(\)"),
        ({"x": PIXELS, "y": np.array([[1], [2]])}, r"y of \(2, 1\)"),
        ({"x": PIXELS, "y": np.array([3, 10], np.uint8)}, "has a label of 10; expected labels of 0 to 9"),
        ({"x": PIXELS, "y": np.array([-1, 3])}, "has a label of -1; expected labels of 0 to 9"),
        ({"x": PIXELS, "y": np.array([2**63, 1], np.uint64)}, f"has a label of {2**63}"),
        ({"x": PIXELS, "y": np.array([1.7, 3.0])}, "has labels of float64"),
        ({"x": PIXELS, "y": np.array([np.nan, 3.0])}, "has labels of float64"),
        ({"x": PIXELS, "y": np.array(["cat", "dog"])}, "has labels of <U3"),
        ({"x": PIXELS, "y": np.array([True, False])}, "has labels of bool"),
        ({"x": PIXELS}, "cannot be read .*y.*; expected an npz file with x and y"),
    ],
)
@pytest.mark.parametrize("name", ["cifar10_train_2.npz", "cifar10_test.npz"])
def test_bad_arrays_in_npz(name, arrays, message, tmp_path):
    write_npz(tmp_path, BATCHES)
    np.savez(tmp_path / name, **arrays)
    with pytest.raises(EquilibriaError, match=rf"{name} .*{message}"):
        cifar10(tmp_path, verify=False, classes=(9, 0))


def test_what_is_no_npz(tmp_path):
    write_npz(tmp_path, BATCHES)
    file = tmp_path / "cifar10_test.npz"
    whole = file.read_bytes()
    np.save(tmp_path / "array.npy", PIXELS)
    (tmp_path / "array.npy").rename(file)
    with pytest.raises(EquilibriaError, match=r"cifar10_test\.npz cannot be read \(it is a single array\)"):
        cifar10(tmp_path, verify=False)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x", b"text")
        archive.writestr("y", b"text")
    with pytest.raises(EquilibriaError, match=r"cifar10_test\.npz has x of \|S4 \(\)"):
        cifar10(tmp_path, verify=False)
    for content in (b"", b"text", whole[:-200], pickle.dumps([1])):
        file.write_bytes(content)
        with pytest.raises(EquilibriaError, match=r"cifar10_test\.npz cannot be read"):
            cifar10(tmp_path, verify=False)
    file.unlink()
    with pytest.raises(EquilibriaError, match=r"no cifar10_test\.npz"):
        cifar10(tmp_path, verify=False)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE])
def test_only_files_of_an_archive_are_read(kind, tmp_path):
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        member.type, member.linkname = kind, "elsewhere" if kind != tarfile.DIRTYPE else ""
        archive.addfile(member)
    with pytest.raises(EquilibriaError, match=r"tar\.gz has data_batch_1 as a link or a folder; expected a file"):
        cifar10(tmp_path, verify=False)


@pytest.mark.parametrize(
    ("labels", "message"), [([1.5], "labels of float64"), ([-1], "label of -1"), ([10], "label of 10")]
)
def test_labels_of_pickles_are_checked(labels, message):
    content = pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": labels}, 2)
    with pytest.raises(EquilibriaError, match=f"file has .*{message}"):
        read_batch(content, "file")


def test_labels_of_records_are_checked():
    with pytest.raises(EquilibriaError, match="file has a label of 10"):
        read_records(b"\x0a" + bytes(3072), "file")


def test_records_are_written_as_they_are_read():
    images, labels = BATCHES["data_batch_1"]
    content = write_records(images, labels)
    assert content == binary_files(BATCHES)["data_batch_1.bin"]
    found = read_records(content, "file")
    assert np.array_equal(found[0], images) and np.array_equal(found[1], labels)


@pytest.mark.parametrize("by_columns", [False, True])
def test_pickles_of_python_2_in_either_order(by_columns):
    images, labels = BATCHES["data_batch_1"]
    found = read_batch(python2_pickle(images, labels, by_columns=by_columns), "file")
    assert np.array_equal(found[0], images) and np.array_equal(found[1], labels)
    reference = pickle.loads(python2_pickle(images, labels, by_columns=by_columns), encoding="bytes")  # our own bytes
    assert np.array_equal(reference[b"data"].reshape(images.shape), images)


def key(name: str, kind: type) -> str | bytes:
    return name if kind is str else name.encode()


@pytest.mark.parametrize("kind", [str, bytes])
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_pickles_of_python_3(protocol, kind):
    """With keys of text or bytes, labels in a list or an array of any whole numbers, pixels in either order."""
    images, labels = BATCHES["data_batch_1"]
    flat = images.reshape(len(images), -1)
    for numbers in (labels.tolist(), labels, labels.astype(">i4"), labels.astype(np.int64)):
        for pixels in (flat, np.asfortranarray(flat), images):
            content = pickle.dumps({key("data", kind): pixels, key("labels", kind): numbers}, protocol)
            found = read_batch(content, "file")
            assert np.array_equal(found[0], images) and np.array_equal(found[1], labels)
            assert (found[0].dtype, found[1].dtype) == (np.uint8, np.int64)


FLAT = np.zeros((3, 3072), np.uint8)


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        ({"data": FLAT.astype(np.float32), "labels": [1, 2, 3]}, r"it has data of float32 \(3, 3072\)"),
        ({"data": FLAT.astype(np.int8), "labels": [1, 2, 3]}, r"it has data of int8 \(3, 3072\)"),
        ({"data": FLAT, "labels": [1, 2]}, "it has 3 images and 2 labels"),
        ({"data": FLAT, "labels": np.array([1, 2, 3, 4])}, "it has 3 images and 4 labels"),
        ({"data": FLAT.reshape(3, 32, 32, 3), "labels": [1, 2, 3]}, r"it has data of uint8 \(3, 32, 32, 3\)"),
        ({"data": FLAT.T, "labels": [1, 2, 3]}, r"it has data of uint8 \(3072, 3\)"),
        ({"data": FLAT.tolist(), "labels": [1, 2, 3]}, r"it has data of int64 \(3, 3072\)"),
        ({"data": FLAT, "fine_labels": [1, 2, 3]}, "UnpicklingError: it has data, fine_labels"),
        ({"data": FLAT, "labels": [np.int64(1), 2, 3]}, "UnpicklingError: it asks for numpy.*multiarray.scalar"),
        ({"data": FLAT, "labels": [[1], [2, 3], 4]}, "ValueError: .*inhomogeneous"),
        ([FLAT, [1, 2, 3]], "UnpicklingError: it is a list"),
    ],
)
def test_the_cause_is_named_where_a_batch_is_of_another_form(found, cause):
    expected = r"expected a pickled dict with 'data', uint8 of \(count, 3072\), and 'labels', as many whole numbers"
    with pytest.raises(
        EquilibriaError, match=rf"^file is no batch of CIFAR-10's python version \({cause}.*\); {expected}"
    ):
        read_batch(pickle.dumps(found, 4), "file")


@pytest.mark.parametrize(
    ("labels", "got"), [(np.array(3), r"int64 \(\)"), (3, r"int64 \(\)"), (np.zeros((3, 1), int), r"int64 \(3, 1\)")]
)
def test_labels_that_are_no_list_are_named(labels, got):
    with pytest.raises(EquilibriaError, match=rf"^file has labels of {got}; expected whole numbers \(count,\)"):
        read_batch(pickle.dumps({"data": FLAT, "labels": labels}, 4), "file")


# ---- names of the classes

OWN = ("oak", "elm", "fir", "ash", "yew", "bay", "box", "fig", "sal", "may", "asp")


def with_names(form: str, folder, names: bytes) -> None:
    if form == "binary archive":
        files = {**binary_files(BATCHES), "batches.meta.txt": names}
        write_archive(folder / "cifar-10-binary.tar.gz", files, folder="cifar-10-batches-bin")
    elif form == "python archive":
        files = {**python_files(BATCHES), "batches.meta": names}
        write_archive(folder / "cifar-10-python.tar.gz", files, folder="cifar-10-batches-py")
    else:
        write(form, folder)
        (folder / "cifar-10-batches-py" / "batches.meta").write_bytes(names)


@pytest.mark.parametrize("count", [11, 10, 9])
@pytest.mark.parametrize("form", ["python archive", "binary archive", "unpacked"])
def test_classes_of_ones_own_have_their_names_and_their_number(form, count, tmp_path):
    """Labels are 0 to 9 here: one name more is no fault, one less is."""
    own = OWN[:count]
    names = "\n".join([*own, "", ""]).encode() if form == "binary archive" else pickle.dumps({"label_names": list(own)})
    with_names(form, tmp_path, names)
    if count == 9:
        with pytest.raises(EquilibriaError, match="has a label of 9; expected labels of 0 to 8"):
            cifar10(tmp_path, verify=False)
        return
    found = cifar10(tmp_path, verify=False)
    assert found.class_names == own and len(found.train_images) == 100
    assert cifar10(tmp_path, verify=False, classes=("fir", "oak")).class_names == ("fir", "oak")


def test_the_official_names_are_read_and_verified(tmp_path, monkeypatch):
    assert hashlib.md5(official_meta()).hexdigest() == cifar.META_MD5
    assert read_names(official_meta(), "file") == cifar.CLASS_NAMES
    known = {name: hashlib.md5(content).hexdigest() for name, content in python_files(BATCHES).items()}
    monkeypatch.setattr(cifar, "PYTHON_MD5", known)
    with_names("unpacked", tmp_path, official_meta())
    assert cifar10(tmp_path).class_names == cifar.CLASS_NAMES
    with_names("unpacked", tmp_path, official_meta().replace(b"cat", b"cow"))
    with pytest.raises(EquilibriaError, match=f"batches.meta has MD5 .*; expected {cifar.META_MD5}"):
        cifar10(tmp_path)
    assert cifar10(tmp_path, verify=False).class_names[3] == "cow"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text", "has no names of classes"),
        (
            pickle.dumps({"fine_label_names": ["a"]}),
            r"has no names of classes \(UnpicklingError: it has fine_label_names",
        ),
        (pickle.dumps({"label_names": "cat"}), r"its label_names are 'cat'\); expected .* a list of words"),
        (pickle.dumps({"label_names": ["a", 3]}), r"its label_names are \['a', 3\]"),
        (pickle.dumps({"label_names": ["a", b"a"]}), "has the classes a, a; expected names that differ"),
        (pickle.dumps({"label_names": []}), "has the classes none; expected names that differ"),
        (pickle.dumps({"label_names": [b"\xff"]}), "has no names of classes .UnicodeDecodeError"),
    ],
)
def test_names_that_are_none(content, message):
    with pytest.raises(EquilibriaError, match=f"^file .*{message}"):
        read_names(content, "file")


# ---- arguments


def test_classes_by_name_and_sizes_by_any_whole_number(tmp_path):
    write_npz(tmp_path, BATCHES)
    named, numbered = (cifar10(tmp_path, verify=False, classes=each) for each in (("dog", "cat"), (5, 3)))
    assert named.class_names == numbered.class_names == ("dog", "cat")
    assert torch.equal(named.train_images, numbered.train_images)
    assert torch.equal(named.train_labels, numbered.train_labels)
    halves = [cifar10(tmp_path, verify=False, size=size).train_images for size in (16, 16.0)]
    assert torch.equal(*halves)
    for size in ("16", 12, None):
        with pytest.raises(
            EquilibriaError, match=rf"^got size={size!r}; expected a divisor of 32: 1, 2, 4, 8, 16, 32$"
        ):
            cifar10(tmp_path, verify=False, size=size)
    with pytest.raises(EquilibriaError, match=r"but there is no 'cow'; .* 0 to 9, or names, .*: airplane, .*, truck$"):
        cifar10(tmp_path, verify=False, classes=("cat", "cow"))


def test_a_pickle_runs_nothing(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "made"), "w"))

    with pytest.raises(EquilibriaError, match=r"file is no batch .* asks for (_?io|builtins)\.open"):
        read_batch(pickle.dumps({b"data": Evil(), b"labels": []}, 2), "file")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x02}.", b"text", pickle.dumps({b"data": 1, b"labels": [1]})])
def test_what_is_no_batch(content):
    with pytest.raises(EquilibriaError, match="file is no batch"):
        read_batch(content, "file")
