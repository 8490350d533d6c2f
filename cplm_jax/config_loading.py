"""From YAML files and command-line flags to a checked :class:`~cplm_jax.config.Config`, and back."""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from cplm_jax.config import Config
from cplm_jax.config_checks import check_combinations
from cplm_jax.errors import UserError, nearest

_ADAPTER = TypeAdapter(Config)


@dataclasses.dataclass(frozen=True)
class FieldInfo:
    """A leaf or an optional section of the configuration tree, for help and error messages."""

    path: str
    type: Any
    default: Any
    description: str

    @property
    def is_list(self) -> bool:
        """Whether the field takes several values."""
        return typing.get_origin(_bare(self.type)) is list


def _bare(annotation: Any) -> Any:
    """Strips ``Annotated`` and ``None`` from a type."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _bare(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        return _bare(inner[0])
    return annotation


def _section(annotation: Any) -> Any | None:
    bare = _bare(annotation)
    return bare if dataclasses.is_dataclass(bare) else None


def _allows_none(annotation: Any) -> bool:
    if typing.get_origin(annotation) is typing.Annotated:
        return _allows_none(typing.get_args(annotation)[0])
    return type(None) in typing.get_args(annotation)


def fields(section: Any = Config, prefix: str = "") -> Iterator[FieldInfo]:
    """Yields every field of the tree below ``section``; a section that may be null comes first itself."""
    hints = typing.get_type_hints(section, include_extras=True)
    described = section.__pydantic_fields__
    for f in dataclasses.fields(section):
        path = prefix + f.name
        hint = hints[f.name]
        inner = _section(hint)
        default = described[f.name].get_default(call_default_factory=True)
        description = " ".join((described[f.name].description or "").split())
        if inner is None or _allows_none(hint):
            yield FieldInfo(path, hint, default, description)
        if inner is not None:
            yield from fields(inner, path + ".")


def sections(section: Any = Config, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields (path, docstring) of every section below ``section``."""
    hints = typing.get_type_hints(section, include_extras=True)
    for f in dataclasses.fields(section):
        inner = _section(hints[f.name])
        if inner is not None:
            yield prefix + f.name, inner.__doc__ or ""
            yield from sections(inner, prefix + f.name + ".")


FIELDS: dict[str, FieldInfo] = {f.path: f for f in fields()}
_SECTIONS: dict[str, str] = dict(sections())
_KEYS = [*FIELDS, *_SECTIONS]


def type_name(annotation: Any) -> str:
    """Returns a short name of a field's type, as ``--help`` and errors show it."""
    bare = _bare(annotation)
    if typing.get_origin(bare) is typing.Literal:
        name = "|".join(map(str, typing.get_args(bare)))
    elif typing.get_origin(bare) is list:
        name = "list of " + type_name(typing.get_args(bare)[0])
    elif dataclasses.is_dataclass(bare):
        name = "section"
    else:
        name = {int: "integer", float: "number", bool: "true|false", str: "text"}.get(bare, str(bare))
    return name + ("|null" if _allows_none(annotation) else "")


def _place(path: str, places: Mapping[str, str]) -> str:
    """Returns where the value at a configuration path, or the section around it, was set."""
    while path and path not in places:
        path = path.rpartition(".")[0]
    return places.get(path, "the configuration")


def _unknown_key(path: str, where: str) -> UserError:
    return UserError(
        f"{where}: unknown configuration key {path!r}{nearest(path, _KEYS)} (--help lists every key)"
    )


def _read_yaml(file: str, places: dict[str, str]) -> dict[str, Any]:
    """Reads one YAML file into a nested dict and records the line of every key in ``places``."""
    try:
        data = Path(file).read_bytes()
        text = data.decode("utf-8")
    except OSError as e:
        raise UserError(f"--config {file}: cannot read it: {e.strerror or e}") from e
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise UserError(f"{file}:{line}: not UTF-8 text ({e.reason}); save the file as UTF-8") from e
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        raise UserError(f"{file}:{line}: not valid YAML: {e.reason}") from e
    except yaml.MarkedYAMLError as e:
        line = e.problem_mark.line + 1 if e.problem_mark is not None else 1
        raise UserError(f"{file}:{line}: not valid YAML: {e.problem}") from e
    if root is None:
        return {}
    constructor = yaml.SafeLoader("")

    def construct(node: yaml.Node, prefix: str) -> Any:
        if not isinstance(node, yaml.MappingNode):
            if prefix == "":
                raise UserError(f"{file}:1: expected `key: value` lines at the top level of a configuration")
            try:
                return constructor.construct_object(node, deep=True)
            except (yaml.YAMLError, ValueError) as e:  # an unknown tag, or a date that does not exist
                line = node.start_mark.line + 1
                reason = getattr(e, "problem", None) or e
                raise UserError(f"{file}:{line}: {prefix}: not valid YAML: {reason}") from e
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            path = f"{prefix}.{key}" if prefix else key
            where = f"{file}:{key_node.start_mark.line + 1}"
            if key in result:
                raise UserError(f"{where}: {path!r} is given twice; remove one of them")
            if path not in FIELDS and path not in _SECTIONS:
                raise _unknown_key(path, where)
            places[path] = where
            result[key] = construct(value_node, path)
        return result

    return construct(root, "")


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = dict(value) if isinstance(value, Mapping) else value


def _flag_value(info: FieldInfo | None, values: list[str], flag: str) -> Any:
    """Turns a flag's words into a value; scalars stay text, which pydantic converts by the field's type."""
    if info is not None and info.is_list:
        if len(values) == 1 and values[0].startswith("["):
            try:
                return yaml.safe_load(values[0])
            except (yaml.YAMLError, ValueError) as e:
                raise UserError(f"{flag}: not a YAML list: {values[0]!r}") from e
        return values
    if len(values) != 1:
        raise UserError(f"{flag} takes one value, got {len(values)}: {' '.join(values)!r}")
    return None if values[0] in ("null", "none", "None", "~") else values[0]


