"""A filesystem in memory that counts what is read of it, for tests of range reads."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem


class CountedFileSystem(MemoryFileSystem):
    """`opened` and `read` count handles and bytes by file name."""

    cachable = False
    protocol = "counted"

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__()
        self.store = {}
        self.pseudo_dirs = [""]
        self.opened: dict[str, int] = defaultdict(int)
        self.read: dict[str, int] = defaultdict(int)
        for name, data in files.items():
            self.pipe_file(f"/{name}", data)

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        file = super()._open(path, mode, **more)
        if mode != "rb":
            return file
        self.opened[path.lstrip("/")] += 1
        return _Counted(file, path.lstrip("/"), self.read)


class _Counted:
    def __init__(self, file: Any, name: str, counts: dict[str, int]) -> None:
        self._file, self._name, self._counts = file, name, counts

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._file.read(size)
        self._counts[self._name] += len(data)
        return data

    def __enter__(self) -> _Counted:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """The content belongs to the filesystem."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
