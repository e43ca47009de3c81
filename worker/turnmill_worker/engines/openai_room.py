"""How many tokens a turn may make on a server that alone can count its prompt: it is asked, and refuses what does not
fit. What the refusal says decides whether a shorter answer would."""

from __future__ import annotations

from turnmill.reply import Cap
from turnmill.turn import Turn
from turnmill_worker.engines.base import InvalidRequest, NoRoom
from turnmill_worker.engines.too_long import TooLong


class ServersRoom:
    """`asked`: the turn's own max_tokens. `context`: the server's, in tokens (0: not known). `send`: the max_tokens to
    ask for now; None: as many as there is room for. `shrunk`: whether that is less than was asked."""

    def __init__(self, turn: Turn, context: int) -> None:
        self.asked = self.send = turn.sampling.max_tokens
        self.shrunk = False
        self._context = context
        if self.send is None and turn.prompt is not None and context:
            self.send = context  # left out beside a prompt, it would be 16; this is refused, with the right number

    def shrink(self, said: TooLong, words: str) -> None:
        """The server has refused `send` tokens. Raises NoRoom if it would refuse any number, and InvalidRequest if it
        contradicts itself."""
        context = min(filter(None, (said.context, self._context)), default=0)
        left = context - said.prompt if said.prompt is not None and context else None
        if self.send is None or (left is not None and left < 1):
            raise NoRoom(max(said.prompt or 0, context), context)
        if left is None or not said.exact:
            self.send, self.shrunk = None, True
        elif left < self.send:
            self.send, self.shrunk = left, True
        else:
            raise InvalidRequest(words)

    def met(self, prompt_tokens: int, made: int) -> tuple[Cap, int | None]:
        """Which limit an answer met that ended for its length, and how many tokens that is."""
        if self.asked is not None and not self.shrunk and (not made or made >= self.asked):
            return "output", self.asked
        # Fewer than it was asked for: the context's, or a limit of the server's own.
        whole = prompt_tokens + made
        return "context", min(whole, self._context) if self._context else whole
