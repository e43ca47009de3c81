"""The file of an archived run: JSON lines, compressed with xz (docs/formats.md).

A first line that says what it is, a line for each effect, a line for each turn, a last line with counts and
SHA-256 of all before.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import io
import lzma
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import dropwhile, islice, takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from turnmill.errors import BadInput, RecordError, RunInUse
from turnmill.files import writing
from turnmill.queue import GREATEST_WEIGHT, LEAST_WEIGHT
from turnmill.turn import explain
from turnmill.wire import pack, unpack

ARCHIVE_VERSION = 2
"""Version 1 had no effects, and is read as well."""
_PRESET = 1
"""Of xz: about as fast as gzip, and its window of 1 MB sees that bodies of a conversation repeat its history."""


def _decodes(text: Any) -> Any:
    if isinstance(text, dict):
        if not text:
            raise ValueError("neither text nor base64")
        base64.b64decode(text["base64"], validate=True)
    return text


def _is_weight(text: str) -> str:
    # What is none would stop every worker's claims, of all runs.
    if not LEAST_WEIGHT <= float(text) <= GREATEST_WEIGHT:
        raise ValueError(f"must be a number from {LEAST_WEIGHT:g} to {GREATEST_WEIGHT:g}")
    return text


def _is_json(text: str) -> str:
    from_json(text)
    return text


Text = Annotated[str | dict[Literal["base64"], str], AfterValidator(_decodes)]
"""A stored record: its JSON, or the stored bytes where they are no text."""


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    def line(self) -> bytes:
        return self.model_dump_json(exclude_none=True).encode() + b"\n"


class Header(_Line):
    """What the file is. `manifest`: of the run, as stored; `engines`: which it has met, as stored; `made`: Unix time in
    seconds."""

    turnmill_archive: int = ARCHIVE_VERSION
    run: str
    weight: Annotated[str, Field(pattern=r"^[0-9.e+-]+$"), AfterValidator(_is_weight)] = "1.0"
    manifest: Annotated[str, AfterValidator(_is_json)] | None = None
    engines: list[str] | None = None
    made: float


class FailureText(_Line):
    kind: str
    record: Text


class ArchivedTurn(_Line):
    """All that is stored of one turn, for the run. `earlier`: failures that asking again has cleared. `waiter`:
    the run's entry among the waiters; or `left`: how it left. `stored`: SHA-1 of the reply, or failure, as
    it was stored."""

    hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    model: str
    body: Text | None = None
    reply: Text | None = None
    trace: Text | None = None
    failure: FailureText | None = None
    earlier: list[Text] | None = None
    waiter: Annotated[str, Field(pattern=r"^\d{2,}$")] | None = None
    left: Literal["cancelled", "deadline"] | None = None
    stored: str


class ArchivedEffect(_Line):
    """An entry of the run's journal: which effect, and what it was."""

    effect: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    was: Text


class Trailer(_Line):
    """How many turns and effects there are, how many of the turns are `done`, `failed` and `cancelled`, and the
    `sha256` of all lines before, which have so many `bytes`."""

    turns: int
    effects: int = 0
    done: int
    failed: int
    cancelled: int
    bytes: int
    sha256: str


Item = TypeVar("Item", ArchivedTurn, ArchivedEffect)


def as_text(record: bytes) -> Text:
    """A stored record for a line of the file."""
    with contextlib.suppress(RecordError, UnicodeDecodeError):
        text = unpack(record).decode()
        if not text.startswith("Z"):  # else it would be read as a compressed record
            return text
    return {"base64": base64.b64encode(record).decode()}


def as_record(text: Text | None) -> bytes:
    """The record as it is stored; empty for none."""
    if text is None:
        return b""
    if isinstance(text, str):
        return pack(text.encode())
    return base64.b64decode(text["base64"])


