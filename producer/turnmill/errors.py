"""Every error that turnmill raises.

TurnmillError
├── UsageError            a command or a call was wrong: exit 2
│   ├── BadInput          a line of an input file is wrong; says FILE:LINE
│   ├── BadLines          all the lines of an input file that are wrong
│   ├── BadTurn           a turn cannot be built or hashed
│   ├── EngineChanged     a run would be answered by another engine than before
│   ├── ManifestChanged   a run's name is taken by other input or settings
│   └── RunInUse          a run already has a live producer
├── RedisAway             Redis cannot be reached, for longer than patience lasts: exit 3
├── RedisUnusable         Redis refuses for good (password, version, command): exit 3
├── CannotWrite           a folder or file of turnmill's own cannot be written: exit 3
├── ClientClosed          the Client was closed, before this call or while it waited
├── OtherDraw             a draw is another one than was asked for; carries its number
├── QueueFull             Redis has no room for more turns now; ask again later
├── RecordError           a stored record cannot be read
│   └── NewerRecord       it was written by a newer turnmill; leave it alone
├── StreamBroken          an answer does not go on from what was streamed of it; the turn itself goes on
└── TurnFailed            a turn ended as a failure; carries the Failure
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from turnmill.reply import Failure


class TurnmillError(Exception):
    """Base of all errors that turnmill raises on purpose."""


class UsageError(TurnmillError):
    """A command or a call was wrong; nothing was done."""


class BadInput(UsageError):
    """A line of an input file is wrong.

    Attributes: path (as given), line (1-based; 0 for the whole file), what.
    """

    def __init__(self, path: str, line: int, what: str) -> None:
        self.path, self.line, self.what = path, line, what
        where = f"{path}:{line}" if line else path
        super().__init__(f"{where}: {what}")


class BadLines(UsageError):
    """Lines of an input file are wrong; nothing of it was taken. The text shows the first of them.

    Attributes: bad (the BadInput of every wrong line, in the file's order).
    """

    SHOWN = 20

    def __init__(self, bad: Sequence[BadInput]) -> None:
        self.bad = list(bad)
        lines = [str(one) for one in self.bad[: self.SHOWN]]
        if len(self.bad) > self.SHOWN:
            lines.append(f"... and {len(self.bad) - self.SHOWN} more bad lines")
        super().__init__("\n".join(lines))


class BadTurn(UsageError):
    """A turn cannot be built or hashed: the text says which field and why."""


class ManifestChanged(UsageError):
    """A run of this name exists with other input or other settings."""


class EngineChanged(UsageError):
    """The live workers' engine is not the one that a run began with; the text names both."""


class RunInUse(UsageError):
    """A run already has a live producer; the text names it."""


class RedisAway(TurnmillError):
    """Redis could not be reached for as long as the caller's patience lasted."""


class ClientClosed(TurnmillError):
    """The Client was closed, before this call or while it waited. What was submitted stays submitted."""


class OtherDraw(TurnmillError):
    """A draw is another one than was asked for.

    Attributes: number (that of the draw).
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"the draw is number {number}")


class RedisUnusable(TurnmillError):
    """Redis answered with an error that waiting does not mend."""


class CannotWrite(TurnmillError):
    """A folder or file of turnmill's own cannot be written; the text says which and why."""

    def __init__(self, path: object, error: OSError) -> None:
        super().__init__(f"cannot write {path}: {error.strerror or error}")


class QueueFull(TurnmillError):
    """Redis is short of memory for more turns; what is queued goes on. Ask again later."""


class RecordError(TurnmillError):
    """A stored record cannot be read as what its key says it is."""


class NewerRecord(RecordError):
    """A record was written in a newer wire version than this turnmill reads."""


class StreamBroken(TurnmillError):
    """What was streamed of an answer is not the beginning of the answer any more: another engine had to begin again.
    The turn itself goes on: who asks for it without a stream gets its ending."""


class TurnFailed(TurnmillError):
    """A turn ended as a failure.

    Attributes: failure (turnmill.reply.Failure).
    """

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(f"turn {failure.hash[:12]} failed: {failure.kind}: {failure.text}")
