"""Measure text recognition: the share of equal texts, and the error rates of characters (CER) and words (WER).

Both texts are normalized alike: Unicode NFKC, and runs of white space become one space, without any at the ends. Case
and punctuation count. A rate is the number of edits in all texts by the length of all labels, not a mean of ratios.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path

from edgeq_device.answers.answer import Answer

from edgeq.data.limits import read_text
from edgeq.data.sample import Sample
from edgeq.errors import DataError
from edgeq.measure.answer_metric import AnswerMetric, add_up, read_label
from edgeq.measure.answer_sums import Sums
from edgeq.measure.edit_distance import count_edits
from edgeq.measure.task import TaskKind


def normalize(text: str) -> str:
    """Return text in Unicode's form NFKC, with single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def read(answer: Answer, sample: Sample) -> Sums:
    """Return the edits and lengths of one text. The label is the text, or the path of a text file."""
    label = read_label(sample)
    target = normalize(read_text(label) if isinstance(label, Path) else str(label))
    text = normalize(answer.text or "")
    words, target_words = text.split(), target.split()
    return {
        "exact": float(text == target),
        "texts": 1.0,
        "edits": float(count_edits(text, target)),
        "characters": float(len(target)),
        "word_edits": float(count_edits(words, target_words)),
        "words": float(len(target_words)),
    }


def summarize(values: Sequence[Sums]) -> Mapping[str, float]:
    """Return "exact", "cer" and "wer"."""
    sums = add_up(values)
    if not sums["characters"]:
        raise DataError("all labels are empty texts", "Give the texts that the model should read")
    return {
        "exact": sums["exact"] / sums["texts"],
        "cer": sums["edits"] / sums["characters"],
        "wer": sums["word_edits"] / sums["words"],
    }


TASK = TaskKind(
    "text-recognition",
    "share of equal texts, CER and WER",
    lambda options: AnswerMetric("text-recognition", "exact", read, summarize, frozenset({"text"})),
    frozenset(),
)
