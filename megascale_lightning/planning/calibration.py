"""Costs from measured times: what a microbatch took, explained by what was in it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from megascale_lightning.errors import ConfigError
from megascale_lightning.mixtures import is_finite, is_number
from megascale_lightning.planning.costs import Addable, refuse_missing
from megascale_lightning.types import FloatArray, IntArray
from megascale_lightning.writing import write_whole

__all__ = ["FEATURES", "CalibratedCost", "CostCalibrator", "check_scipy", "microbatch_features"]

FEATURES: Final = (
    "constant",
    "per_document",
    "per_token",
    "per_token_pair",
    "per_patch",
    "per_patch_pair",
    "per_image",
)
"""What a second is spent on: a microbatch, a document, a token, l^2, a patch, p^2, an image."""

OF_METADATA: Final = {"patches": "per_patch", "patch_pairs": "per_patch_pair", "images": "per_image"}
"""Metadata array -> the coefficient that it goes with."""

FILE_VERSION: Final = 1
MAD_OF_NORMAL: Final = 1.4826
"""Standard deviations in a median absolute deviation, of normal noise."""
LEAST_SPREAD: Final = 0.01
"""Relative standard deviation below which a feature cannot be told from a constant."""


def microbatch_features(
    lengths: IntArray, *, patches: float = 0.0, patch_pairs: float = 0.0, images: float = 0.0
) -> FloatArray:
    """Sum up one microbatch.

    Args:
        lengths: Tokens of its documents, int [n].
        patches: Of all its images.
        patch_pairs: Sum over its images of (patches of the image)^2.
        images: Number of its images.

    Returns:
        float64 [7], in the order of `FEATURES`.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    return np.array([1.0, len(tokens), tokens.sum(), (tokens * tokens).sum(), patches, patch_pairs, images])


def check_scipy() -> None:
    """Refuse to go on without what the fit needs.

    Raises:
        ConfigError: SciPy is not installed.
    """
    if find_spec("scipy") is None:
        raise ConfigError("CostCalibrator needs the package scipy, which is not installed: pip install scipy")


@dataclass(frozen=True, kw_only=True)
class CalibratedCost(Addable):
    """Seconds of forward and backward by measured coefficients, all at least 0. What `CostCalibrator.fit` gives.

    Asked as a cost, it gives the part of documents; `constant` belongs to a microbatch, whatever is in it.

    Raises:
        ConfigError: A coefficient is not finite or below 0.
    """

    constant: float = 0.0
    per_document: float = 0.0
    per_token: float = 0.0
    per_token_pair: float = 0.0
    """Of the square of a document's length."""
    per_patch: float = 0.0
    per_patch_pair: float = 0.0
    """Of the square of an image's patches."""
    per_image: float = 0.0
    r2: float = math.nan
    """Share of the variance of the times that is explained."""
    p95_error: float = math.nan
    """95th percentile of |predicted - measured| / measured."""
    num_samples: int = 0
    """Microbatches that were used; `r2` and `p95_error` are of these."""
    num_outliers: int = 0
    """Microbatches that were left out, for how far they lay from the rest."""

    def __post_init__(self) -> None:
        for name in FEATURES:
            value = getattr(self, name)
            if not is_finite(value) or value < 0:
                raise ConfigError(f"CalibratedCost: {name} must be a finite number of at least 0, not {value!r}")

    @property
    def fields(self) -> tuple[str, ...]:
        """The metadata arrays that it wants: those whose coefficients are above 0."""
        return tuple(name for name, coefficient in OF_METADATA.items() if getattr(self, coefficient) > 0)

    @property
    def crossover(self) -> float:
        """Tokens of a document at which its square costs as much as its tokens; inf where the square costs nothing."""
        return self.per_token / self.per_token_pair if self.per_token_pair else math.inf

    @classmethod
    def of(cls, coefficients: Mapping[str, Any]) -> CalibratedCost:
        """A cost with these coefficients, by name; the others are 0.

        Raises:
            ConfigError: A name is unknown, or a coefficient is not finite or below 0.
        """
        unknown = sorted(set(coefficients) - set(FEATURES))
        if unknown:
            raise ConfigError(f"CalibratedCost: there are no coefficients {unknown}; there are {list(FEATURES)}")
        return cls(**coefficients)

    @property
    def coefficients(self) -> dict[str, float]:
        """Those above 0, by name: `CalibratedCost.of(coefficients)` costs the same."""
        return {name: float(getattr(self, name)) for name in FEATURES if getattr(self, name) > 0}

    def __call__(self, lengths: IntArray, **metadata: Any) -> FloatArray:
        """Lengths in tokens, int [n], and the arrays of `fields` -> seconds, float64 [n]."""
        refuse_missing("CalibratedCost", self.fields, metadata)
        tokens = np.asarray(lengths, dtype=np.float64)
        seconds = self.per_document + self.per_token * tokens + self.per_token_pair * tokens * tokens
        for name in self.fields:
            seconds = seconds + getattr(self, OF_METADATA[name]) * np.asarray(metadata[name], dtype=np.float64)
        return np.asarray(seconds, dtype=np.float64)

    def seconds(self, features: FloatArray) -> FloatArray:
        """Features of microbatches, float64 [n, 7] -> predicted seconds, float64 [n]."""
        coefficients = np.array([getattr(self, name) for name in FEATURES])
        return np.asarray(np.asarray(features, dtype=np.float64) @ coefficients, dtype=np.float64)

    def to_yaml(self, path: str | Path) -> None:
        """Write it to a file, which is there as a whole or not at all."""
        import yaml  # type: ignore[import-untyped]

        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump({"version": FILE_VERSION, "unit": "seconds", **asdict(self)}, sort_keys=False)
        write_whole(target, text)

    @classmethod
    def from_yaml(cls, path: str | Path) -> CalibratedCost:
        """Read what `to_yaml` wrote.

        Raises:
            ConfigError: The file cannot be read, or is something else.
        """
        import yaml

        try:
            found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"CalibratedCost: {path} cannot be read: {error}") from error
        if not isinstance(found, Mapping) or found.get("version") != FILE_VERSION or found.get("unit") != "seconds":
            raise ConfigError(f"CalibratedCost: {path} is no file of version {FILE_VERSION} that CalibratedCost wrote")
        values = {name: value for name, value in found.items() if name not in ("version", "unit")}
        known = set(cls.__dataclass_fields__)
        if set(values) != known:
            raise ConfigError(
                f"CalibratedCost: {path} must name {sorted(known)}; missing are {sorted(known - set(values))}, unknown "
                f"are {sorted(map(str, set(values) - known))}"
            )
        wrong = {name: value for name, value in values.items() if not is_number(value)}
        if wrong:
            raise ConfigError(f"CalibratedCost: {path} must hold numbers alone, not {wrong}")
        return cls(**values)


