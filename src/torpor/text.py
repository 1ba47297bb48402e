"""Text from anybody on anybody's terminal: what a terminal would obey, or show as something else, is spelled out."""

from __future__ import annotations


def shown(text: str) -> str:
    """The text in one line, without escape sequences, control, format (such as bidirectional) and other characters that
    cannot be seen: each is written as Python would, `\\x1b` or `\\u202e`."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def shown_lines(text: str) -> str:
    """As `shown`, of a text whose lines and tabs are meant."""
    return "".join(one if one in "\n\t" else shown(one) for one in text)


def json_escaped(document: str) -> str:
    """A JSON document with the same characters escaped as JSON does: they are in its strings, and nowhere else."""
    if document.replace("\n", "").isprintable():
        return document
    return "".join(one if one == "\n" or one.isprintable() else _json_escape(one) for one in document)


def _json_escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
