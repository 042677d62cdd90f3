"""`check_table`: refuses what was decoded of broken bytes, and leaves text that is no UTF-8 to its record."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from megascale_lightning.sources.formats.arrowcolumns import with_inner_types

__all__ = ["check_table"]


def check_table(table: pa.Table) -> None:
    """Check that no offset or index leads out of a table's memory.

    Of text that is no UTF-8 it says nothing: it breaks no other record, and fails where its own becomes python.

    Raises:
        pa.ArrowException: It does, or the table cannot be checked.
    """
    table.validate()
    for column in table.columns:
        for chunk in column.chunks:
            array: Any = chunk
            try:
                array.validate(full=True)
            except pa.ArrowInvalid:
                array.view(_with_bytes(array.type)).validate(full=True)


def _with_bytes(kind: Any) -> Any:
    """The type of the same layout that has bytes for text."""
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_string_view(kind):
        return pa.binary_view()
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _with_bytes(kind.value_type), kind.ordered)
    return with_inner_types(kind, _with_bytes)
