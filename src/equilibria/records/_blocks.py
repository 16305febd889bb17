"""The bytes of a stream: blocks of Arrow messages, each with a checksum over all of its bytes.

A block is the schema message, or one record batch with the dictionaries that it needs, so that every block can be read
without the others. The checksum (crc32) stands in the padding after the header of the block's last message: Arrow
libraries skip it, and it covers every byte of the block except itself. Where a block is damaged, `next_block` finds the
next whole one: all blocks begin at a multiple of eight bytes with the mark of an Arrow message.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

SCHEMA, DICTIONARY, BATCH = 1, 2, 3  # kinds of messages in the Arrow format
END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream, in the Arrow format
_MARK = END[:4]  # of a message
_SEAL = b"crc="  # before the four bytes of the checksum
_AT_ONCE = 1 << 20  # bytes to search for the next block


class Bytes(Protocol):
    """A file, or part of one."""

    size: int

    def read(self, start: int, length: int) -> memoryview:
        """The bytes from a position, fewer at the end."""

    def buffer(self, start: int, end: int) -> pa.Buffer:
        """The bytes between two positions, for Arrow."""


class MappedBytes:
    """A file mapped into memory: bytes come from the disk when they are used.

    The file must not become shorter while they are in use: the process would crash.
    """

    def __init__(self, path: Path) -> None:
        if path.stat().st_size == 0:  # which cannot be mapped
            self._whole = pa.py_buffer(b"")
        else:
            with pa.memory_map(str(path)) as file:
                self._whole = file.read_buffer()
        self._view = memoryview(self._whole).cast("B")
        self.size: int = self._whole.size

    def read(self, start: int, length: int) -> memoryview:
        return self._view[start : start + length]

    def buffer(self, start: int, end: int) -> pa.Buffer:
        return self._whole.slice(start, end - start)


class FileBytes:
    """An open file; bytes are copied into memory, so that the file may become shorter."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self.size = self._file.seek(0, 2)

    def read(self, start: int, length: int) -> memoryview:
        self._file.seek(start)
        return memoryview(self._file.read(length))

    def buffer(self, start: int, end: int) -> pa.Buffer:
        return pa.py_buffer(self.read(start, end - start))

    def close(self) -> None:
        self._file.close()


class Message(NamedTuple):
    """An Arrow message in a file: its kind, and where it, its body and its successor begin."""

    kind: int
    start: int
    body: int
    end: int


class Block(NamedTuple):
    """Messages that belong together; ``is_whole`` is None for one without a checksum."""

    kind: int
    start: int
    end: int
    is_whole: bool | None


def seal(block: bytes) -> bytes:
    """The block with its checksum."""
    last = list(_messages(_InMemory(block), 0))[-1]
    sealed = bytearray(block[: last.body]) + _SEAL + bytes(4) + block[last.body :]
    struct.pack_into("<I", sealed, last.start + 4, last.body - last.start)  # its header is 8 bytes longer now
    struct.pack_into("<I", sealed, last.body + 4, _checksum(sealed, last.body + 4))
    return bytes(sealed)


def first_message(block: bytes) -> Message:
    """The first message of a block in memory."""
    return next(_messages(_InMemory(block), 0))


def block_at(data: Bytes, start: int) -> Block | None:
    """The block that begins at a position; None if none does, or if the file ends before the block does."""
    messages = list(_messages(data, start))
    if not messages or messages[-1].kind == DICTIONARY:
        return None
    last = messages[-1]
    seal_place = last.body - 8
    if data.read(seal_place, 4) != _SEAL:
        return Block(last.kind, start, last.end, None)
    place = seal_place + 4
    stated = int.from_bytes(data.read(place, 4), "little")
    is_whole = _checksum(data.read(start, last.end - start), place - start) == stated
    return Block(last.kind, start, last.end, is_whole)


def next_block(data: Bytes, start: int) -> int | None:
    """Where the next whole block with a checksum begins, or the end mark of the stream; None if there is neither."""
    start += -start % 8
    for chunk in range(start, data.size, _AT_ONCE):
        content = data.read(chunk, _AT_ONCE)
        words = np.frombuffer(content[: len(content) // 8 * 8], dtype="<u4").reshape(-1, 2)
        is_mark = (words[:, 0] == 0xFFFFFFFF) & (words[:, 1] % 8 == 0) & (words[:, 1] < data.size)
        for place in np.flatnonzero(is_mark).tolist():
            position = chunk + 8 * place
            block = block_at(data, position)
            if (block and block.is_whole) or is_end(data, position):
                return position
    return None


def is_end(data: Bytes, position: int) -> bool:
    """Whether the stream ends here: with its end mark, and the file with it."""
    return position == data.size - len(END) and data.read(position, len(END)) == END


def _checksum(block: bytearray | memoryview, place: int) -> int:
    """Of all bytes but the four at ``place``, where it stands."""
    view = memoryview(block)
    return zlib.crc32(view[place + 4 :], zlib.crc32(view[:place]))


def _messages(data: Bytes, start: int) -> Iterator[Message]:
    """The messages of a block, as far as they are readable and end before the file does."""
    while (message := _message_at(data, start)) is not None:
        yield message
        if message.kind != DICTIONARY:
            return
        start = message.end


def _message_at(data: Bytes, start: int) -> Message | None:
    head = data.read(start, 8)
    if len(head) < 8 or head[:4] != _MARK:
        return None
    length = int.from_bytes(head[4:], "little")
    body = start + 8 + length
    if length == 0 or length % 8 or body > data.size:
        return None
    kind, body_length = _kind_and_length(data.read(start + 8, length))
    end = body + body_length
    if kind not in (SCHEMA, DICTIONARY, BATCH) or body_length < 0 or body_length % 8 or end > data.size:
        return None
    return Message(kind, start, body, end)


def _kind_and_length(header: memoryview) -> tuple[int, int]:
    """The kind of a message and the length of its body, from its header: a table of the FlatBuffers format.

    The table begins with the distance to the list of its fields' places. Fields 1 and 3 are the kind and the length;
    a field that is 0 may be left out. (0, 0) if the header is damaged.
    """
    try:
        (table,) = struct.unpack_from("<I", header)
        fields = table - struct.unpack_from("<i", header, table)[0]
        if fields < 0:
            return 0, 0
        (size,) = struct.unpack_from("<H", header, fields)
        place_of_kind, place_of_length = (
            struct.unpack_from("<H", header, fields + 4 + 2 * number)[0] if size >= 6 + 2 * number else 0
            for number in (1, 3)
        )
        kind = header[table + place_of_kind] if place_of_kind else 0
        length = struct.unpack_from("<q", header, table + place_of_length)[0] if place_of_length else 0
    except (struct.error, IndexError):
        return 0, 0
    return kind, length


class _InMemory:
    def __init__(self, block: bytes) -> None:
        self._view, self.size = memoryview(block), len(block)

    def read(self, start: int, length: int) -> memoryview:
        return self._view[start : start + length]

    def buffer(self, start: int, end: int) -> pa.Buffer:
        return pa.py_buffer(self._view[start:end])
