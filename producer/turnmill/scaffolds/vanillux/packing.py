"""Files as a tar file, the same bytes whenever they are the same files."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

MOST: Final = 256 << 20
"""Bytes of files that a task may bring."""

_TIME: Final = 946684800
"""Unix time of all files: a clone, or another machine, must not make another task of them."""

Files = Mapping[str, str] | Path | None
"""Texts by their names, or a folder."""


def pack(files: Files) -> bytes:
    """As a tar file. Raises ValueError for what cannot be packed."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        if isinstance(files, Path):
            _pack_folder(tar, files)
        else:
            for name, text in sorted((files or {}).items()):
                _pack_text(tar, name, text)
    return packed.getvalue()


def _pack_text(tar: tarfile.TarFile, name: str, text: str) -> None:
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or not name.isprintable():
        raise ValueError(f"{name!r} is no name of a file inside a folder")
    data = text.encode()
    entry = tarfile.TarInfo(str(path))
    # A script is meant to be run.
    entry.size, entry.mode, entry.mtime = len(data), 0o755 if text[:2] == "#!" else 0o644, _TIME
    tar.addfile(entry, io.BytesIO(data))
    _check(tar)


def _pack_folder(tar: tarfile.TarFile, folder: Path) -> None:
    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mtime = _TIME
        entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
        tar.inodes.clear()  # type: ignore[attr-defined] # two names of one file are two files
        if tar.offset + entry.size > MOST:
            raise ValueError(f"{folder} has more than {MOST >> 20} MiB")
        return entry

    try:
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder")
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name, filter=plain)
    except OSError as error:
        raise ValueError(f"{error.filename}: {error.strerror}") from None


def _check(tar: tarfile.TarFile) -> None:
    if tar.offset > MOST:
        raise ValueError(f"the files have more than {MOST >> 20} MiB")
