"""The files of a run: `replies.partial.jsonl` while it goes on, `replies.jsonl` and `report.json` at
its end. No reader ever meets less than an earlier attempt left, and no half file."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from pydantic import ValidationError

from turnmill.errors import BadInput, RecordError, RunInUse, UsageError
from turnmill.files import writing
from turnmill.results import ConversationResult, Report
from turnmill.turn import explain

logger = logging.getLogger("turnmill.output")

PARTIAL: Final = "replies.partial.jsonl"
REPLIES: Final = "replies.jsonl"
REPORT: Final = "report.json"
_LOCK: Final = ".lock"


class RunFiles:
    """The folder of one run, held by one process: `with RunFiles(folder, run) as files`.

    Entering raises RunInUse if another process writes there, UsageError if the folder holds another
    run's files. Everything here raises CannotWrite when the folder or the disk refuses.

    A resumed run goes on in the partial file of the attempt before: a result that is in it already,
    byte for byte, is not written again, and of two lines of one conversation the later counts.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self.folder, self.run = folder, run
        self._lock: int | None = None
        self._partial: int | None = None
        self._written: dict[tuple[str, int], bytes] = {}

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder; what is in it stays."""
        for descriptor in (self._partial, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._partial = self._lock = None

    def append(self, result: ConversationResult) -> None:
        """Add the line of a conversation that has ended."""
        assert self._partial is not None, "RunFiles is not open"
        line = _line(result)
        digest = hashlib.sha256(line).digest()
        if self._written.get(result.key) == digest:
            return
        path = self.folder / PARTIAL
        with writing(path):
            size = os.fstat(self._partial).st_size
            try:
                _write(self._partial, line)
            except OSError:
                # A full disk takes half a line: take it out again, so that the next one is whole.
                os.ftruncate(self._partial, size)
                raise
        self._written[result.key] = digest

    def finish(self, results: Iterable[ConversationResult], report: Report) -> None:
        """The run has ended: all its results in input order, and the report on them."""
        self._replace(REPLIES, (_line(result) for result in results))
        self.write_report(report)
        assert self._partial is not None, "RunFiles is not open"
        with writing(self.folder / PARTIAL):
            os.close(self._partial)
            self._partial = None
            (self.folder / PARTIAL).unlink()

    def write_report(self, report: Report) -> None:
        """The report alone, for a run that is left before its end."""
        self._replace(REPORT, [report.model_dump_json(indent=2).encode() + b"\n"])

    def _open(self) -> None:
        partial = self.folder / PARTIAL
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        self._claim(self._lock)
        with writing(partial):
            self._mend(partial)
            self._partial = os.open(partial, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def _claim(self, lock: int) -> None:
        """The run's lease in Redis guards its name; this lock guards the folder, from other runs, and
        from runs of this name on another Redis."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunInUse(f"{self.folder} is being written by another run") from None
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s cannot be locked (%s): keep other runs out", self.folder, error)
        check_folder(self.folder, self.run)
        with writing(self.folder):
            os.ftruncate(lock, 0)
            os.pwrite(lock, self.run.encode(), 0)

    def _mend(self, partial: Path) -> None:
        """Bring what a killed attempt left into order: one whole line a conversation."""
        if not partial.exists():
            return
        found = partial.read_bytes()
        kept: dict[tuple[str, int], bytes] = {}
        for line in found.splitlines(keepends=True):
            with suppress(ValidationError):
                result = ConversationResult.model_validate_json(line)
                if line.endswith(b"\n"):
                    kept.pop(result.key, None)
                    kept[result.key] = line
        self._written = {key: hashlib.sha256(line).digest() for key, line in kept.items()}
        if b"".join(kept.values()) != found:
            self._replace(PARTIAL, kept.values())

    def _replace(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write a file so that its name always leads to a whole one, power failures included."""
        path, temporary = self.folder / name, self.folder / f".{name}.new"
        with writing(path):
            try:
                with open(temporary, "wb") as file:
                    file.writelines(chunks)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            folder = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def check_folder(folder: Path, run: str) -> None:
    """Raises UsageError if the folder holds the files of another run."""
    with writing(folder), suppress(FileNotFoundError):
        owner = (folder / _LOCK).read_bytes().decode(errors="replace")
        files = [folder / name for name in (PARTIAL, REPLIES, REPORT)]
        if owner and owner != run and any(file.exists() for file in files):
            raise UsageError(
                f"{folder} holds the files of run {owner!r}: choose another folder, or move them away"
            )


def read_results(path: str | Path) -> list[ConversationResult]:
    """The results in a run's partial or final file, also while it is being written: the half line
    at the end of a file is left out, and of two lines of one conversation the later counts.

    Raises BadInput if the file cannot be read, RecordError if another line is no result.
    """
    results: dict[tuple[str, int], ConversationResult] = {}
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    result = ConversationResult.model_validate_json(line)
                except ValidationError as error:
                    if not line.endswith(b"\n"):
                        break
                    raise RecordError(f"{path}:{number}: {explain(error)}") from None
                results.pop(result.key, None)
                results[result.key] = result
    except OSError as error:
        raise BadInput(str(path), 0, f"cannot be read: {error.strerror or error}") from None
    return list(results.values())


def _line(result: ConversationResult) -> bytes:
    return result.model_dump_json().encode() + b"\n"


def _write(descriptor: int, data: bytes) -> None:
    """One write for the whole line; more only if the system took a part of it."""
    while data:
        data = data[os.write(descriptor, data) :]
