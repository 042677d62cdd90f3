"""The page that `megascale plan --report` writes: well formed, by itself, readable; it draws what was found."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale_lightning import writing
from megascale_lightning.cli import main
from megascale_lightning.cli.charts import Bar, Line, bar_chart, line_chart
from megascale_lightning.cli.planreport import report_html
from megascale_lightning.writing import write_whole

VOID = {"meta", "br", "hr", "img", "link", "input"}
YAML = """
sources:
  web: {data: web.parquet, weight: 3}
  code: {data: code.parquet}
mixture: {schedule: [[0, {web: 0.9, code: 0.1}], [30, {code: 0.9}]], interpolate: linear}
rows: {class_path: megascale_lightning.PaddedRows, init_args: {max_len: 64, micro_batch_size: 2}}
global_batch_size: 16
runtime: local
"""


class Page(HTMLParser):
    """Every element with its attributes and text; ends that close nothing are an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[int] = []
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self.feed(text)
        self.close()
        assert not self.open, "left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}, []))
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}, []))

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for index in self.open:
            self.elements[index][2].append(data)

    def all(self, tag: str) -> list[tuple[dict[str, str], str]]:
        return [(attrs, "".join(texts)) for name, attrs, texts in self.elements if name == tag]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, seed in (("web", 1), ("code", 2)):
        lengths = np.clip(np.exp(np.random.default_rng(seed).normal(2.5, 0.9, 600)), 1, 64).astype(int)
        ids = pa.array([np.ones(n, np.int32) for n in lengths])
        pq.write_table(pa.table({"input_ids": ids}), tmp_path / f"{name}.parquet")
    (tmp_path / "run.yaml").write_text(YAML)
    return tmp_path


def reported(
    capsys: pytest.CaptureFixture[str], *arguments: str, config: str = "run.yaml"
) -> tuple[dict[str, Any], str]:
    """The JSON object and the page."""
    assert main(["plan", config, "--dp", "4", "--json", "--report", "plan.html", *arguments]) == 0
    return json.loads(capsys.readouterr().out), Path("plan.html").read_text("utf-8")


def heights(points: str) -> list[float]:
    return [float(point.split(",")[1]) for point in points.split()]


def assert_drawn(drawn: list[float], values: list[float]) -> None:
    """Heights are a falling straight function of the values."""
    assert len(drawn) == len(values)
    slope, start = np.polyfit(values, drawn, 1)
    assert slope < 0
    assert np.abs(slope * np.array(values) + start - drawn).max() < 0.2


