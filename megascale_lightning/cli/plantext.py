"""The figures of a dry run in words and tables, for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

__all__ = ["Table", "balance_table", "facts", "source_table", "text_lines"]

Table = Sequence[Sequence[str]]
"""A line of headings, then the others; the first cell of each names it."""

_BALANCE: Final = (
    ("max/mean, dealt in turn", "max_over_mean_before"),
    ("max/mean, as planned", "max_over_mean"),
    ("max/lower bound, dealt in turn", "max_over_bound_before"),
    ("max/lower bound, as planned", "max_over_bound"),
)


def text_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Lines for a terminal."""
    yield headline(found)
    for name, text in facts(found):
        yield f"  {name:9} {text}"
        if name == "mixture":
            yield from _aligned(source_table(found))
        elif name == "balance":
            yield from _aligned(balance_table(found))


def headline(found: Mapping[str, Any]) -> str:
    """Which stream was planned, and for whom."""
    places = " x ".join(f"{axis} {size}" for axis, size in found["tree"].items() if size > 1) or "one rank"
    steps = f"{_number(found['steps'], 'step')} of {_number(found['rows_per_step'], 'row')}"
    return f"{found['stream']}: {steps}, for {places}"


def facts(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and text of what is no table; those named `mixture` and `balance` head one."""
    for note in found["notes"]:
        yield "note", note
    if found["ended"]:
        missing = found["steps"] < found["steps_asked"]
        asked = f", and {found['steps_asked']:,} were asked for" if missing else ""
        yield "end", f"the stream ends after {_number(found['steps'], 'step')}{asked}"
    if found["passes"] is not None:
        yield "passes", f"{found['passes']:,} completed"
    rows = f"{_number(found['microbatches'], 'microbatch')} of {_number(found['micro_batch_size'], 'row')}"
    yield "a step", f"{rows} on {'one data-parallel rank' if found['groups'] == 1 else f'each of {_ranks(found)}'}"
    for name in ("samples", "tokens"):
        of = found[name]
        yield name, f"{of['total']:,} in all, {of['mean']:,.1f} a step ({of['min']:,} to {of['max']:,})"
    yield "mixture", f"shares of the {found['unit']}" + (", by a schedule" if found["scheduled"] else "")
    if any(source["waiting"] for source in found["sources"]):
        waiting = sum(source["waiting"] for source in found["sources"])
        yield "waiting", f"{waiting:,} samples are drawn and come in the next steps"
    if found["padding"] is not None:
        of = found["padding"]
        rows = f", {of['filler_rows']:,} filler rows" if of["filler_rows"] else ""
        yield "padding", f"{of['share']:.2%} ({of['tokens']:,} of {of['slots']:,} tokens that rows have room for{rows})"
    yield "balance", f"of {_ranks(found)}, {found['strategy']}, costs by {found['cost']}"
    yield "speed-up", _speed_up(found)
    yield "planning", f"{found['planning_ms']:.2f} ms a step (median)"


def source_table(found: Mapping[str, Any]) -> Table:
    """A line for each source."""
    scheduled = found["scheduled"]
    dropped = any(source["dropped"] or source["truncated"] for source in found["sources"])
    lines = [
        ["source", "weight", "target", "given", "samples", "tokens", "epochs"]
        + (["target from, to"] if scheduled else [])
        + (["dropped"] if dropped else [])
    ]
    for source in found["sources"]:
        line = [source["name"], f"{source['weight']:g}", f"{source['target']:.2%}", f"{source['share']:.2%}"]
        line += [f"{source['samples']:,}", f"{source['tokens']:,}", _epochs(source)]
        if scheduled:
            line.append(f"{source['target_first']:.2%}, {source['target_last']:.2%}")
        if dropped:
            line.append(_dropped(source))
        lines.append(line)
    return lines


def balance_table(found: Mapping[str, Any]) -> Table:
    """A line for each measure."""
    of = found["balance"]
    return [["", "mean", "worst"]] + [
        [text, *(f"{of[key][way]:.3f}" for way in ("mean", "worst"))] for text, key in _BALANCE
    ]


def _epochs(source: Mapping[str, Any]) -> str:
    least = "" if source["epochs_are_exact"] else "at least "
    ended = source["ended_after"]
    return f"{least}{source['epochs']:.3f}" + ("" if ended is None else f", all given after {_number(ended, 'step')}")


def _dropped(source: Mapping[str, Any]) -> str:
    counts = dict(source["dropped"])
    texts = [f"{count:,} {reason}" for reason, count in counts.items()]
    if source["truncated"]:
        texts.append(f"({source['truncated']:,} truncated)")
    return ", ".join(texts) or "none"


def _ranks(found: Mapping[str, Any]) -> str:
    return _number(found["groups"], "data-parallel rank")


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def _speed_up(found: Mapping[str, Any]) -> str:
    if found["groups"] == 1:
        return "none: one data-parallel rank waits for nobody; --dp N or --tree dp=N,... plans for more"
    return f"{found['speed_up']:.3f} predicted: the slowest ranks' costs dealt in turn over those as planned"


def _aligned(table: Table) -> Iterator[str]:
    """Numbers to the right, the first and the last column of texts to the left."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for line in table:
        cells = [
            cell.ljust(width) if column == 0 or table[0][column] == "dropped" else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield f"    {'  '.join(cells)}".rstrip()
