"""Name arguments in texts, which Python functions, the command line and records share but word differently.

A text of edgeq writes an argument as ⟨max_drop⟩, with the name that Python functions use. A value follows outside, as
in "⟨format⟩ QDQ". A switch contains its value, as in ⟨timed=False⟩. `as_options` makes command-line options of these
marks, and `as_arguments` makes Python's arguments of them. Errors, results and notes of progress keep the marks until
somebody shows them, so that no code below the command line needs to know who does.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_LISTED = """
activation_symmetric activation_type against annotations batch bench block_compute budget bundle
class_offset classes confidence count cut_head data decoder draw dry_run effort eight_bit engine every_element exclude
expect fit_pairs fix force format generation gpu head help images install iou json key labels limits log max_drop
memory method min_speedup objective official on onnxruntime optimization output per_channel percentile pin preprocess
raw recover reduce_range reference require_coverage require_signature rest resume scenario seed selftest skip
sources split start statistics strict stride symmetric sysroot target task task_output thorough threads threshold top
trust try_preprocess update val variant weight_only weight_type wheels why wide with_float workers
"""
_NAMES = frozenset(_LISTED.split())
"""Arguments whose option is their name with hyphens. Other text in ⟨⟩ is somebody's name for a file or a tensor."""

_IRREGULAR = {
    "duration_s": "duration",
    "effort=None": "as-is",
    "emulate=False": "no-emulate",
    "latency_bound_ms": "latency-bound",
    "method_options": "method-option",
    "min_sqnr_db": "min-sqnr",
    "mode='dynamic'": "dynamic",
    "op_types": "op-type",
    "session_options": "session-option",
    "shapes": "shape",
    "target_qps": "qps",
    "tensors": "tensor",
    "timed=False": "no-timing",
}
"""Argument, or argument with its value → option, where the option has another name."""

_SWITCHES = frozenset({"force", "resume", "strict", "thorough", "update", "with_float"})
"""Arguments that an option without a value sets to True."""

# A space or punctuation stands next to a mark. In paths and identifiers, ⟨⟩ are characters of somebody's name.
_MARK = re.compile(r"(?<![\w/\\⟨⟩])⟨([a-z][a-z0-9_]*(?:=[\w']+)?)⟩(?![\w/\\⟨⟩])")
_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")


def as_options(text: str) -> str:
    """Return a text in which the command line's options replace the marks."""
    return _replaced(text, lambda argument, option: option) if _is_sentence(text) else text


def as_arguments(text: str) -> str:
    """Return a text in which Python's arguments replace the marks. In backticks, which enclose commands for a shell,
    options replace them.
    """
    if not _is_sentence(text):
        return text
    parts = [
        _replaced(part, (lambda argument, option: option) if i % 2 else (lambda argument, option: f"`{argument}`"))
        for i, part in enumerate(text.split("`"))
    ]
    return "`".join(parts)


def with_marks(text: str) -> str:
    """Return a text of the runner on devices, a command line of its own, with marks for the options that it names."""
    arguments = {f"--{option}": mark for mark, option in _IRREGULAR.items()}

    def mark(option: re.Match[str]) -> str:
        name = option[1].replace("-", "_")
        argument = arguments.get(option[0], f"{name}=True" if name in _SWITCHES else name)
        return f"⟨{argument}⟩" if _option_of(argument) == option[0] else option[0]

    return _OPTION.sub(mark, text)


def _is_sentence(text: str) -> bool:
    """Return whether a text may have marks. A name of one word has none, whatever it looks like. Most texts in records
    are such names.
    """
    return "⟨" in text and " " in text


def _replaced(text: str, word: Callable[[str, str], str]) -> str:
    """Return a text with `word(argument, option)` instead of each mark of a known argument."""

    def replacement(mark: re.Match[str]) -> str:
        option = _option_of(mark[1])
        return mark[0] if option is None else word(mark[1], option)

    return _MARK.sub(replacement, text)


def _option_of(argument: str) -> str | None:
    """Return the option for an argument or for an argument with its value, or None if edgeq has no such argument."""
    if argument in _IRREGULAR:
        return f"--{_IRREGULAR[argument]}"
    name, _, value = argument.partition("=")
    if name not in _NAMES or value not in ("", "True", "False"):
        return None
    return f"--{'no-' if value == 'False' else ''}{name.replace('_', '-')}"
