"""What a run writes down: a line for each conversation, and one report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_serializer

from turnmill.reply import Cap, EngineIdentity, Failure, FinishReason, Usage
from turnmill.turn import Message
from turnmill.wire import without_half_pairs

Outcome = Literal["completed", "capped", "failed", "cancelled"]
ConversationCap = Literal[
    "output",  # a turn used up its own max_tokens
    "context",  # the engine's context was full
    "turns",  # the scaffold allows no more turns
    "time",  # the scaffold allows no more time
]


def _one_line(text: str | None) -> str | None:
    return None if text is None else " ".join(text.split())


class _Written(BaseModel):
    """Written with all its keys, in the order of its fields. Unknown keys are ignored, so that an
    older reader takes a newer writer's additions."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class TurnResult(_Written):
    """How one turn of a conversation ended: with a finish reason, or with a failure."""

    hash: str
    sample: int = 0
    finish_reason: FinishReason | None = None
    capped: Cap | None = None
    usage: Usage | None = None
    failure: Failure | None = None


class ConversationResult(_Written):
    """One line of `replies.jsonl`.

    `messages` is the whole conversation, replies included; `capped` the cap that it met, if any (the
    one that ended it, where one did); `error` says in one line why it failed. `ending`, `score` and `details` are the
    scaffold's own.
    """

    id: str
    epoch: Annotated[int, Field(ge=0)] = 0
    outcome: Outcome
    capped: ConversationCap | None = None
    messages: list[Message]
    turns: list[TurnResult] = []
    error: Annotated[str | None, AfterValidator(_one_line)] = None
    ending: str | None = None
    score: Annotated[float | None, Field(allow_inf_nan=False)] = None
    details: dict[str, Any] | None = None

    @field_serializer("messages")
    def _without_absent_keys(self, messages: list[Message]) -> list[dict[str, Any]]:
        return [message.model_dump(exclude_none=True) for message in messages]

    @property
    def key(self) -> tuple[str, int]:
        """What tells this result from the others of its run: id and epoch."""
        return self.id, self.epoch


def writable(result: ConversationResult) -> ConversationResult:
    """The same result, such that it has JSON: half a surrogate pair becomes U+FFFD. Raises ValueError if it has none."""
    try:
        result.model_dump_json()
    except ValueError as error:
        try:
            fields = without_half_pairs(result.model_dump(mode="python"))
            result = ConversationResult.model_validate(fields)
            result.model_dump_json()
        except (ValueError, RecursionError):
            raise error from None
    return result


class Outcomes(_Written):
    """Conversations by outcome."""

    completed: int = 0
    capped: int = 0
    failed: int = 0
    cancelled: int = 0


class Caps(_Written):
    """What met a cap: turns for `output`, conversations for the others."""

    output: int = 0
    context: int = 0
    turns: int = 0
    time: int = 0


class Tokens(_Written):
    """Token counts over all turns; `cached` is the part of `prompt` that was not computed again."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


class Scores(_Written):
    """Over the conversations that have a score."""

    count: int
    mean: float


class Report(_Written):
    """`report.json`: a run in numbers. `endings`: conversations by their scaffold's own word.

    `failures` counts the failed turns by kind; a conversation that failed without one (its scaffold
    did) counts as `scaffold`. `asked` turns were put to the queue by this attempt, `from_store` were
    answered before it. `seconds` is this attempt's.
    """

    run: str
    outcomes: Outcomes = Outcomes()
    capped: Caps = Caps()
    failures: dict[str, int] = {}
    endings: dict[str, int] = {}
    scores: Scores | None = None
    tokens: Tokens = Tokens()
    seconds: float
    engines: list[EngineIdentity] = []
    from_store: int = 0
    asked: int = 0

    @classmethod
    def of(
        cls,
        results: Iterable[ConversationResult],
        *,
        run: str,
        seconds: float,
        engines: Iterable[EngineIdentity] = (),
        from_store: int = 0,
        asked: int = 0,
    ) -> Report:
        """The report on these results."""
        outcomes: Counter[str] = Counter()
        caps: Counter[str] = Counter()
        failures: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        endings: Counter[str] = Counter()
        scores: list[float] = []
        for result in results:
            if result.ending is not None:
                endings[result.ending] += 1
            if result.score is not None:
                scores.append(result.score)
            outcomes[result.outcome] += 1
            if result.capped is not None and result.capped != "output":
                caps[result.capped] += 1
            caps["output"] += sum(turn.capped == "output" for turn in result.turns)
            kinds: list[str] = [
                turn.failure.kind for turn in result.turns if turn.failure is not None
            ]
            failures.update(kinds or (["scaffold"] if result.outcome == "failed" else []))
            for usage in (turn.usage for turn in result.turns if turn.usage is not None):
                tokens["prompt"] += usage.prompt_tokens
                tokens["completion"] += usage.completion_tokens
                tokens["cached"] += usage.cached_tokens
        return cls(
            run=run,
            outcomes=Outcomes(**outcomes),
            capped=Caps(**caps),
            failures=dict(sorted(failures.items())),
            endings=dict(sorted(endings.items())),
            scores=Scores(count=len(scores), mean=round(fmean(scores), 6)) if scores else None,
            tokens=Tokens(**tokens),
            seconds=seconds,
            engines=list(engines),
            from_store=from_store,
            asked=asked,
        )
