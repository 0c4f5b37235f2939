"""Outputs that appear whole or not at all: written beside their place, then renamed into it."""

from edgeq.atomic.leftovers import interrupted
from edgeq.atomic.lock import alone_in
from edgeq.atomic.outputs import (
    Kind,
    check_apart,
    check_free,
    check_outside,
    is_full,
    output_directory,
    output_file,
    recover,
    work_folder,
)

__all__ = [
    "Kind",
    "alone_in",
    "check_apart",
    "check_free",
    "check_outside",
    "interrupted",
    "is_full",
    "output_directory",
    "output_file",
    "recover",
    "work_folder",
]
