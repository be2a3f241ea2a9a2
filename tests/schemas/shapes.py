"""Hypothesis strategies for any msgspec struct, from its own type information."""

from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect


def messages(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Return a strategy for valid instances of a struct."""
    return _strategy(inspect.type_info(cls))


def _strategy(info: Any) -> st.SearchStrategy[Any]:
    match info:
        case inspect.StructType():
            fields = {field.name: _strategy(field.type) for field in info.fields}
            return st.builds(info.cls, **fields)
        case inspect.UnionType():
            return st.one_of([_strategy(one) for one in info.types])
        case inspect.VarTupleType():
            return st.lists(_strategy(info.item_type), min_size=info.min_length or 0, max_size=4).map(tuple)
        case inspect.TupleType():
            return st.tuples(*[_strategy(one) for one in info.item_types])
        case inspect.DictType():
            return st.dictionaries(_strategy(info.key_type), _strategy(info.value_type), max_size=3)
        case inspect.LiteralType():
            return st.sampled_from(info.values)
        case _:
            return _scalar(info)


def _scalar(info: Any) -> st.SearchStrategy[Any]:
    match info:
        case inspect.IntType():
            low, high = _bounds(info)
            return st.integers(low if low is not None else -(2**63), high if high is not None else 2**63 - 1)
        case inspect.FloatType():
            low, high = info.ge if info.ge is not None else info.gt, info.le if info.le is not None else info.lt
            return st.floats(low, high, allow_nan=False, allow_infinity=False, exclude_min=info.gt is not None)
        case inspect.StrType():
            return st.text(min_size=info.min_length or 0, max_size=min(info.max_length or 20, 20))
        case inspect.BytesType():
            return st.binary(max_size=20)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.RawType():
            return st.just(msgspec.Raw(b'{"any":[1,null]}'))
    raise NotImplementedError(f"no strategy for {info}")


def _bounds(info: inspect.IntType) -> tuple[int | None, int | None]:
    low = info.ge if info.ge is not None else None if info.gt is None else info.gt + 1
    high = info.le if info.le is not None else None if info.lt is None else info.lt - 1
    return low, high
