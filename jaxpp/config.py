"""Frozen dataclasses <-> YAML <-> command line, strict in every direction.

A run is one YAML file plus dotted overrides (`train.num_steps=20`). The dataclasses lie beside what
they configure; this module only reads, checks, builds and writes them. jsonargparse types the
scalars; the walk over the keys is here, so that every message names the whole dotted key, what was
given, what was needed and the nearest fix.

Field types understood: int, float, bool, str, `Literal`, `Path`, `Any`, dataclasses,
`tuple[T, ...]`, `tuple[T, U]`, `dict[str, T]`, and unions of these (`str | None`).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

_NEEDED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    type(None): "null",
}
_NOT_SET = object()


def read(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read one YAML file and lay dotted overrides over it.

    Args:
        path: The YAML file; its top level is a mapping of sections.
        overrides: `a.b=c`, `--a.b=c`, or the two words `--a.b` and `c`. Values are YAML; a list
            or a mapping replaces what the file holds as a whole.

    Returns:
        The nested mapping, unchecked; `build` checks it.

    Raises:
        ValueError: The file is missing, is not YAML, is not a mapping or repeats a key, or an
            override has no value or passes through a value that is no section.
    """
    values = parse(_text_of(Path(path)), str(path))
    if not isinstance(values, dict):
        held = "nothing" if values is None else _show(values)
        raise ValueError(f"{path} holds {held}: a mapping is needed, such as `section: {{key: 1}}`")
    for key, value in _split_overrides(overrides):
        _lay_over(values, key, value)
    return values


def build(
    cls: type[T],
    values: Mapping[str, Any],
    *,
    at: str = "",
    given: Mapping[str, object] | None = None,
) -> T:
    """Build a (nested) dataclass from plain values, refusing what it does not know.

    Args:
        cls: The dataclass to build.
        values: Plain values by field name, as `read` returns them.
        at: Dotted name of the section that `values` is, for the messages.
        given: Fields that are built already (the model's config, whose class is chosen elsewhere);
            what `values` holds under these names is not looked at.

    Returns:
        An instance of `cls`; fields that `values` lacks have their defaults.

    Raises:
        ValueError: An unknown key at any depth, a missing one, a value of another type, or
            whatever a `__post_init__` refuses, with the name of its section in front.
    """
    given = given or {}
    if not isinstance(values, Mapping):
        raise ValueError(f"{at or cls.__name__} = {_show(values)}: a mapping is needed")
    hints = _fields(cls)
    for key in values:
        if key not in hints and key not in given:
            raise ValueError(_unknown(cls, str(key), at))
    present = {**values, **given}
    missing = [
        f'"{_dotted(at, field.name)}" ({_needed(hints[field.name])})'
        for field in dataclasses.fields(cast(Any, cls))
        if field.name in hints.keys() - present.keys() and field.default is field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}: give it in the file or as key=value")
    fields = {
        name: given[name] if name in given else _convert(hints[name], value, _dotted(at, name))
        for name, value in present.items()
    }
    try:
        return cls(**fields)
    except ValueError as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{at}: {message}" if at and not message.startswith(at) else message) from error


def to_dict(obj: Any) -> dict[str, Any]:
    """Turn a dataclass into plain values that YAML can hold: mappings, lists, scalars."""
    return {name: _plain(getattr(obj, name), name) for name in _fields(type(obj))}


def dump(obj: Any) -> str:
    """Write a dataclass (or its `to_dict`) as YAML in the order of its fields; `read` and `build` give it back."""
    import yaml

    values = dict(obj) if isinstance(obj, Mapping) else to_dict(obj)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)


def keys(cls: type) -> list[str]:
    """List the dotted names of all settings of a dataclass, nested ones in place."""
    names = []
    for name, hint in _fields(cls).items():
        nested = [member for member in _members(hint) if dataclasses.is_dataclass(member)]
        names += [f"{name}.{key}" for key in keys(cast(type, nested[0]))] if nested else [name]
    return names


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Say line by line how two resolved configs differ: `train.num_steps: 10 -> 20`."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    pairs = {key: (before.get(key, _NOT_SET), after.get(key, _NOT_SET)) for key in {**before, **after}}
    return [f"{key}: {_show(a)} -> {_show(b)}" for key, (a, b) in pairs.items() if a != b]


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: a YAML file in UTF-8 is needed") from error
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such file{_nearest_file(path)}") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): give a YAML file") from error


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; the directory {path.parent} does not exist either"
    names = sorted(file.name for file in path.parent.iterdir() if file.is_file())
    if near := difflib.get_close_matches(path.name, names, n=1):
        return f': did you mean "{path.parent / near[0]}"?'
    found = [name for name in names if name.endswith((".yaml", ".yml"))]
    return f"; {path.parent} holds {', '.join(found[:10]) or 'no YAML file'}"


def parse(text: str, source: str) -> Any:
    """Parse YAML text, strictly: a repeated key is an error.

    Args:
        text: The YAML.
        source: Its name, for the message.

    Raises:
        ValueError: It is not YAML.
    """
    import yaml

    try:
        return yaml.load(text, _strict_loader())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ValueError(f"{source}{where}: not YAML: {' '.join(problem.split())}") from error


