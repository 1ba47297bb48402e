"""The part of protocol buffers that CRIU's images need: varints and length-delimited values, in sized entries."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

Field = int | bytes


def entries_of(image: bytes) -> Iterator[bytes]:
    """The entries of an image file, after its two magic numbers. Raises struct.error when it is cut short."""
    position = 8
    while position < len(image):
        (size,) = struct.unpack_from("<I", image, position)
        yield image[position + 4 : position + 4 + size]
        position += 4 + size


def entry(body: bytes) -> bytes:
    """An entry as an image file holds it: its size, then its message."""
    return struct.pack("<I", len(body)) + body


def packed(fields: Iterable[tuple[int, Field]]) -> bytes:
    """A message of numbered fields."""
    parts = []
    for number, value in fields:
        if isinstance(value, int):
            parts += [_varint(number << 3), _varint(value)]
        else:
            parts += [_varint(number << 3 | 2), _varint(len(value)), value]
    return b"".join(parts)


def fields_of(data: bytes) -> Iterator[tuple[int, Field]]:
    """The fields of a message that holds only varints and length-delimited values. Raises IndexError when cut short."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(data):
        key = varint()
        if key & 7 == 2:
            size = varint()
            yield key >> 3, data[position : position + size]
            position += size
        else:
            yield key >> 3, varint()


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
