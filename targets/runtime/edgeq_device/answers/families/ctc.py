"""Text by connectionist temporal classification (CTC): PP-OCR, CRNN, LPRNet, wav2vec2, NeMo.

    steps [1, T, C], [T, 1, C] or [1, C, T]: logits or probabilities of C symbols at T steps

The best symbol of each step is read; repeated symbols count once, and the blank separates (A. Graves et al.,
"Connectionist Temporal Classification", 2006). Parameters:

    layout: "TC" or "CT", the order of the axes without the one of size 1
    blank: number of the blank, or "last"
    space: a symbol that means a space, such as "|" of wav2vec2

The labels are the alphabet. If it has C symbols, they include the blank. If it has one less, the blank is not among
them. If it has two less, the last symbol is a space, as in PP-OCR. Symbols such as <unk> are not text.
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import numpy as np

from edgeq_device.answers.answer import Answer
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head

_BLANKS = ("<blank>", "<blk>", "<pad>", "[pad]", "[blank]", "<eps>", "blank")
# The mark of SentencePiece at the beginning of a word.
_WORD = "\u2581"


def decode(outputs: Outputs, head: Head, frame: Any) -> Answer:
    """Return the text, and the mean probability of its symbols."""
    del frame
    steps = read_steps(outputs[head.outputs["steps"]], head.parameters.get("layout", "TC"))
    blank = find_blank(head.parameters.get("blank", 0), steps.shape[1])
    best = steps.argmax(axis=1)
    starts = np.append(True, best[1:] != best[:-1]) & (best != blank)
    alphabet = list_symbols(head.labels, steps.shape[1], blank)
    text = "".join(_to_text(alphabet[number], head.parameters.get("space")) for number in best[starts])
    # Without an alphabet, the symbols are numbers.
    text = text.strip() if head.labels else " ".join(str(number) for number in best[starts])
    scores = steps if _sum_to_one(steps) else softmax(steps)
    sure = float(scores.max(axis=1)[starts].mean()) if starts.any() else None
    return Answer("text", text=text, confidence=sure)


def softmax(values: Any) -> Any:
    """Return probabilities along the last axis. Logarithms of probabilities become these probabilities."""
    exponents = np.exp(values - values.max(axis=-1, keepdims=True))
    return exponents / exponents.sum(axis=-1, keepdims=True)


def read_steps(array: Any, layout: Any) -> Any:
    """Return an output as float64 [T, C]."""
    if array.ndim != 3 or 1 not in array.shape[:2] or not array.size:
        raise ValueError("the steps are not [1, T, C], [T, 1, C] or [1, C, T]")
    values = np.asarray(array[0] if len(array) == 1 else array[:, 0], np.float64)
    if layout not in ("TC", "CT"):
        raise ValueError(f"the layout is {layout!r}")
    return values.T if layout == "CT" else values


def find_blank(blank: Any, count: int) -> int:
    """Return the number of the blank among `count` symbols."""
    number = count - 1 if blank == "last" else blank
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < count:
        raise ValueError(f"the blank is {blank!r}")
    return number


def list_symbols(labels: Sequence[str], count: int, blank: int) -> List[str]:
    """Return the symbol of each of `count` classes."""
    symbols = list(labels)
    if labels and len(symbols) < count:
        symbols += [" "] * (count - len(symbols) - 1)
        symbols.insert(blank, "")
    if labels and (len(symbols) != count or count - len(labels) > 2):
        raise ValueError(f"the alphabet has {len(labels)} symbols for {count} classes")
    return symbols or [""] * count


def _to_text(symbol: str, space: Any) -> str:
    if symbol == space:
        return " "
    special = len(symbol) > 2 and symbol[0] + symbol[-1] in ("<>", "[]")
    return "" if special else symbol.replace(_WORD, " ")


def _sum_to_one(steps: Any) -> bool:
    return bool(steps.min() >= 0 and np.abs(steps.sum(axis=1) - 1).max() < 1e-2)


def fit(view: View) -> Optional[Fit]:
    """Accept the only float output of rank 3 if the number of symbols is known to be that of one axis, and they are
    mostly single characters. If the family is named, accept any symbols.
    """
    arrays = [(name, a) for name, a in view.outputs.items() if a.ndim == 3 and a.dtype.kind == "f" and a.size]
    if len(arrays) != 1 or 1 not in arrays[0][1].shape[:2] or (view.classes is None and not view.named):
        return None
    ((name, array),) = arrays
    if not view.named and sum(len(label) == 1 for label in view.labels) * 2 < len(view.labels):
        return None
    layout = view.hints.get("layout") or _find_layout(array, view.classes)
    if layout not in ("TC", "CT"):
        return None
    steps = read_steps(array, layout)
    blank = view.hints.get("blank")
    blank = _search_blank(steps, view.labels) if blank is None else blank
    if blank is None and not view.named:
        return None
    # An alphabet with a blank and a bar but without a space is that of wav2vec2.
    bar = len(view.labels) == steps.shape[1] and "|" in view.labels and " " not in view.labels
    return Fit({"steps": name}, {"layout": layout, "blank": blank or 0, **({"space": "|"} if bar else {})})


def _find_layout(array: Any, classes: Optional[int]) -> Optional[str]:
    sides = (array.shape[1] if len(array) == 1 else len(array), array.shape[2])
    if classes is not None:
        fitting = [axis for axis in (1, 0) if sides[axis] - classes in (0, 1, 2)]
        return ("CT", "TC")[fitting[0]] if fitting else None
    # Without an alphabet, probabilities show the axis. Most exporters write symbols last.
    return "CT" if _sum_to_one(read_steps(array, "CT")) and not _sum_to_one(read_steps(array, "TC")) else "TC"


def _search_blank(steps: Any, labels: Sequence[str]) -> Any:
    """Return the number of the blank, "last", or None if nothing shows it."""
    count = steps.shape[1]
    if labels and len(labels) == count - 2:
        return 0
    names = [number for number, label in enumerate(labels) if label.lower() in _BLANKS]
    if len(labels) == count and names:
        return names[0]
    # The blank wins most steps. If neither end of the alphabet wins more than the other, the usual 0 is a guess.
    wins = np.bincount(steps.argmax(axis=1), minlength=count)
    if wins[0] == wins[-1]:
        return 0 if not wins[0] and len(labels) == count - 1 else None
    return 0 if wins[0] > wins[-1] else "last"


FAMILY = Family("ctc", "text", "steps [1, T, C], [T, 1, C] or [1, C, T]", fit, decode=decode)
