"""Write the Python interface as text: public names, signatures, and the attributes of results."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import click

_COMPAT = """
CalTableFlatBuffers base_quantizer calibrate cuda_quantizer detector evaluators execution_providers.qnn
matmul_4bits_quantizer matmul_bnb4_quantizer matmul_nbits_quantizer mlperf onnx_model onnx_quantizer optimize
optimizer preprocess qdq_loss_debug qdq_quantizer quant_utils quantize readers registry run run_qdq_debug
shape_inference static_quantize_runner symbolic_shape_infer tensor_quant_overrides
"""
COMPAT = _COMPAT.split()
"""The modules of edgeq.compat that docs/migration.md and docs/migration-tools.md name."""

_HELPERS = "preprocessed write symbolic_options check_same run run_printed letterbox in_blocks line_of"
HELPERS = frozenset(_HELPERS.split())
"""What commands of edgeq.compat share with each other, and no page names."""
IMPORTED = frozenset({"TYPE_CHECKING", "Any", "annotations", "importlib"})


def signature_lines(name: str, thing: Any, indent: str = "") -> Iterator[str]:
    """Yield `name` with its parameters, one on each line. Defaults that are objects have no module and address."""
    try:
        signature = inspect.signature(thing)
    except ValueError:  # a class that is written in C has none
        yield f"{indent}{name}(...)"
        return
    yield f"{indent}{name}({'' if signature.parameters else ')'}"
    keyword = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword:
            yield f"{indent}    *,"
            keyword = True
        yield f"{indent}    {_short(parameter)},"
    annotation = signature.return_annotation
    if annotation not in (inspect.Signature.empty, None, "None"):
        yield f"{indent}    -> {annotation}"


def _short(parameter: inspect.Parameter) -> str:
    """Write a parameter. A default that is an object has no module and address."""
    text = re.sub(r" at 0x[0-9a-f]+|(?<=<)(function|class) ", "", str(parameter))
    return re.sub(r"<(?:[^<> ]*[.])?([^<> ]*)( object)?>", r"<\1>", text)


def described(name: str, thing: Any) -> Iterator[str]:
    """Yield the signature of a function or class and the public attributes of a class."""
    if not callable(thing):
        yield f"{name}: {type(thing).__name__}"
        return
    yield from signature_lines(name, thing)
    if isinstance(thing, type):
        yield from _attributes(thing)


def _attributes(made: type) -> Iterator[str]:
    own = {name for base in made.__mro__ if base.__module__.startswith("edgeq") for name in vars(base)}
    fields = {field.name for field in dataclasses.fields(made)} if dataclasses.is_dataclass(made) else set()
    for name in sorted(n for n in own | fields if not n.startswith("_")):
        held = inspect.getattr_static(made, name, None)
        if inspect.isfunction(held):
            yield from signature_lines(f".{name}", held, "    ")
        else:
            yield f"    .{name}"


def public_names() -> Iterator[str]:
    """Yield the description of each public name of `edgeq`."""
    edgeq = importlib.import_module("edgeq")
    for name in edgeq.__all__:
        yield from described(name, getattr(edgeq, name))


def results() -> Iterator[str]:
    """Yield the attributes of each edgeq class that a public function returns."""
    edgeq = importlib.import_module("edgeq")
    for name in edgeq.__all__:
        function = inspect.unwrap(getattr(edgeq, name))
        if inspect.ismodule(function):
            function = getattr(importlib.import_module(f"{function.__name__}.run"), name)
        if inspect.isfunction(function):
            made = _named(inspect.signature(function).return_annotation, function)
            if isinstance(made, type):
                yield f"{name} -> {made.__name__}"
                yield from _attributes(made)


def _named(annotation: str, function: Any) -> Any:
    """Return the object that a return annotation names, even if its module imports it only for type checkers."""
    if annotation in function.__globals__:
        return function.__globals__[annotation]
    for node in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(function) or function))):
        if isinstance(node, ast.ImportFrom) and node.module and annotation in [alias.name for alias in node.names]:
            return getattr(importlib.import_module(node.module), annotation)
    return None


def exit_codes() -> Iterator[str]:
    """Yield the classes of `edgeq.errors` with their bases and exit codes."""
    errors = importlib.import_module("edgeq.errors")
    for name, thing in sorted(vars(errors).items()):
        if isinstance(thing, type) and issubclass(thing, errors.EdgeqError):
            yield f"{thing.exit_code:3} {name}({thing.__bases__[0].__name__})"


def compat_names() -> Iterator[str]:
    """Yield the own names of `edgeq.compat` and its documented modules, and the options of their commands."""
    modules = {f"edgeq.compat.{name}" for name in COMPAT}
    seen: dict[int, str] = {}
    for path in ("edgeq.compat", *sorted(modules)):
        module = importlib.import_module(path)
        yield f"{path}:"
        names = getattr(module, "__all__", None) or [n for n, thing in vars(module).items() if _is_of(thing, modules)]
        offered = [n for n in dir(module) if path == "edgeq.compat" and (n in COMPAT or not _is_module(module, n))]
        listed = {*names, *offered} - HELPERS - IMPORTED
        for name in sorted(n for n in listed if not n.startswith("_")):
            thing = getattr(module, name)
            if id(thing) in seen:
                yield f"  {name}, that of {seen[id(thing)]}"
                continue
            seen[id(thing)] = path
            yield from ("  " + line for line in _ours(name, thing))


def _is_module(package: ModuleType, name: str) -> bool:
    """Return whether `name` is a module of the package. Modules that other tests imported are attributes too."""
    return f"{package.__name__}.{name}" in sys.modules


def _is_of(thing: Any, modules: set[str]) -> bool:
    return isinstance(thing, click.Command) or getattr(thing, "__module__", None) in modules


def _ours(name: str, thing: Any) -> Iterator[str]:
    """Yield the signature of an edgeq object, but only the name of an onnxruntime object, because versions differ."""
    if isinstance(thing, click.Command):
        yield from _options(name, [option for p in thing.params for option in (*p.opts, *p.secondary_opts)])
    elif inspect.ismodule(thing) or not str(getattr(thing, "__module__", "edgeq")).startswith("edgeq"):
        yield name
    elif name == "parser":
        made = thing() if callable(thing) else thing
        assert isinstance(made, argparse.ArgumentParser)
        yield from _options(name, [option for action in made._actions for option in action.option_strings])
    else:
        yield from described(name, thing)


def _options(name: str, options: list[str]) -> Iterator[str]:
    yield name
    yield from (f"    {option}" for option in sorted(options))
