"""A run as somebody asks for it, on the command line or in a suite; and the same run read, ready to be driven."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from turnmill import wording
from turnmill.asking import Again
from turnmill.budget import FailureBudget
from turnmill.errors import BadInput, UsageError
from turnmill.lines import Item, Loaded, check_id
from turnmill.local_farm import WorkerCommand
from turnmill.manifest import written_options
from turnmill.run_settings import RunSettings
from turnmill.scaffolds.base import Scaffold
from turnmill.scaffolds.finding import find, in_a_line
from turnmill.settings import check_run, parse_duration
from turnmill.turn import Sampling

OWN_WORDS = "turnmill"
"""The type of pydantic's errors whose text names the field itself."""


def _read_by(parse: Callable[[str], Any], *types: type) -> BeforeValidator:
    """Reads text, or a number as one would type it; what has one of the `types` stays."""

    def read(value: Any) -> Any:
        if isinstance(value, types):
            return value
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise PydanticCustomError("text", "must be text or a number")
        try:
            return parse(str(value))
        except UsageError as error:
            raise PydanticCustomError(OWN_WORDS, "{text}", {"text": str(error)}) from None

    return BeforeValidator(read)


def _concurrency(text: str) -> int | None:
    if text == "auto":
        return None
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise UsageError(f"concurrency {text!r}: auto, or a number of conversations")
    return int(text)


def _keep(text: str) -> float:
    try:
        return parse_duration(text)
    except UsageError as error:
        raise UsageError(f"keep: {error}") from None


def _option(value: Any) -> Any:
    """An option of a scaffold, as `--set` has it: text."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


class RunSpec(BaseModel):
    """What to run, and how. `data`: what the scaffold reads. `set`: its options. `engine`, `slots` and
    `engine_arguments` are for a worker of the run's own."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True
    )

    data: str
    scaffold: str = "multi_turn_chat"
    set: dict[str, Annotated[str, BeforeValidator(_option)]] = {}
    limit: Annotated[int, Field(ge=1)] | None = None
    shuffle: int | None = None
    skip_bad: bool = False
    model: str | None = None
    served_name: str | None = None
    sampling: Sampling = Sampling()
    epochs: Annotated[int, Field(ge=1)] = 1
    seed: int | None = None
    reuse: Literal["run", "all"] = "run"
    concurrency: Annotated[int | None, _read_by(_concurrency, type(None))] = None
    max_failures: Annotated[FailureBudget, _read_by(FailureBudget.parse, FailureBudget)] = (
        FailureBudget.parse("5%")
    )
    keep: Annotated[float | None, _read_by(_keep, type(None))] = None
    engine: str | None = None
    slots: Annotated[int, Field(ge=1)] | None = None
    engine_arguments: list[str] = []

    @property
    def asks_for(self) -> str | None:
        """The name of the model that turns ask for, if it is said."""
        return self.served_name or self.model

    def may_serve(self, name: str) -> bool:
        """Whether turns ask for this name of the run's own worker, as far as can be told without starting it."""
        if self.served_name or not self.model:
            return self.served_name in (None, name)
        path = Path(self.model)
        return name in (self.model, path.name, path.stem)

    @property
    def worker(self) -> WorkerCommand:
        """The worker to start where there is no farm."""
        return WorkerCommand(
            self.engine or "local",
            self.model,
            self.served_name,
            self.slots,
            tuple(self.engine_arguments),
        )


def problems(error: ValidationError) -> list[str]:
    """What is wrong with a RunSpec, each with the field that it is about."""
    return [problem(item) for item in error.errors(include_url=False, include_input=False)]


def problem(item: ErrorDetails, of: type[RunSpec] = RunSpec) -> str:
    """One of pydantic's errors in our words."""
    return item["msg"] if item["type"] == OWN_WORDS else wording.problem(item, of)


@dataclass(frozen=True)
class Attempt:
    """What is said of one attempt at a run, and is no part of what the run is: see RunSettings."""

    again: Collection[Again] = ()
    extend: bool = False
    allow_mixed: bool = False


@dataclass(frozen=True)
class Plan:
    """A run whose input was read. `settings.model` is empty until it is known. `left_out`: bad lines."""

    spec: RunSpec
    settings: RunSettings
    folder: Path
    scaffold: Scaffold[Any]
    items: Sequence[Item]
    left_out: Sequence[BadInput]

    @property
    def name(self) -> str:
        return self.settings.name


def plan(name: str, spec: RunSpec, folder: Path, attempt: Attempt) -> Plan:
    """Find the scaffold of a run and read its input. Raises UsageError, BadInput among them."""
    check_run(name)
    _check_text(spec)
    scaffold = find(spec.scaffold, spec.set)
    loaded = _read(spec, scaffold)
    settings = RunSettings(
        name=name,
        model="",
        scaffold=spec.scaffold,
        sampling=spec.sampling,
        epochs=spec.epochs,
        seed=spec.seed,
        reuse=spec.reuse,
        concurrency=spec.concurrency,
        max_failures=spec.max_failures,
        again=frozenset(attempt.again),
        extend=attempt.extend,
        allow_mixed=attempt.allow_mixed,
        keep=spec.keep,
    )
    items = _chosen(loaded.items, spec.limit, spec.shuffle)
    return Plan(spec, settings, folder, scaffold, items, loaded.bad)


def _check_text(spec: RunSpec) -> None:
    """A command line may have bytes that are no UTF-8: paths can have them, what is asked cannot."""
    for what, value in (
        ("model", spec.model),
        ("served-name", spec.served_name),
        ("stop", "".join(spec.sampling.stop or ())),
    ):
        try:
            (value or "").encode()
        except UnicodeEncodeError:
            raise UsageError(f"{what} {value!r}: not UTF-8") from None


def _read(spec: RunSpec, scaffold: Scaffold[Any]) -> Loaded[Item]:
    """What there is to drive, and nothing that the run would stumble over later: scaffolds are anybody's code."""
    whose = f"scaffold {spec.scaffold!r}"
    try:
        written_options(scaffold)
    except ValueError as error:
        raise UsageError(f"{whose}: its options must be JSON: {error}") from None
    try:
        loaded = scaffold.read(spec.data, spec.skip_bad)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{whose} cannot read {spec.data}: {in_a_line(error)}") from error
    if not isinstance(loaded, Loaded):
        raise UsageError(f"{whose}: its read returned {type(loaded).__name__}, and not Loaded")
    if not loaded.items:
        raise BadInput(spec.data, 0, "there is no conversation in it")
    seen: set[str] = set()
    for item in loaded.items:
        try:
            id, digest = check_id(item.id), item.digest
        except (ValueError, AttributeError, UsageError) as error:
            raise UsageError(f"{whose}: an item that it read: {error}") from None
        if not isinstance(item.id, str) or not isinstance(digest, str):
            raise UsageError(f"{whose}: the id and the digest of item {id} must be strings")
        if id in seen:  # they would share their draws
            raise UsageError(f"{whose}: it read two items with the id {id!r}")
        seen.add(id)
    return loaded


def _chosen(items: Sequence[Item], limit: int | None, shuffle: int | None) -> Sequence[Item]:
    """The items of a run, in its order."""
    if shuffle is not None:
        items = random.Random(shuffle).sample(items, len(items))
    return items[:limit]
