"""The report of a dry run: one HTML page that needs nothing beside itself, no script and no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

from megascale_lightning.cli.charts import Bar, Line, bar_chart, line_chart
from megascale_lightning.cli.plantext import Table, balance_table, facts, headline, source_table
from megascale_lightning.version import __version__

__all__ = ["report_html"]

_SHOWN_SOURCES: Final = 6
_STYLE: Final = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .25rem 0; color: #555; }
th, td { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid #ddd; vertical-align: top; }
th:first-child, th[scope=row], td.text { text-align: left; font-weight: 600; }
td.text { font-weight: 400; }
.wide { overflow-x: auto; }
figure { margin: 1rem 0; } figcaption { color: #555; } svg { width: 100%; height: auto; }
dt { float: left; clear: left; width: 7rem; color: #555; } dd { margin-left: 7.5rem; }
"""


def report_html(found: Mapping[str, Any]) -> str:
    """The page.

    Args:
        found: What `megascale plan --json` prints.
    """
    title = escape(f"megascale plan: {headline(found)}")
    body = "\n".join(_sections(found))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        # Names are escaped; with this, nothing could be loaded even if one were not.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"/>\n"
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _sections(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h1>{escape(headline(found))}</h1>"
    yield "<dl>"
    yield f"<dt>config</dt><dd>{escape(found['config'])}</dd>"
    for name, text in facts(found):
        yield f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>"
    yield "</dl>"
    yield "<h2>Mixture</h2>"
    yield from _table(source_table(found), f"Sources, by shares of the {found['unit']}")
    yield from _mixture_charts(found)
    yield "<h2>Balance</h2>"
    yield from _table(balance_table(found), "Costs of the data-parallel ranks, over the steps")
    yield from _balance_chart(found)
    yield "<h2>Rows</h2>"
    yield from _row_charts(found)
    yield f"<p>megascale_lightning {escape(__version__)}</p>"


def _table(table: Table, caption: str) -> Iterator[str]:
    yield f'<div class="wide"><table><caption>{escape(caption)}</caption>'
    heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table[0])
    yield f"<thead><tr>{heads}</tr></thead><tbody>"
    for name, *cells in table[1:]:
        data = "".join(
            f'<td class="text">{escape(cell)}</td>' if head == "dropped" else f"<td>{escape(cell)}</td>"
            for head, cell in zip(table[0][1:], cells, strict=True)
        )
        yield f'<tr><th scope="row">{escape(name)}</th>{data}</tr>'
    yield "</tbody></table></div>"


def _mixture_charts(found: Mapping[str, Any]) -> Iterator[str]:
    of, unit = found["each_step"], found["unit"]
    largest = sorted(found["sources"], key=lambda source: (-max(source["target"], source["share"]), source["name"]))
    names = [source["name"] for source in largest[:_SHOWN_SOURCES]]
    lines = []
    for color, name in enumerate(names):
        lines.append(Line(name, of["share"][name], color))
        lines.append(Line(f"{name}, target", of["target"][name], color, is_dashed=True))
    rest = len(found["sources"]) - len(names)
    more = f"; {rest} smaller sources are in the table only" if rest else ""
    yield line_chart(
        "share",
        f"Share of the {unit} of each step",
        f"Given, and dashed the target of the step{more}.",
        lines,
        form="%",
    )


def _balance_chart(found: Mapping[str, Any]) -> Iterator[str]:
    of = found["each_step"]
    yield line_chart(
        "balance",
        "Slowest rank over the mean, by step",
        f"max/mean of the costs of {found['groups']} data-parallel ranks; 1 is even.",
        [
            Line("dealt in turn", of["max_over_mean_before"], 1, is_dashed=True),
            Line("as planned", of["max_over_mean"], 0),
        ],
        base=1.0,
    )


def _row_charts(found: Mapping[str, Any]) -> Iterator[str]:
    of = found["each_step"]
    yield line_chart("tokens", "Tokens by step", "Over all ranks, padding apart.", [Line("tokens", of["tokens"], 0)])
    if of["padding"] is not None:
        yield line_chart(
            "padding",
            "Padding by step",
            "Share of the tokens that rows have room for.",
            [Line("padding", of["padding"], 1)],
            form="%",
        )
    if found["lengths"] is not None:
        bars = [
            Bar(f"{one['from']:,}" if one["from"] == one["to"] else f"{one['from']:,}-{one['to']:,}", one["count"])
            for one in found["lengths"]
        ]
        text = "Pieces in the rows by their tokens; a sample longer than a row counts as its pieces."
        yield bar_chart("lengths", "Lengths of documents", text, bars)
