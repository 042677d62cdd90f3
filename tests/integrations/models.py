"""Small modules that write down what they were given, and when the optimizer stepped."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch


class Recorder(L.LightningModule):
    """Trains nothing of interest; `trained` and `stepped_after` hold (step, microbatch)."""

    def __init__(self, *, fail_at: tuple[int, int] | None = None, error: BaseException | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.trained: list[tuple[int, int]] = []
        self.stepped_after: list[tuple[int, int]] = []
        self.validated: list[tuple[int, int, int]] = []
        self.fail_at, self.error = fail_at, error or RuntimeError("wanted")

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        info = batch["megascale"]
        at = (info.step, info.microbatch)
        if at == self.fail_at:
            raise self.error
        self.trained.append(at)
        return self.layer(batch["x"]).sum()

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated.append((dataloader_idx, batch["megascale"].step, batch["megascale"].microbatch))

    test_step = validation_step
    predict_step = validation_step

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # The optimizer stepped on this microbatch if the count moved.
        count = self.trainer.global_step
        if count != getattr(self, "_count", self._first):
            self.stepped_after.append((batch["megascale"].step, batch["megascale"].microbatch))
        self._count = count

    def on_train_start(self) -> None:
        self._first = self._count = self.trainer.global_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)