def parse_flags(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any], dict[str, str]]:
    """Splits ``--config FILE`` and ``--section.field value`` flags.

    Returns the configuration files in order, the overrides as a nested dict, and the
    flag that set each path. Raises :class:`UserError` on an unknown flag.
    """
    files: list[str] = []
    overrides: dict[str, Any] = {}
    where: dict[str, str] = {}
    index = 0
    words = list(arguments)
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("--") or word == "--":
            raise UserError(f"unexpected argument {word!r}; options are written --section.field value")
        flag, equals, attached = word.partition("=")
        values = [attached] if equals else []
        if not equals:
            while index < len(words) and not words[index].startswith("--"):
                values.append(words[index])
                index += 1
        name = flag[2:]
        if name == "config":
            if not values:
                raise UserError("--config needs a YAML file")
            files += values
            continue
        if name not in FIELDS:
            if name in _SECTIONS:
                raise UserError(f"{flag} is a section; set its fields, as in --{_first_field(name)} VALUE")
            options = ["--" + key for key in [*FIELDS, "config", "help", "print_config"]]
            raise UserError(f"unknown option {flag!r}{nearest(flag, options)} (--help lists every option)")
        if not values:
            raise UserError(f"{flag} needs a value ({type_name(FIELDS[name].type)})")
        if _section(FIELDS[name].type) is not None and values not in (["null"], ["none"], ["None"], ["~"]):
            raise UserError(
                f"{flag} takes only null; set its fields instead, as in --{_first_field(name)} VALUE"
            )
        *parents, leaf = name.split(".")
        node = overrides
        for parent in parents:
            if not isinstance(node.get(parent), dict):
                node[parent] = {}
            node = node[parent]
        node[leaf] = _flag_value(FIELDS[name], values, flag)
        where[name] = flag
    return files, overrides, where


def _first_field(section: str) -> str:
    return next(path for path in FIELDS if path.startswith(section + "."))


def load_config(files: Sequence[str] = (), arguments: Sequence[str] = ()) -> Config:
    """Builds the configuration: flags override files, later files override earlier ones.

    Args:
      files: YAML files, read in order.
      arguments: command-line words, ``--config FILE`` and ``--section.field value``, in any order.

    Raises:
      UserError: on an unknown key, a value of the wrong type or out of range, or a combination
        of fields that cannot work; it names the file and line, or the flag.
    """
    flag_files, overrides, flag_where = parse_flags(arguments)
    places: dict[str, str] = {}
    merged: dict[str, Any] = {}
    for file in [*files, *flag_files]:
        _merge(merged, _read_yaml(file, places))
    _merge(merged, overrides)
    places.update(flag_where)
    config = _validate(merged, places)
    check_combinations(config)
    return config


def _validate(tree: dict[str, Any], places: Mapping[str, str]) -> Config:
    for path, info in FIELDS.items():
        value: Any = tree
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, bool) and _bare(info.type) in (int, float):  # pydantic would take it for 0 or 1
            raise _bad_value(path, value, "true and false are no numbers", places)
    try:
        return _ADAPTER.validate_python(tree)
    except ValidationError as e:
        error = e.errors()[0]
        parts = [str(p) for p in error["loc"] if isinstance(p, str)]
        path = ".".join(parts)
        while path and path not in FIELDS and path not in _SECTIONS:
            # pydantic appends names of union members to the location
            path = path.rpartition(".")[0]
        detail = error["msg"].removeprefix("Value error, ")
        raise _bad_value(path, error["input"], detail[0].lower() + detail[1:], places) from None


def _bad_value(path: str, value: Any, detail: str, places: Mapping[str, str]) -> UserError:
    expected = type_name(FIELDS[path].type) if path in FIELDS else "a section of `key: value` lines"
    where = _place(path, places)
    at = where if where == f"--{path}" else f"{where}: {path}"
    shown = _shown(value) if value is None or isinstance(value, bool) else repr(value)
    return UserError(f"{at}: got {shown}, expected {expected} ({detail})")


def to_dict(config: Config) -> dict[str, Any]:
    """Returns the configuration as plain nested dicts and lists."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """Returns YAML that :func:`load_config` turns back into an equal configuration."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, default_flow_style=False, allow_unicode=True)


def flatten(config: Config) -> dict[str, Any]:
    """Returns ``{"model.width": 128, ...}``; a section that is null appears under its own path."""

    def walk(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in node.items():
            if isinstance(value, Mapping):
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield prefix + key, value

    return dict(walk(to_dict(config), ""))


def differences(old: Config, new: Config, ignore: Sequence[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Returns ``{path: (old, new)}`` of the fields that differ, but for those at or below ``ignore``."""
    a, b = flatten(old), flatten(new)
    missing = "(absent)"
    return {
        path: (a.get(path, missing), b.get(path, missing))
        for path in sorted({*a, *b})
        if a.get(path, missing) != b.get(path, missing)
        and not any(path == i or path.startswith(i + ".") for i in ignore)
    }


def help_text() -> str:
    """Returns the description of every field, section by section, for ``--help``."""
    lines = []
    last = None
    for info in FIELDS.values():
        section = info.path.rpartition(".")[0]
        if section != last:
            title = _SECTIONS.get(section, Config.__doc__ or "").split("\n")[0]
            lines.append(f"\n{section or 'top level'}: {title}")
            last = section
        default = "section below" if dataclasses.is_dataclass(info.default) else _shown(info.default)
        lines.append(f"  --{info.path} ({type_name(info.type)}; default {default})")
        lines.append(f"      {info.description}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
