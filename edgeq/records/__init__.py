"""Records: values that are written to or read from JSON and TOML, and the only way in and out.

A record is a frozen dataclass of this package. `plain` turns one into what JSON holds, `parse` makes one from data that
may be untrusted, with msgspec, which checks every value against the annotations. There is no `to_dict` or `from_dict`
to write: the fields are the format. What JSON has and the dataclass has not is declared beside the fields:

    @dataclass(frozen=True)
    class Coverage:
        int8_macs: int
        nodes: tuple[NodeRun, ...] = field(metadata=NOT_WRITTEN)   # left out of the record
        seconds: float = field(metadata=written(digits=3))

        @computed                                                  # a property that is written too
        def share(self) -> float: ...

A class whose record has nothing in common with its fields may define `__record__()`, which gives the record in its
place; what is parsed must be its own record.
"""

from __future__ import annotations

from edgeq.records.fields import (
    NOT_WRITTEN,
    Amount,
    Count,
    Finite,
    NullIsInfinite,
    Positive,
    Share,
    computed,
    written,
)
from edgeq.records.read import (
    is_longer,
    is_toml,
    json_object,
    parse,
    read_json,
    read_toml,
    readable,
    salvage,
    toml_table,
)
from edgeq.records.write import fingerprint, plain, rounded

__all__ = [
    "NOT_WRITTEN",
    "Amount",
    "Count",
    "Finite",
    "NullIsInfinite",
    "Positive",
    "Share",
    "computed",
    "fingerprint",
    "is_longer",
    "is_toml",
    "json_object",
    "parse",
    "plain",
    "read_json",
    "read_toml",
    "readable",
    "rounded",
    "salvage",
    "toml_table",
    "written",
]
