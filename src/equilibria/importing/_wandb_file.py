"""The numbers in a run file of Weights & Biases (``run-<id>.wandb``), also of a run that was never synchronised.

The file is a log of records in blocks of 32 KiB (the format of LevelDB's log, after a header of seven bytes). Each
record is a protocol buffer; those of kind 2 are rows of the history, and those of kind 5 changes of the configuration.
Of the fields only these are read: the rest of the format may change.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equilibria.errors import EquilibriaError

_HEADER, _BLOCK, _FRAME = 7, 32_768, 7  # bytes
_MARK = b":W&B"
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4  # parts of a record
_HISTORY, _CONFIG, _RUN = 2, 5, 17  # kinds of records
_ITEM, _STEP, _UPDATE, _CONFIG_OF_RUN = 1, 2, 1, 4  # fields of these
_KEY, _NESTED_KEY, _JSON = 1, 2, 16  # fields of an item


@dataclass
class WandbRow:
    """One record: numbers of a row of the history by name, or settings."""

    numbers: dict[str, float] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def wandb_rows(path: Path) -> Iterator[WandbRow]:
    """The rows of the history, and the settings, in their order; a record that a kill has cut off ends them.

    Raises:
        EquilibriaError: if it is no such file.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise EquilibriaError(f"cannot read {path}: {error.strerror}", argument="source") from error
    if not content.startswith(_MARK):
        raise EquilibriaError(f"got {path}, which is not a run file of W&B", argument="source")
    for record in _records(content):
        try:
            row = _row(record)
        except (IndexError, struct.error, ValueError, UnicodeDecodeError):
            raise EquilibriaError(f"got {path} with a record that cannot be read", argument="source") from None
        if row.numbers or row.config:
            yield row


def _records(content: bytes) -> Iterator[bytes]:
    """The records of a log, put together from their parts."""
    place, parts = _HEADER, list[bytes]()
    while place + _FRAME <= len(content):
        left = _BLOCK - place % _BLOCK
        if left < _FRAME:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        end = place + _FRAME + length
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or end > len(content):
            return
        part = content[place + _FRAME : end]
        parts = [part] if kind in (_FULL, _FIRST) else [*parts, part]
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
        place = end


def _row(record: bytes) -> WandbRow:
    row = WandbRow()
    for kind, value in _fields(record):
        if kind == _HISTORY:
            for number, part in _fields(value):
                if number == _ITEM:
                    name, content = _item(part)
                    row.numbers |= dict(_numbers(name, content))
                elif number == _STEP:
                    row.numbers["_step"] = float(next((num for index, num in _fields(part) if index == 1), 0))
        elif kind in (_CONFIG, _RUN):
            updates = (
                [value] if kind == _CONFIG else [part for number, part in _fields(value) if number == _CONFIG_OF_RUN]
            )
            items = (_item(part) for update in updates for number, part in _fields(update) if number == _UPDATE)
            row.config |= dict(items)
    return row


def _item(message: Any) -> tuple[str, Any]:
    """Key and value of an item."""
    key, nested, content = "", list[str](), "null"
    for number, value in _fields(message):
        if number == _KEY:
            key = value.decode()
        elif number == _NESTED_KEY:
            nested.append(value.decode())
        elif number == _JSON:
            content = value.decode()
    return key or ".".join(nested), json.loads(content)


def _numbers(name: str, content: Any) -> Iterator[tuple[str, float]]:
    """The numbers of an item by name: a dictionary is one name per entry, joined by dots."""
    if isinstance(content, dict) and "_type" not in content:
        for key, value in content.items():
            yield from _numbers(f"{name}.{key}", value)
    elif isinstance(content, int | float) and not isinstance(content, bool):
        yield name, float(content)
    elif content in ("NaN", "Infinity", "-Infinity"):
        yield name, math.nan


def _fields(message: Any) -> Iterator[tuple[int, Any]]:
    """Numbers and values of the fields of a protocol buffer: whole numbers, or bytes."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, place = _varint(message, place)
        elif wire == 2:
            length, place = _varint(message, place)
            value, place = message[place : place + length], place + length
            if place > len(message):
                raise ValueError
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
            value, place = message[place : place + length], place + length
        else:
            raise ValueError
        yield number, value


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