class ArchiveWriter:
    """Writes an archive under another name beside `path`: `with ArchiveWriter(path, header) as writer`. The
    file is `path` only after `publish`; left without that, nothing stays. Raises CannotWrite, and RunInUse if
    another process writes it."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path, self.partial = path, path.with_name(f".{path.name}.partial")
        self._header = header
        counted = ("turns", "effects", "done", "failed", "cancelled", "bytes")
        self._counts = dict.fromkeys(counted, 0)
        self._digest = hashlib.sha256()
        self._file: io.BufferedRandom | None = None
        self._published = False

    def __enter__(self) -> Self:
        with writing(self.path):
            self._file = os.fdopen(os.open(self.partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.close()
                raise RunInUse(f"{self.path} is being written by another process") from None
            self._file.truncate()  # what an attempt that was killed has left
            self._xz = lzma.open(self._file, "wb", preset=_PRESET)
        self._write(self._header)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._file is not None
        if not self._published:
            with contextlib.suppress(OSError):
                self.partial.unlink()
        self._file.close()

    def add_effects(self, effects: Sequence[ArchivedEffect]) -> None:
        """All effects come before the first turn."""
        for effect in effects:
            self._write(effect)
            self._counts["effects"] += 1

    def add(self, turns: Sequence[ArchivedTurn]) -> None:
        for turn in turns:
            self._write(turn)
            self._counts["turns"] += 1
            ending = _ending(turn)
            if ending:
                self._counts[ending] += 1

    def finish(self) -> Trailer:
        """The last line; then all of it is on the disk, and `partial` can be read."""
        trailer = Trailer(**self._counts, sha256=self._digest.hexdigest())
        assert self._file is not None
        with writing(self.path):
            self._xz.write(trailer.line())
            self._xz.close()
            self._file.flush()
            os.fsync(self._file.fileno())
        return trailer

    def publish(self) -> None:
        with writing(self.path):
            os.replace(self.partial, self.path)
            self._published = True
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _write(self, item: _Line) -> None:
        line = item.line()
        with writing(self.path):
            self._xz.write(line)
        self._digest.update(line)
        self._counts["bytes"] += len(line)


class ArchiveFile:
    """An archive that has been read to its end and found whole. `name`: how errors call it."""

    def __init__(self, path: Path, name: Path | None = None) -> None:
        """Raises BadInput, which names the line: unreadable, damaged, cut off, or of a newer turnmill."""
        self.path, self._name = path, str(name or path)
        for _ in self._read():
            pass

    header: Header
    trailer: Trailer

    def batches(self, size: int) -> Iterator[list[ArchivedTurn]]:
        """The turns, so many at a time."""
        return _in_batches(dropwhile(_is_effect, self._read()), size)

    def effects(self, size: int) -> Iterator[list[ArchivedEffect]]:
        """The effects, so many at a time."""
        return _in_batches(takewhile(_is_effect, self._read()), size)

    def _read(self) -> Iterator[Any]:
        """All effects, then all turns."""
        try:
            yield from self._read_lines()
        except (lzma.LZMAError, EOFError) as error:
            raise BadInput(self._name, 0, f"no archive, or damaged or cut off: {error}") from None
        except OSError as error:
            raise BadInput(self._name, 0, error.strerror or str(error)) from None

    def _read_lines(self) -> Iterator[ArchivedEffect | ArchivedTurn]:
        digest, turns, effects, size = hashlib.sha256(), 0, 0, 0
        # An older format of LZMA takes zeros for one empty stream after the other.
        with lzma.open(self.path, format=lzma.FORMAT_XZ) as lines:
            self.header = self._header_of(next(lines, b""))
            digest.update(self.header_line)
            size += len(self.header_line)
            for number, line in enumerate(lines, 2):
                if line.startswith(b'{"turns":'):
                    self.trailer = self._parse(Trailer, line, number)
                    end = self.trailer
                    found = (turns, effects, size, digest.hexdigest())
                    if found != (end.turns, end.effects, end.bytes, end.sha256):
                        raise BadInput(self._name, number, "damaged: count or SHA-256 is another")
                    if lines.read(1):
                        raise BadInput(self._name, number, "damaged: goes on behind its end")
                    return
                digest.update(line)
                size += len(line)
                if line.startswith(b'{"effect":'):
                    if turns:
                        raise BadInput(self._name, number, "damaged: an effect behind a turn")
                    effects += 1
                    yield self._parse(ArchivedEffect, line, number)
                else:
                    turns += 1
                    yield self._parse(ArchivedTurn, line, number)
        raise BadInput(self._name, 0, "cut off: its last line is missing")

    def _header_of(self, line: bytes) -> Header:
        self.header_line = line
        try:
            version = from_json(line)["turnmill_archive"]
        except (ValueError, KeyError, TypeError):
            raise BadInput(self._name, 1, "no archive of a run") from None
        if not isinstance(version, int) or version > ARCHIVE_VERSION:
            raise BadInput(
                self._name,
                1,
                f"archive version {version}; this turnmill reads up to {ARCHIVE_VERSION}",
            )
        header: Header = self._parse(Header, line, 1)
        return header

    def _parse(self, model: type[Any], line: bytes, number: int) -> Any:
        try:
            return model.model_validate_json(line)
        except ValidationError as error:
            raise BadInput(self._name, number, f"damaged: {explain(error)}") from None


def _is_effect(item: ArchivedEffect | ArchivedTurn) -> bool:
    return isinstance(item, ArchivedEffect)


def _in_batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def _ending(turn: ArchivedTurn) -> str:
    """The run's counter that the turn is in."""
    if turn.left:
        return "cancelled" if turn.left == "cancelled" else "failed"
    return "done" if turn.reply else "failed" if turn.failure else ""