class CostCalibrator:
    """Finds what a document, a token, a pair of tokens, a patch, ... costs from times of microbatches.

    Non-negative least squares on relative errors. A microbatch whose error lies more than `outlier_mads` median
    absolute deviations (scaled to standard deviations) from the median is left out, and the fit is done again, until
    the same ones are left out.

    Args:
        skip_steps: The first steps that are given to it and not used: compilation, allocation, caches.
        max_samples: The latest microbatches, which are kept.
        outlier_mads: How far off is too far.

    Raises:
        ConfigError: A setting is out of its range.
    """

    def __init__(self, *, skip_steps: int = 10, max_samples: int = 20_000, outlier_mads: float = 3.0) -> None:
        for name, value, least in (("skip_steps", skip_steps, 0), ("max_samples", max_samples, 1)):
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"CostCalibrator: {name} must be a whole number of at least {least}, not {value!r}")
        if not outlier_mads > 0:
            raise ConfigError(f"CostCalibrator: outlier_mads must be above 0, not {outlier_mads!r}")
        self._skip_steps = skip_steps
        self._outlier_mads = outlier_mads
        self._samples: deque[tuple[FloatArray, float]] = deque(maxlen=max_samples)
        self._last_step: int | None = None
        self._steps = 0

    def __len__(self) -> int:
        """Microbatches that a fit would look at."""
        return len(self._samples)

    def add(self, features: FloatArray, seconds: float, *, step: int) -> None:
        """Take one microbatch.

        Args:
            features: float64 [7], as `microbatch_features` gives them.
            seconds: Its forward and backward pass on this rank, without waiting for data or other ranks.
            step: Its optimizer step.

        Raises:
            ConfigError: Not 7 finite features of at least 0, or the time is not finite and above 0.
        """
        row = np.array(features, dtype=np.float64)
        if row.shape != (len(FEATURES),) or not (np.isfinite(row) & (row >= 0)).all():
            raise ConfigError(f"CostCalibrator: features must be {len(FEATURES)} numbers of at least 0: {features!r}")
        if not (math.isfinite(seconds) and seconds > 0):
            raise ConfigError(f"CostCalibrator: seconds must be a finite number above 0, not {seconds!r}")
        if step != self._last_step:
            self._last_step = step
            self._steps += 1
        if self._steps > self._skip_steps:
            self._samples.append((row, float(seconds)))

    def fit(self, *, half_life: float | None = None) -> CalibratedCost:
        """Fit the coefficients to what was taken so far.

        Args:
            half_life: Microbatches after which one counts half, to follow a change; None: all count the same.

        Raises:
            ConfigError: There are too few microbatches, their tokens and squared lengths are too much alike to tell the
                costs apart, `half_life` is not above 0, or SciPy is not installed.
        """
        check_scipy()
        if half_life is not None and not half_life > 0:
            raise ConfigError(f"CostCalibrator: half_life must be above 0 microbatches, not {half_life!r}")
        least = 4 * len(FEATURES)
        if len(self._samples) < least:
            raise ConfigError(
                f"CostCalibrator: {len(self._samples)} microbatches after the first {self._skip_steps} steps, of at "
                f"least {least}: record more steps"
            )
        features = np.stack([row for row, _ in self._samples])
        times = np.array([seconds for _, seconds in self._samples])
        _refuse_alike(features)
        ages = np.arange(len(times))[::-1]
        weights = np.ones(len(times)) if half_life is None else 0.5 ** (ages / half_life)
        coefficients, kept = self._fit_robustly(features, times, weights)
        predicted, measured = features[kept] @ coefficients, times[kept]
        total = float(((measured - measured.mean()) ** 2).sum())
        return CalibratedCost(
            **dict(zip(FEATURES, coefficients.tolist(), strict=True)),
            r2=1.0 - float(((measured - predicted) ** 2).sum()) / total if total else math.nan,
            p95_error=float(np.quantile(np.abs(predicted - measured) / measured, 0.95)),
            num_samples=int(kept.sum()),
            num_outliers=int((~kept).sum()),
        )

    def _fit_robustly(
        self, features: FloatArray, times: FloatArray, weights: FloatArray
    ) -> tuple[FloatArray, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Coefficients, float64 [7], and which microbatches they are from, bool [n]."""
        kept = np.ones(len(times), dtype=np.bool_)
        # Errors relative to the measured time bound what a slow outlier can do, but favour too small coefficients (a
        # time that came out short weighs more); relative to the predicted time they do not, once the outliers are gone.
        scale = times
        coefficients = _non_negative(features, times, np.sqrt(weights) / scale)
        for _ in range(20):
            predicted = features @ coefficients
            scale = np.where(predicted > 0, predicted, times)
            errors = (times - predicted) / scale
            middle = float(np.median(errors[kept]))
            spread = MAD_OF_NORMAL * float(np.median(np.abs(errors[kept] - middle)))
            # Times without any noise have no outliers: what is left is rounding.
            now = np.abs(errors - middle) <= max(self._outlier_mads * spread, 1e-9)
            same = bool((now == kept).all())
            kept = now
            before = coefficients
            coefficients = _non_negative(features[kept], times[kept], (np.sqrt(weights) / scale)[kept])
            if same and np.allclose(coefficients, before, rtol=1e-9, atol=0):
                break
        return coefficients, kept


def _non_negative(features: FloatArray, times: FloatArray, row_weights: FloatArray) -> FloatArray:
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    weighted = features * row_weights[:, None]
    largest = weighted.max(axis=0)
    largest[largest == 0] = 1.0  # a feature that never occurs gets 0
    solution, _ = nnls(weighted / largest, times * row_weights)
    return np.asarray(solution / largest, dtype=np.float64)


def _refuse_alike(features: FloatArray) -> None:
    """Tokens T and squared lengths Q have to vary, and Q not with T alone."""
    tokens, pairs = features[:, FEATURES.index("per_token")], features[:, FEATURES.index("per_token_pair")]
    line = np.stack([np.ones_like(tokens), tokens], axis=1) / np.array([1.0, max(tokens.max(), 1.0)])
    rest = pairs - line @ np.linalg.lstsq(line, pairs, rcond=None)[0]
    spreads = {
        "tokens": float(tokens.std() / max(tokens.mean(), 1.0)),
        "sums of squared lengths": float(pairs.std() / max(pairs.mean(), 1.0)),
        "sums of squared lengths at equal tokens": float(rest.std() / max(pairs.mean(), 1.0)),
    }
    alike = {name: spread for name, spread in spreads.items() if spread < LEAST_SPREAD}
    if alike:
        said = ", ".join(f"{name} by {spread:.2%}" for name, spread in alike.items())
        raise ConfigError(
            f"CostCalibrator: the microbatches are too much alike to tell tokens from attention: they vary in {said}, "
            f"and need {LEAST_SPREAD:.0%}. Record some with one long document, some with many short ones, some with "
            "fewer tokens"
        )
