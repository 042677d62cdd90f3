"""`Mixture`: what makes a schedule, what does not, and the weights that come of it."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from megascale_lightning import CollatedRows, ConfigError, LoaderConfig, Mixture, Source
from megascale_lightning.integrations.lightning.hyperparameters import plain, revived
from megascale_lightning.mixtures import WeightSchedule

POINTS = [(0, {"web": 1.0, "code": 0.0}), (10, {"code": 0.5}), (30, {"web": 0.0, "code": 1.0})]


def config(mixture: Any = None, *, epochs: Any = None, **changes: Any) -> LoaderConfig:
    sources = [Source(name, f"{name}.jsonl", epochs=(epochs or {}).get(name)) for name in ("web", "code")]
    return LoaderConfig(sources=sources, rows=CollatedRows(1), runtime="local", mixture=mixture, **changes)


def weights(mixture: Mixture, *steps: int, **changes: Any) -> list[list[float]]:
    schedule = config(mixture, **changes).schedule_of("train")
    assert schedule is not None
    return [schedule.at(step).tolist() for step in steps]


class TestWeights:
    def test_in_steps(self) -> None:
        found = weights(Mixture.schedule(POINTS), 0, 9, 10, 29, 30, 10**9)
        assert found == [[1, 0], [1, 0], [1, 0.5], [1, 0.5], [0, 1], [0, 1]]

    def test_on_lines(self) -> None:
        found = weights(Mixture.schedule(POINTS, interpolate="linear"), 0, 5, 10, 20, 30, 31)
        assert found == [[1, 0], [1, 0.25], [1, 0.5], [0.5, 0.75], [0, 1], [0, 1]]

    def test_a_weight_that_stays_is_the_same_float(self) -> None:
        schedule = WeightSchedule((0, 7), ((0.1, 0.3), (0.1, 0.7)), "linear")
        assert {float(schedule.at(step)[0]) for step in range(9)} == {0.1}

    def test_none_is_below_0_on_the_way_there(self) -> None:
        rng = np.random.default_rng(0)
        for _ in range(200):
            high, stop = float(rng.random() * 10.0 ** rng.integers(-300, 300)), int(rng.integers(2, 10**6))
            schedule = WeightSchedule((0, stop), ((high, 0.0), (0.0, high)), "linear")
            for step in (1, stop // 2, stop - 1):
                assert (schedule.at(step) >= 0).all()
                assert (schedule.at(step) > 0).any()

    def test_single_weights_hold_throughout(self) -> None:
        assert weights(Mixture.schedule(POINTS), 0, 10, 30, weights={"code": 0.2}) == [[1, 0.2], [1, 0.2], [0, 0.2]]

    def test_a_config_without_one(self) -> None:
        assert config({"web": 1, "code": 3}).schedule_of("train") is None
        assert config({"web": 1, "code": 3}).weights_of("train") == {"web": 1.0, "code": 3.0}

    def test_which_are_drawn(self) -> None:
        found = config(Mixture.schedule([(0, {"web": 1, "code": 0}), (5, {"web": 2})]))
        assert [source.name for source in found.drawn("train")] == ["web"]
        assert [source.name for source in config(Mixture.schedule(POINTS)).drawn("train")] == ["web", "code"]


YAML = {
    "schedule": [[0, {"web": 1.0, "code": 0.0}], [10, {"code": 0.5}]],
    "interpolate": "linear",
    "unit": "tokens",
}


class TestForms:
    def test_as_a_yaml_file_has_it(self) -> None:
        found = config(YAML).shares
        assert found == Mixture.schedule(POINTS[:2], interpolate="linear", unit="tokens")
        assert config({"weights": {"web": 1, "code": 2}, "unit": "tokens"}).shares == Mixture(
            {"web": 1, "code": 2}, unit="tokens"
        )

    def test_a_source_may_be_named_as_a_setting(self) -> None:
        sources = [Source(name, "x.jsonl") for name in ("schedule", "weights")]
        found = LoaderConfig(sources=sources, rows=CollatedRows(1), mixture={"schedule": 1, "weights": 2})
        assert found.weights_of("train") == {"schedule": 1.0, "weights": 2.0}

    @pytest.mark.parametrize("count", [2, 500])
    def test_hyperparameters_and_back(self, count: int) -> None:
        points = [(step, {"web": 1.0 + step, "code": 2.0}) for step in range(count)]
        mixture = Mixture.schedule(points, interpolate="linear", unit="tokens", stop=["web"])
        saved = plain(mixture)
        assert saved["class_path"] == "megascale_lightning.mixtures.Mixture"
        assert revived(saved) == mixture == pickle.loads(pickle.dumps(mixture))

    def test_those_of_before_it_moved(self) -> None:
        saved = {"class_path": "megascale_lightning.config.Mixture", "init_args": {"unit": "tokens"}}
        assert revived(saved) == Mixture(unit="tokens")


class TestRefusals:
    @pytest.mark.parametrize(
        ("points", "message"),
        [
            ([], "a schedule is a list of"),
            ({"web": 1}, "a schedule is a list of"),
            ([(0, {"web": 1}, 2)], "a schedule is a list of"),
            ([{"web": 1}], "a schedule is a list of"),
            ([(5, {"web": 1})], "first step of the schedule must be 0, not 5"),
            ([(0, {"web": 1}), (9, {"web": 2}), (9, {"web": 3})], "must rise: 9 comes after 9"),
            ([(0, {"web": 1}), (1.5, {"web": 2})], "whole number of at least 0, not 1.5"),
            ([(0, {"web": 1}), (7, {"web": -2})], r"step 7 of the schedule: weights .* not {'web': -2}"),
            ([(0, {"web": float("nan")})], "step 0 of the schedule: weights .*'web': nan"),
            ([(0, {"web": 10**400})], "step 0 of the schedule: weights must be finite numbers"),
        ],
    )
    def test_no_schedule(self, points: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Mixture.schedule(points)

    @pytest.mark.parametrize(
        ("points", "message"),
        [
            ([(0, {"web": 1})], r"step 0, must name every source; missing \['code'\] \(0 for one that joins later\)"),
            ([(0, {"web": 1, "code": 1}), (8, {"wbe": 2})], r"step 8 of the schedule names \['wbe'\]"),
            ([(0, {"web": 1, "code": 0}), (8, {"web": 0})], "at step 8 of the schedule no source"),
            ([(0, {"web": 0, "code": 0}), (8, {"web": 1})], "at step 0 of the schedule no source"),
        ],
    )
    def test_not_for_these_sources(self, points: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            config(Mixture.schedule(points))

    def test_single_weights_that_leave_nothing(self) -> None:
        with pytest.raises(ConfigError, match="at step 30"):
            config(Mixture.schedule(POINTS), weights={"code": 0})

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"unit": "rows"}, "unit must be 'samples' or 'tokens', not 'rows'"),
            ({"interpolate": "cubic", "points": POINTS}, "interpolate must be 'step' or 'linear'"),
            ({"interpolate": "linear"}, "needs the points of a schedule"),
            ({"weights": {"web": 1}, "points": POINTS}, "both given"),
            ({"weights": [1]}, "weights must be a mapping"),
            ({"stop": "last"}, "stop must be 'all', 'first' or a list of source names, not 'last'"),
            ({"stop": []}, "stop must be"),
        ],
    )
    def test_settings(self, settings: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Mixture(**settings)

    @pytest.mark.parametrize(
        ("stop", "epochs", "message"),
        [
            ("first", {}, "no source that is drawn has one"),
            (["wbe"], {"web": 1}, r"stop names 'wbe'; the sources are \['code', 'web'\]"),
            (["code"], {"web": 1}, "'code', which has no epochs= and so never ends"),
            (["code"], {"code": 1}, "'code', whose weight is 0"),
        ],
    )
    def test_stop_rules(self, stop: Any, epochs: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            config(Mixture({"web": 1, "code": 0}, stop=stop), epochs=epochs)

    def test_no_mixture(self) -> None:
        with pytest.raises(ConfigError, match="must be a Mixture or weights by source name, not list"):
            config(["web"])
        with pytest.raises(ConfigError, match="takes the place of"):
            config({"schedule": POINTS, "weights": {"web": 1}})
