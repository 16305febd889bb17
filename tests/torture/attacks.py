"""The table of all attacks, with their goals and their shares of the time."""

from __future__ import annotations

from tests.torture import Attack
from tests.torture.commands import CommandLines
from tests.torture.records import cuts, failing_disks, flips, kills, manifests
from tests.torture.training import bit_identity, cycles, long_run
from tests.torture.viewers import viewers

_command_lines = CommandLines()

ATTACKS = (
    Attack(
        "kills between checkpoints",
        "killed at any moment and resumed from its checkpoint, a training has every row and loss from before it, once",
        kills,
        goal=360,
        seconds=200,
    ),
    Attack(
        "cut files",
        "a table cut at every byte of its last two batches gives the rows of all whole batches, or fewer with a note",
        cuts,
        goal=6000,
        seconds=60,
    ),
    Attack("flipped bits", "a flipped bit anywhere changes no value without a note", flips, goal=2500, seconds=40),
    Attack(
        "damaged run.json",
        "whatever is in `run.json`, the samples open unchanged, or there is one clear error",
        manifests,
        goal=2500,
        seconds=40,
    ),
    Attack(
        "failing disks",
        "no room, no folder, a second writer: training goes on to the same bits, and no row is wrong",
        failing_disks,
        goal=300,
        seconds=60,
    ),
    Attack(
        "bit identity", "a watched training ends with the bits of an unwatched one", bit_identity, goal=600, seconds=100
    ),
    Attack("watch and close", "200 cycles leave memory and descriptors as they were", cycles, goal=200, seconds=100),
    Attack(
        "a million steps",
        "a watched, recorded training, 2,000 steps a trial, keeps memory and descriptors as they were",
        long_run,
        goal=500,
        seconds=200,
    ),
    Attack(
        "command lines",
        "any options, values and files: exit code 0, 1 or 2 and no traceback",
        _command_lines,
        goal=2500,
        seconds=60,
        summary=_command_lines.summary,
    ),
    Attack(
        "viewers",
        "with 200 live viewers and hostile clients every honest request is answered, none with status 500",
        viewers,
        goal=400,
        seconds=50,
    ),
)