@functools.cache
def _strict_loader() -> Any:
    """Make YAML's safe loader refuse a repeated key, of which it would keep the last in silence."""
    import yaml

    class StrictLoader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            marks = {}
            for key, _ in node.value:
                if key.value in marks and key.value != "<<":
                    twice = f'the key "{key.value}" is there twice, keep one'
                    raise yaml.MarkedYAMLError(problem=twice, problem_mark=key.start_mark)
                marks[str(key.value)] = key.start_mark
            return super().construct_mapping(node, deep)

    return StrictLoader


def _split_overrides(overrides: Sequence[str]) -> Iterator[tuple[str, Any]]:
    words = list(overrides)
    while words:
        word = words.pop(0)
        key, equals, text = word.partition("=")
        if not equals and word.startswith("--") and words and not words[0].startswith("--"):
            text = words.pop(0)
        key = key.removeprefix("--")
        if not all(key.split(".")) or not text.strip():
            raise ValueError(f'override "{word}" has no key or no value: write {key or "a.b"}=1')
        yield key, parse(text, f'override "{word}"')


def _lay_over(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for depth, section in enumerate(sections, start=1):
        if values.get(section) is None:
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            holder = ".".join(sections[:depth])
            raise ValueError(
                f'override "{key}": {holder} = {_show(values)} is no section: replace all of it, {holder}=...'
            )
    values[last] = value


def _convert(hint: Any, value: Any, at: str) -> Any:
    """Give `value` the type `hint`, or say what the dotted key `at` needs instead."""
    members = _members(hint)
    if value is None and type(None) in members:
        return None
    for member in members:
        origin, inner = get_origin(member), get_args(member)
        if dataclasses.is_dataclass(member) and isinstance(value, Mapping | None):
            return build(cast(type, member), value or {}, at=at)
        if origin is dict and isinstance(value, Mapping):
            return {str(k): _convert(inner[1], v, _dotted(at, str(k))) for k, v in value.items()}
        if origin is tuple and isinstance(value, list | tuple):
            inner = inner[:1] * len(value) if inner[1:] == (...,) else inner
            if len(inner) == len(value):
                pairs = enumerate(zip(inner, value, strict=True))
                return tuple(_convert(item, part, f"{at}[{i}]") for i, (item, part) in pairs)
    scalars = tuple(member for member in members if not _is_structure(member))
    if Any in scalars:
        return value
    # Text stays text where text is allowed: the word "null" in quotes is not null.
    if isinstance(value, str) and str in scalars and float not in scalars:
        return value
    try:
        if value is None or not scalars:
            raise ValueError
        return _parser(scalars).parse_object({"value": value}).value
    except Exception as error:  # argparse's, jsonargparse's and the types' own have no common base
        raise ValueError(_mismatch(hint, value, at)) from error


@functools.cache
def _parser(members: tuple[Any, ...]) -> Any:
    import jsonargparse

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=Union[members])  # noqa: UP007 (made at run time)
    return parser


def _plain(value: Any, at: str) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{at}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, at) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, bool | int | float | str | None):
        return value
    raise ValueError(f"{at} = {value!r}: YAML holds only numbers, text, lists and mappings")


@functools.cache
def _fields(cls: type) -> dict[str, Any]:
    """Field name -> type, of the fields that the constructor takes."""
    hints = get_type_hints(cls)
    fields = dataclasses.fields(cast(Any, cls))
    return {field.name: hints[field.name] for field in fields if field.init}


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_structure(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or get_origin(hint) in (tuple, dict)


def _leaves(values: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, _dotted(at, key))
        else:
            yield _dotted(at, key), list(value) if isinstance(value, tuple) else value


def _dotted(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _unknown(cls: type, key: str, at: str) -> str:
    known = list(_fields(cls))
    near = difflib.get_close_matches(key, known, n=1)
    if not near:  # the right word in the wrong section
        near = [name for name in keys(cls) if name.rpartition(".")[2] == key][:1]
    fix = f': did you mean "{_dotted(at, near[0])}"? ' if near else "; "
    section = f"known keys of {at}" if at else "known keys"
    return f'unknown key "{_dotted(at, key)}"{fix}{section}: {", ".join(known)}'


def _mismatch(hint: Any, value: Any, at: str) -> str:
    literals = [member for member in _members(hint) if get_origin(member) is Literal]
    choices = [str(choice) for literal in literals for choice in get_args(literal)]
    near = difflib.get_close_matches(str(value), choices, n=1)
    fix = f'; did you mean "{near[0]}"?' if near else ""
    if str in _members(hint) and isinstance(value, bool | int | float):
        fix = "; put it in quotes"
    return f"{at} = {_show(value)}: {_needed(hint)} is needed{fix}"


def _needed(hint: Any) -> str:
    members, inner = _members(hint), get_args(hint)
    if len(members) > 1:
        return " or ".join(_needed(member) for member in members)
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if get_origin(hint) is tuple:
        return f"a list ({', '.join(_needed(item) if item is not ... else '...' for item in inner)})"
    if _is_structure(hint):
        return "a mapping"
    return _NEEDED.get(hint, getattr(hint, "__name__", str(hint)))


def _show(value: Any) -> str:
    if value is _NOT_SET:
        return "(not set)"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = " ".join((f'"{value}"' if isinstance(value, str) else repr(value)).split())
    return text if len(text) <= 100 else f"{text[:97]}..."
