"""The demo's folder: written where there is room, and never over anything else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from equilibria.errors import EquilibriaError
from equilibria.lab.demo.runner import prepare_folder

ARMS = ("plain", "rescaled")


@pytest.mark.parametrize("inside", ["new", "new/below/new"])
def test_a_new_folder_is_made_and_marked(tmp_path, inside):
    folder = prepare_folder(tmp_path / inside, ARMS)
    assert json.loads(folder.results.read_text())["complete"] is False
    assert [path.name for path in folder.path.iterdir()] == ["demo.json"]


def test_an_earlier_demo_is_replaced_even_if_it_was_interrupted_and_foreign_files_in_it_are_kept(tmp_path):
    folder = prepare_folder(tmp_path / "demo", ARMS)
    folder.run("plain").mkdir()
    (folder.run("plain") / "samples-000.arrows").touch()
    folder.report("plain").touch()
    (folder.path / "notes.txt").write_text("mine")
    prepare_folder(tmp_path / "demo", ARMS)
    assert sorted(path.name for path in folder.path.iterdir()) == ["demo.json", "notes.txt"]


def test_an_empty_folder_is_used(tmp_path):
    assert prepare_folder(tmp_path, ARMS).results.exists()


@pytest.mark.parametrize("mark", [None, "not json", "[1]", '{"other": 1}'])
def test_a_folder_with_other_things_raises_and_is_left_as_it_was(tmp_path, mark):
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "thesis.tex").touch()
    if mark is not None:
        (tmp_path / "demo.json").write_text(mark)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(EquilibriaError, match="holds other things; expected a folder that is new, empty"):
        prepare_folder(tmp_path, ARMS)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_raises(tmp_path):
    path = tmp_path / "demo"
    path.write_text("text")
    with pytest.raises(EquilibriaError, match="which is a file"):
        prepare_folder(path, ARMS)
    assert path.read_text() == "text"


def test_a_link_in_place_of_a_run_is_not_followed(tmp_path):
    folder = prepare_folder(tmp_path / "demo", ARMS)
    (tmp_path / "thesis").mkdir()
    folder.run("plain").symlink_to(tmp_path / "thesis")
    with pytest.raises(EquilibriaError, match="cannot write the demo"):
        prepare_folder(tmp_path / "demo", ARMS)
    assert (tmp_path / "thesis").is_dir()


def test_a_folder_that_cannot_be_made_raises_in_one_sentence():
    with pytest.raises(EquilibriaError, match="cannot write the demo to /proc/demo: "):
        prepare_folder(Path("/proc/demo"), ARMS)
