"""Jupyter messages on the wire, taken apart only as far as somebody must look into them.

A message is a list of frames: identities, the delimiter, a signature, header, parent header, metadata, content, and
buffers. Header and parent are read for every message; content stays as it came unless the relay itself has to answer.
"""

from __future__ import annotations

import hashlib
import hmac
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import msgspec
import zmq

from torpor.errors import UsageError

DELIMITER = b"<IDS|MSG>"
PROTOCOL_VERSION = "5.4"


class Header(msgspec.Struct):
    """What the relay reads of a header; a parent header may be empty."""

    msg_id: str = ""
    msg_type: str = ""
    session: str = ""


class Message:
    """One message as it was received. Frames are shared with the network's buffers, never copied."""

    def __init__(self, frames: list[zmq.Frame], delimiter: int, header: Header, parent: Header) -> None:
        self.frames = frames
        self.delimiter = delimiter
        self.header = header
        self.parent = parent

    @classmethod
    def parse(cls, frames: list[zmq.Frame]) -> Message | None:
        """The message in these frames; None when they are no Jupyter message (a kernel drops such frames, too)."""
        sizes = (index for index, frame in enumerate(frames) if len(frame) == len(DELIMITER))
        index = next((index for index in sizes if frames[index].bytes == DELIMITER), None)
        if index is None or len(frames) < index + 6:
            return None
        try:
            header = _header(frames[index + 2].bytes)
            parent = _header(frames[index + 3].bytes)
        except msgspec.MsgspecError:
            return None
        return cls(frames, index, header, parent)

    @staticmethod
    def header_of(composed: list[bytes]) -> Header:
        """The header of a message that an `Author` composed."""
        return _header(composed[2])

    @property
    def identities(self) -> list[bytes]:
        """Routing ids in front of the delimiter: who is to get the answer."""
        return [frame.bytes for frame in self.frames[: self.delimiter]]

    @property
    def signature(self) -> bytes:
        """Hexadecimal digest, or empty where messages are not signed."""
        return self.frames[self.delimiter + 1].bytes

    @property
    def signed_parts(self) -> list[bytes]:
        """Header, parent, metadata and content, as signed."""
        return [frame.bytes for frame in self.frames[self.delimiter + 2 : self.delimiter + 6]]

    @property
    def raw_header(self) -> bytes:
        """The header as it came: the parent header of an answer."""
        return self.frames[self.delimiter + 2].bytes

    @property
    def raw_content(self) -> bytes:
        """The content as it came."""
        return self.frames[self.delimiter + 5].bytes

    @cached_property
    def content(self) -> dict[str, Any]:
        """The content, decoded; empty when it is not an object."""
        try:
            return msgspec.json.decode(self.raw_content, type=dict[str, Any])
        except msgspec.MsgspecError:
            return {}


class Signer:
    """Signs and checks with the key of a connection file. An empty key signs nothing and trusts everything."""

    def __init__(self, key: bytes, scheme: str) -> None:
        kind, _, digest = scheme.partition("-")
        if kind != "hmac" or digest not in hashlib.algorithms_available:
            raise UsageError(f"The connection file asks for the signature scheme {scheme!r}, which is unknown.")
        self._started = hmac.new(key, digestmod=digest) if key else None

    def sign(self, parts: Sequence[bytes]) -> bytes:
        """Signature of header, parent, metadata and content."""
        if self._started is None:
            return b""
        running = self._started.copy()
        for part in parts:
            running.update(part)
        return running.hexdigest().encode()

    def trusts(self, message: Message) -> bool:
        """Whether whoever sent this knows the key."""
        return self._started is None or hmac.compare_digest(self.sign(message.signed_parts), message.signature)


class Author:
    """Writes the relay's own messages. `session` tells them, and what the kernel answers to them, from all others."""

    def __init__(self, signer: Signer) -> None:
        self.signer = signer
        self.session = f"torpor-{uuid.uuid4().hex}"
        self._encoder = msgspec.json.Encoder()

    def compose(self, msg_type: str, content: dict[str, Any] | msgspec.Raw, parent: bytes = b"{}") -> list[bytes]:
        """Frames from the delimiter on. `parent` is the header that is answered, as it came."""
        header = {
            "msg_id": uuid.uuid4().hex,
            "msg_type": msg_type,
            "session": self.session,
            "username": "torpor",
            "date": datetime.now(UTC).isoformat(),
            "version": PROTOCOL_VERSION,
        }
        parts = [self._encoder.encode(header), parent, b"{}", self._encoder.encode(content)]
        return [DELIMITER, self.signer.sign(parts), *parts]

    def again(self, message: Message) -> list[zmq.Frame]:
        """A message that may have come before, with another signature: clients refuse one that they have seen."""
        header, parent, metadata, content = message.signed_parts
        try:
            noted = {**msgspec.json.decode(metadata, type=dict[str, Any]), "torpor": "again"}
        except msgspec.MsgspecError:
            noted = {"torpor": "again"}
        parts = [header, parent, self._encoder.encode(noted), content]
        start = message.frames[: message.delimiter + 1]
        rest = message.frames[message.delimiter + 6 :]
        return [*start, *(zmq.Frame(part) for part in (self.signer.sign(parts), *parts)), *rest]

    def rewrite(self, message: Message, content: dict[str, Any]) -> list[bytes]:
        """The message with another content, signed again; identities and buffers are left out."""
        header, parent, metadata, _ = message.signed_parts
        parts = [header, parent, metadata, self._encoder.encode(content)]
        return [DELIMITER, self.signer.sign(parts), *parts]


_header = msgspec.json.Decoder(Header).decode
