"""Tasks: a JSON line each, or a folder each with a task.toml or task.json in it."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from turnmill.canonical import canonical
from turnmill.errors import BadInput, BadLines, BadTurn
from turnmill.lines import Loaded, read_lines
from turnmill.scaffolds.vanillux.packing import Files, pack
from turnmill.wording import problems

_NAMES: Final = ("task.toml", "task.json")
_OF_A_FOLDER: Final = ("files", "check_files")


def _texts_or_folder(value: Any) -> Any:
    """Said here, because pydantic tells for each type of a union what it is not."""
    texts = isinstance(value, Mapping) and all(isinstance(text, str) for text in value.values())
    if value is None or texts or isinstance(value, str | Path):
        return value
    raise PydanticCustomError("files", "must be texts by their names, or the name of a folder")


_Files = Annotated[Mapping[str, str] | Path | None, BeforeValidator(_texts_or_folder)]


class Task(BaseModel):
    """What is to be done in a sandbox, and how to see whether it is.

    `files` are there from the start. `check` is a command whose exit code is 0 if and only if the task is done; `check_files` are put there
    before it, over what is there. A folder's name is relative to the file that names it. `image`: for Docker.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Annotated[str, Field(min_length=1)]
    prompt: Annotated[str, Field(min_length=1)]
    files: _Files = None
    check: Annotated[str, Field(min_length=1)] | None = None
    check_files: _Files = None
    check_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    image: str | None = None
    digest: str = ""


def read_tasks(source: str, skip_bad: bool = False) -> Loaded[Task]:
    """The tasks of a file of JSON lines, or of a folder: its own, or those of the folders in it. Raises BadInput, BadLines."""
    path = Path(source)
    if not path.is_dir():
        base = Path() if source == "-" else path.parent
        return read_lines(source, partial(_task, base=base), skip_bad)
    folders = [path] if _file_of(path) else sorted(filter(_file_of, path.iterdir()))
    items: list[Task] = []
    bad: list[BadInput] = []
    for folder in folders:
        file = _file_of(folder)
        assert file is not None
        try:
            items.append(_task(_fields(folder, file), base=folder))
        except ValueError as error:
            bad.append(BadInput(str(file), 0, str(error)))
    if not folders:
        raise BadInput(source, 0, f"no folder in it has a {' or a '.join(_NAMES)}")
    if bad and not (skip_bad and items):
        raise BadLines(bad)
    return Loaded(items, bad)


def _file_of(folder: Path) -> Path | None:
    return next((folder / name for name in _NAMES if (folder / name).is_file()), None)


def _fields(folder: Path, file: Path) -> dict[str, Any]:
    """Raises ValueError."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    kind, loads = ("TOML", tomllib.loads) if file.suffix == ".toml" else ("JSON", json.loads)
    try:
        fields = loads(text)
    except ValueError as error:
        raise ValueError(f"not {kind}: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError("must be a JSON object")
    there = {name: name for name in _OF_A_FOLDER if (folder / name).is_dir()}
    return {**there, **fields, "id": folder.resolve().name}


def _task(fields: dict[str, Any], base: Path) -> Task:
    """Raises ValueError."""
    if "digest" in fields:
        raise ValueError("digest: unknown key")
    if isinstance(fields.get("id"), int) and not isinstance(fields["id"], bool):
        fields = {**fields, "id": str(fields["id"])}
    try:
        task = Task.model_validate(fields)
    except ValidationError as error:
        raise ValueError(problems(error, Task)) from None
    inside = {name: _found(base, getattr(task, name)) for name in _OF_A_FOLDER}
    task = task.model_copy(update=inside)
    known = {
        **task.model_dump(exclude={*_OF_A_FOLDER, "digest"}, exclude_none=True),
        **{name: _digest(name, files) for name, files in inside.items() if files is not None},
    }
    try:
        digest = hashlib.sha256(canonical(known).hashed).hexdigest()
    except BadTurn as error:
        raise ValueError(str(error)) from None
    return task.model_copy(update={"digest": digest})


def _found(base: Path, files: Files) -> Files:
    return base / files if isinstance(files, Path) else files


def _digest(name: str, files: Files) -> str:
    try:
        return hashlib.sha256(pack(files)).hexdigest()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