class TestPage:
    def test_lines_have_a_point_for_every_step(self, capsys: pytest.CaptureFixture[str]) -> None:
        found, text = reported(capsys, "--steps", "25")
        svgs = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>")).iter("svg")
        drawn = {
            svg.findtext("title"): {line.findtext("title"): line.attrib["points"] for line in svg.iter("polyline")}
            for svg in svgs
        }
        of = found["each_step"]
        shares, balance = drawn["Share of the samples of each step"], drawn["Slowest rank over the mean, by step"]
        wanted = {
            **{name: (shares[name], of["share"][name]) for name in ("web", "code")},
            **{f"{name}, target": (shares[f"{name}, target"], of["target"][name]) for name in ("web", "code")},
            "dealt": (balance["dealt in turn"], of["max_over_mean_before"]),
            "planned": (balance["as planned"], of["max_over_mean"]),
            "tokens": (drawn["Tokens by step"]["tokens"], of["tokens"]),
            "padding": (drawn["Padding by step"]["padding"], of["padding"]),
        }
        assert len(shares) == 4
        for points, values in wanted.values():
            assert len(values) == 25
            assert_drawn(heights(points), values)
            across = [float(point.split(",")[0]) for point in points.split()]
            assert (across[0], across[-1]) == (70, 790)
            assert np.diff(across) == pytest.approx(np.full(24, (across[-1] - across[0]) / 24), abs=0.11)

    def test_bars_are_the_histogram(self, capsys: pytest.CaptureFixture[str]) -> None:
        found, text = reported(capsys, "--steps", "25")
        page = Page(text)
        bars = [float(attrs["height"]) for attrs, _ in page.all("rect")]
        counts = [one["count"] for one in found["lengths"]]
        assert sum(counts) == found["samples"]["total"]
        assert np.array(bars) / max(bars) == pytest.approx(np.array(counts) / max(counts), abs=0.002)
        names = [text for _, text in page.all("rect")]
        assert names[-1] == f"{found['lengths'][-1]['from']}-{found['lengths'][-1]['to']}: {counts[-1]:,}"

    def test_tables_hold_the_figures(self, capsys: pytest.CaptureFixture[str]) -> None:
        found, text = reported(capsys, "--steps", "25")
        cells = [text for _, text in Page(text).all("td")]
        for source in found["sources"]:
            wanted = [f"{source['target']:.2%}", f"{source['share']:.2%}", f"{source['samples']:,}"]
            assert any(cells[at : at + 3] == wanted for at in range(len(cells)))
        facts = dict(zip(*([text for _, text in Page(text).all(tag)] for tag in ("dt", "dd")), strict=True))
        assert facts["speed-up"].startswith(f"{found['speed_up']:.3f} predicted")
        assert facts["config"] == "run.yaml"

    def test_it_is_well_formed_and_by_itself(self, capsys: pytest.CaptureFixture[str]) -> None:
        _, text = reported(capsys, "--steps", "3")
        page = Page(text)
        assert not {tag for tag, _, _ in page.elements} & {"script", "link", "img", "iframe", "object", "image", "use"}
        names = {name for _, attrs, _ in page.elements for name in attrs}
        assert not {name for name in names if name in ("src", "href", "srcset") or name.startswith("on")}
        assert "url(" not in text
        assert "@import" not in text
        assert "http:" not in text
        assert "https:" not in text

    def test_readers_are_told_what_is_drawn(self, capsys: pytest.CaptureFixture[str]) -> None:
        _, text = reported(capsys, "--steps", "3")
        page = Page(text)
        assert page.all("html")[0][0]["lang"] == "en"
        ids = [attrs["id"] for _, attrs, _ in page.elements if "id" in attrs]
        assert len(ids) == len(set(ids))
        pictures = page.all("svg")
        assert len(pictures) == 5
        for attrs, _ in pictures:
            assert attrs["role"] == "img"
            assert set(attrs["aria-labelledby"].split()) <= set(ids)
        assert all(text.strip() for _, text in page.all("desc"))
        assert {attrs["scope"] for attrs, _ in page.all("th")} == {"col", "row"}
        assert len(page.all("caption")) == len(page.all("table")) == 2

    def test_names_are_escaped(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        name = "<b>&\"'.yaml"
        (folder / name).write_text(YAML)
        _, text = reported(capsys, "--steps", "2", config=name)
        page = Page(text)
        assert not page.all("b")
        assert name in [text for _, text in page.all("dd")]

    def test_one_step(self, capsys: pytest.CaptureFixture[str]) -> None:
        _, text = reported(capsys, "--steps", "1")
        page = Page(text)
        assert len(page.all("circle")) == len(page.all("polyline")) == 8

    def test_many_sources(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        sources = "".join(f"  s{i}: {{data: web.parquet, weight: {i + 1}}}\n" for i in range(9))
        (folder / "run.yaml").write_text(re.sub(r"sources:.*?rows", f"sources:\n{sources}rows", YAML, flags=re.DOTALL))
        found, text = reported(capsys, "--steps", "4")
        assert len(found["sources"]) == 9
        assert "3 smaller sources are in the table only" in text
        lines = [text for _, text in Page(text).all("polyline")]
        assert "s8" in lines
        assert "s0" not in lines

    def test_the_text_says_where_it_lies(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", "run.yaml", "--steps", "2", "--report", "plan.html"]) == 0
        assert capsys.readouterr().out.endswith("  report    plan.html\n")


class TestWriting:
    def test_what_was_there_stays_where_writing_fails(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (folder / "plan.html").write_text("before")
        before = sorted(folder.iterdir())

        def fails(*_: Any) -> None:
            raise OSError("the disk is full")

        monkeypatch.setattr(writing.os, "fsync", fails)
        assert main(["plan", "run.yaml", "--steps", "2", "--report", "plan.html"]) == 2
        shown = capsys.readouterr()
        assert shown.err == "megascale: the disk is full\n"
        assert shown.out.startswith("train: 2 steps")  # what was planned is not lost
        assert (folder / "plan.html").read_text() == "before"
        assert sorted(folder.iterdir()) == before

    def test_others_may_read_it_as_any_new_file(self, folder: Path) -> None:
        write_whole(folder / "new.html", "text")
        (folder / "plain").write_text("text")
        assert stat.S_IMODE(os.stat("new.html").st_mode) == stat.S_IMODE(os.stat("plain").st_mode)

    def test_names_that_are_no_text(self, folder: Path) -> None:
        write_whole(folder / "new.html", "a\udcffb")
        assert (folder / "new.html").read_text() == "a\\udcffb"


class TestCharts:
    @pytest.mark.parametrize(
        ("values", "form", "shown"),
        [
            ([0.0, 0.0], "", ["0.0", "1.0"]),
            ([3.0, 3.0], "", ["0", "3"]),
            ([0.1, 0.7], "%", ["0%", "80%"]),
            ([0.001, 0.0123], "%", ["0.00%", "1.25%"]),
            ([10.0, 123456.0], "", ["0", "125,000"]),
        ],
    )
    def test_axes(self, values: list[float], form: Any, shown: list[str]) -> None:
        svg = line_chart("k", "title", "text", [Line("a", values, 0)], form=form)
        numbers = re.findall(r'text-anchor="end">(.*?)<', svg)
        assert [numbers[0], numbers[-1]] == shown
        low, high = (float(number.strip("%").replace(",", "")) / (100 if form else 1) for number in shown)
        assert low <= min(values)
        assert max(values) <= high

    def test_a_base_other_than_zero(self) -> None:
        svg = line_chart("k", "title", "text", [Line("a", [1.0, 1.02], 0)], base=1.0)
        assert re.findall(r'text-anchor="end">(.*?)<', svg)[0] == "1.000"

    def test_everything_lies_inside(self) -> None:
        for svg in (
            line_chart("k", "t", "d", [Line("a", [5.0, -3.0, 17.3], 0)]),
            bar_chart("k", "t", "d", [Bar("a", 7), Bar("b", 0)]),
        ):
            for number in re.findall(r'\b(?:y|y1|y2|cy)="([\d.-]+)"', svg):
                assert 0 <= float(number) <= 260
            for points in re.findall(r'points="([^"]*)"', svg):
                assert all(0 <= height <= 260 for height in heights(points))

    def test_page_without_figures_of_rows(self, capsys: pytest.CaptureFixture[str]) -> None:
        found, _ = reported(capsys, "--steps", "2")
        page = Page(
            report_html(
                {**found, "padding": None, "lengths": None, "each_step": {**found["each_step"], "padding": None}}
            )
        )
        assert len(page.all("svg")) == 3
