"""A place where a program stands still until a test lets go of it. Imports nothing heavy: actors load it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

__all__ = ["Hold"]


class Hold:
    """Stands still at its `at`-th visit while there is a file `hold`; a transform that changes nothing.

    A FIFO would wake only those who wait in that moment, and not a process that is just handling a signal.

    The file `reached<local rank>` says that it stands still.
    """

    def __init__(self, folder: Path, at: int) -> None:
        self.folder, self.at, self.visits = folder, at, 0

    def __call__(self, sample: Any = None) -> Any:
        if self.visits == self.at:
            (self.folder / f"reached{os.environ.get('LOCAL_RANK', 0)}").touch()
            while (self.folder / "hold").exists():
                time.sleep(0.01)
        self.visits += 1
        return sample
