from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeq.errors import UsageError
from edgeq.scheme import BLOCK_SIZES, WEIGHT_BITS, Format, IntegerType, Mode, Scheme
from edgeq.util.records import parse, plain
from edgeq.util.registry import METHODS

names = st.text(min_size=1, max_size=12)
name_tuples = st.lists(names, max_size=5).map(tuple)

schemes = st.builds(
    Scheme,
    mode=st.sampled_from(get_args(Mode)),
    format=st.sampled_from(get_args(Format)),
    activation_type=st.sampled_from(get_args(IntegerType)),
    weight_type=st.sampled_from(get_args(IntegerType)),
    activation_symmetric=st.booleans(),
    weight_symmetric=st.booleans(),
    per_channel=st.booleans(),
    reduce_range=st.booleans(),
    method=st.sampled_from(METHODS.names()),
    method_options=st.dictionaries(names, st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    op_types=st.none() | name_tuples,
    exclude=name_tuples,
    dynamic_weight_types=st.dictionaries(names, st.sampled_from(get_args(IntegerType)), max_size=3),
    stored_types=name_tuples,
    weight_bits=st.sampled_from(WEIGHT_BITS),
    block_size=st.sampled_from(BLOCK_SIZES),
    eight_bit=name_tuples,
    float_compute=st.none() | name_tuples,
    session_options=st.dictionaries(names, names, max_size=3),
)


@given(schemes)
def test_round_trip_through_json(scheme: Scheme) -> None:
    assert parse(json.loads(json.dumps(plain(scheme))), Scheme, "s") == scheme


@given(schemes)
def test_replace_with_nothing_changes_nothing(scheme: Scheme) -> None:
    assert scheme.replace() == scheme
    assert scheme.replace(method=None, per_channel=None) == scheme


@given(name_tuples)
def test_order_and_repetition_of_names_do_not_matter(nodes: tuple[str, ...]) -> None:
    assert Scheme(exclude=nodes) == Scheme(exclude=tuple(reversed(nodes)) + nodes)


def test_profiles_and_records_written_before_a_field_existed_are_read() -> None:
    record = plain(Scheme())
    for field in ("stored_types", "weight_bits", "block_size", "eight_bit", "float_compute"):
        del record[field]
    assert parse(record, Scheme, "s") == Scheme()


@pytest.mark.parametrize(("field", "value"), [("weight_bits", 3), ("block_size", 100), ("mode", "weights")])
def test_values_of_the_weight_only_mode(field: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"scheme {field} is {value!r}"):
        Scheme(**{field: value})


def test_replace_keeps_false() -> None:
    assert Scheme(per_channel=True).replace(per_channel=False).per_channel is False


def test_pair() -> None:
    assert Scheme().pair == "U8S8"
    assert Scheme(activation_type="int8").pair == "S8S8"
    assert Scheme(weight_type="uint8").pair == "U8U8"


def test_mappings_cannot_be_changed_afterwards() -> None:
    options = {"percentile": 99.9}
    scheme = Scheme(method="percentile", method_options=options)
    options["percentile"] = 1.0
    assert scheme.method_options["percentile"] == 99.9
    with pytest.raises(TypeError):
        scheme.method_options["percentile"] = 1.0  # type: ignore[index]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mode", "sometimes"),
        ("format", "qdq"),
        ("activation_type", "int4"),
        ("weight_type", "float8"),
        ("method", "kl"),
        ("dynamic_weight_types", {"MatMul": "int16"}),
    ],
)
def test_a_bad_value_is_named_with_what_it_can_be(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=field) as caught:
        Scheme(**{field: value})
    assert caught.value.fix.startswith(("It can be", "Known: "))


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(UsageError, match="per_chanel") as caught:
        parse({"per_chanel": True}, Scheme, "s", UsageError, unknown_keys=False)
    assert "per_channel" in caught.value.fix
