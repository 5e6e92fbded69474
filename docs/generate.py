"""Writes the generated tables of docs/: `python docs/generate.py`.

The tables stand between comments such as `<!-- keys: data -->` and `<!-- end -->`; the prose around them is written by
hand. Keys come from the pydantic classes of bigsgan/config and the docstrings of their fields, commands from their
parsers, and keys of DeepSpeed files from the table that they are checked against. `tests/unit/test_docs.py` fails where
a page and its tables differ.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import json
import re
import sys
import textwrap
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from bigsgan.commands import choosing
from bigsgan.config import NETWORKS
from bigsgan.config.deepspeed_keys import FILE, Rule
from bigsgan.config.deepspeed_keys import Section as DeepSpeedSection
from bigsgan.config.from_data import OrAuto, SizeOrAuto
from bigsgan.config.recipe import Recipe
from bigsgan.config.reconstruction import PerceptualNetwork
from bigsgan.config.sections import LARGEST_INT, Section
from bigsgan.images.size import Size

Row = tuple[str, ...]
DOCS = Path(__file__).parent
MARK = re.compile(r"<!-- (keys|options|deepspeed): (.+?) -->\n.*?<!-- end -->", re.DOTALL)

ANCHORS = {
    "generator": "generator-and-discriminator",
    "discriminator": "generator-and-discriminator",
    "optimizer": "optimizergenerator-and-optimizerdiscriminator",
    "engines": "enginesgenerator-and-enginesdiscriminator",
}
"""Headings of sections that are called otherwise."""

LIKE = {
    "biggan_deep": "biggan", "cat": "gat", "cyclegan": "pix2pix", "dcgan": "biggan", "dit": "gat", "dmd2": "dit",
    "ladd": "dmd2", "autoencoder": "pix2pix", "features": "gat", "package.module:function": "dit",
}  # fmt: skip
"""Families whose tables only name the keys that another family has alike."""

AS = {
    "bigsgan evaluate": "bigsgan sample", "bigsgan export": "bigsgan sample",
    "bigsgan data prepare": "bigsgan data encode", "bigsgan bench profile": "bigsgan bench train",
    "bigsgan bench comm": "bigsgan bench train",
}  # fmt: skip
"""Commands whose tables only name the options that another one has alike, which is `train` for all others."""

NAMES = {int: "integer", float: "number", str: "text", bool: "boolean", Size: "integer > 0, or a list of two"}
SIZE = f"integer 1 to {2**16:,}"  # is called "size", as the page says
SIGNS = (
    (annotated_types.Ge, "ge", ">="),
    (annotated_types.Gt, "gt", ">"),
    (annotated_types.Le, "le", "<="),
    (annotated_types.Lt, "lt", "<"),
)

PAGES = [str(path.relative_to(DOCS)) for path in sorted(DOCS.rglob("*.md")) if MARK.search(path.read_text())]


def main() -> int:
    """Write the pages again."""
    for page in PAGES:
        path = DOCS / page
        path.write_text(refreshed(path.read_text()))
        print(path)
    return 0


def refreshed(text: str) -> str:
    """A page with its tables as they should be.

    Raises:
        KeyError: A comment names a section or a command that does not exist, or another version, or one is missing.
    """
    found: dict[str, set[str]] = {kind: set() for kind in TABLES}

    def write(mark: re.Match[str]) -> str:
        kind, name = mark[1], mark[2]
        found[kind].add(name)
        return f"<!-- {kind}: {name} -->\n\n{TABLES[kind](name)}\n\n<!-- end -->"

    text = MARK.sub(write, text)
    files = {"file"} | {key for key, rule in FILE.keys.items() if not isinstance(rule, Rule)}
    for kind, names in (
        ("keys", set(sections())),
        ("options", set(commands())),
        ("deepspeed", files),
    ):
        missing = names - found[kind]
        if found[kind] and missing:
            raise KeyError(f"no table of {kind} for {', '.join(sorted(missing))}")
    return text


# Keys of a recipe.


@functools.cache
def sections() -> dict[str, list[tuple[str, type[Section]]]]:
    """What has a table of its own: its name, and the prefix of its keys with the class that has them."""
    found: dict[str, list[tuple[str, type[Section]]]] = {"recipe": [("", Recipe)]}
    for name, field in Recipe.model_fields.items():
        classes = sections_in(field.annotation)
        if name in ("generator", "discriminator"):
            for section in classes:
                family = section.model_fields["family"].default
                if family == "none":
                    continue  # it has no keys
                found.setdefault(f"family {family}", []).append((f"{name}.", section))
        elif classes and name in ("optimizer", "engines"):
            (section,) = {type_ for nested in classes for _, type_ in nested_sections(nested)}
            found[name] = [("", section), (f"{name}.", classes[0])]  # what both networks share, behind each's own
        elif classes:
            found[name] = [("", classes[0])]
    return found


def sections_in(annotation: Any) -> list[type[Section]]:
    """The classes of sections that a type names."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]


def nested_sections(section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    """The fields of a section that are sections themselves."""
    for name, field in section.model_fields.items():
        yield from ((name, nested) for nested in sections_in(field.annotation))


def keys_table(name: str) -> str:
    """The keys of a section with types, defaults and meaning."""
    rows = rows_of(name)
    if other := LIKE.get(name.removeprefix("family ")):
        others = rows_of(f"family {other}")
        alike = [row[0] for row in rows if row in others or (of_both(row[0]), *row[1:]) in others]
        rows = [row for row in rows if row[0] not in alike]
        rows.append((", ".join(alike), "", "", f"as of [`{other}`](#family-{other})"))
    return markdown(("key", "type", "default", "meaning"), rows)


def rows_of(name: str) -> list[Row]:
    """A row for each key of a section; keys of both networks have one."""
    rows = [row for prefix, section in sections()[name] for row in keys(section, prefix, is_top=name == "recipe")]
    return joined(rows) if len(sections()[name]) == 2 else rows


def keys(section: type[Section], prefix: str, is_top: bool = False) -> list[Row]:
    """A row for each key, with those of sections inside."""
    rows: list[Row] = []
    shown: dict[type[Section], str] = {}
    below: dict[str, list[str]] = {}  # links to sections with tables of their own, by default
    for name, field in section.model_fields.items():
        nested = sections_in(field.annotation)
        if name == "family" or (nested and name in NETWORKS and not is_top):
            continue
        default = default_of(field)
        if not nested or nested[0] is PerceptualNetwork:  # whose keys the objective has
            type_ = type_of(field.annotation, field.metadata).removesuffix(", or `null`" * (field.default is None))
            rows.append((f"`{prefix}{name}`", type_, default, meaning(section, name)))
        elif is_top:
            below.setdefault(default, []).append(f"[`{name}`](#{ANCHORS.get(name, name)})")
        elif nested[0] in shown:
            rows.append((f"`{prefix}{name}`", "section", default, f"the keys of `{shown[nested[0]]}`"))
        else:
            shown[nested[0]] = f"{prefix}{name}"
            is_list = get_origin(field.annotation) is list
            is_alone = not is_list and set(get_args(field.annotation) or nested) <= {nested[0], type(None)}
            type_ = "section" if is_alone else type_of(field.annotation)
            text = said(inspect.getdoc(nested[0]) or "") if is_alone else meaning(section, name)
            rows.append((f"`{prefix}{name}`", type_, default, text))
            rows += keys(nested[0], f"{prefix}{name}[]." if is_list else f"{prefix}{name}.")
    return rows + [(", ".join(links), "section", default, "below") for default, links in below.items()]


def joined(rows: list[Row]) -> list[Row]:
    """Rows that both networks have alike become one."""
    both = {(key.partition(".")[2], *rest) for key, *rest in rows if key.startswith("`generator.")}
    both &= {(key.partition(".")[2], *rest) for key, *rest in rows if key.startswith("`discriminator.")}
    found = []
    for key, *rest in rows:
        name = key.partition(".")[2]
        if (name, *rest) not in both:
            found.append((key, *rest))
        elif key.startswith("`generator."):
            found.append((of_both(key), *rest))
    return found


def of_both(key: str) -> str:
    """A key of one network as that of both."""
    return re.sub(r"^`\w+\.", "`<network>.", key)


def default_of(field: FieldInfo) -> str:
    """As YAML has it."""
    if field.is_required() or isinstance(field.default, Section):
        return "required" if field.is_required() else "its defaults"
    default = field.default.value if isinstance(field.default, Size) else field.default
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def type_of(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """A type in words, with its range."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        rules = [rule for entry in more for rule in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
        return type_of(inner, [*metadata, *rules])
    if origin in (Union, types.UnionType):
        parts = [type_of(part, metadata) for part in get_args(annotation) if part is not type(None)]
        return ", ".join([*parts, "or `null`"]) if type(None) in get_args(annotation) else " or ".join(parts)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if origin is list:
        one = type_of(get_args(annotation)[0])
        several = re.sub(r"\b(integer|number|section|size|list)\b", r"\1s", one)
        return f"list of {several}" + limits([rule for rule in metadata if isinstance(rule, OrAuto)])
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    if origin is dict:
        return "mapping"
    found = re.sub(r"^integer (>=?) (\d+), <=", between, NAMES[annotation] + limits(metadata))
    return f"size{found.removeprefix(SIZE)}" if found.startswith(SIZE) else found


def between(limits: re.Match[str]) -> str:
    """An integer's limits as its ends."""
    return f"integer {int(limits[2]) + (limits[1] == '>')} to"


def limits(metadata: list[Any] | tuple[Any, ...]) -> str:
    """The limits of a number in words."""
    found = []
    for rule in metadata:
        for kind, key, sign in SIGNS:
            if isinstance(rule, kind) and (value := getattr(rule, key)) != LARGEST_INT:
                found.append(f" {sign} {value:,}" if isinstance(value, int) else f" {sign} {value}")
    text = ",".join(found) + ", or `auto`" * any(isinstance(rule, OrAuto) for rule in metadata)
    return text + ", or `auto` and a number" * any(isinstance(rule, SizeOrAuto) for rule in metadata)


def meaning(section: type[Section], name: str) -> str:
    """The docstring of a field, from the class that has it."""
    for owner in section.__mro__:
        if issubclass(owner, Section) and name in owner.__annotations__:
            text = field_docs(owner).get(name)
            if text is not None:
                return said(text)
    raise KeyError(f"{section.__name__}.{name} has no docstring")


@functools.cache
def field_docs(section: type[Section]) -> dict[str, str]:
    """The texts below the fields of a class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                found[name] = doc
    return found


def said(text: str) -> str:
    """A docstring as a cell of a table; a paper with a number on arXiv goes by that."""
    text = " ".join(text.split()).replace("``", "`").removesuffix(".")
    text = re.sub(r"\b(?:van|[A-Z])[\w .,-]* \d{4}, (?=arXiv)", "", text)
    return cell(text[0].upper() + text[1:])


def cell(text: str) -> str:
    """Text without what would end a table's cell, or begin a tag."""
    return text.replace("|", r"\|")


# Commands.


@functools.cache
def commands() -> dict[str, tuple[argparse.ArgumentParser, str]]:
    """Every command with options of its own: its parser, and its line of help."""
    return dict(walk(choosing._parser(), ""))


def walk(parser: argparse.ArgumentParser, text: str) -> Iterator[tuple[str, tuple[argparse.ArgumentParser, str]]]:
    """A parser, or the parsers of the commands below it."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield parser.prog, (parser, text)
    for group in groups:
        texts = {choice.dest: choice.help or "" for choice in group._choices_actions}
        for name, command in group.choices.items():
            yield from walk(command, texts[name])


def options_table(name: str) -> str:
    """What a command does, and its options; those that another command has alike are only named."""
    parser, text = commands()[name]
    rows = option_rows(name)
    shown = f"{text[0].upper()}{text[1:].replace('%%', '%')}.\n\n"
    required = [option(action) for action in parser._actions if action.required and action.nargs != "*"]
    if required:
        shown += f"```sh\n{' '.join([name, *required])}\n```\n\n"
    other = AS.get(name, "bigsgan train")
    alike = [row for row in rows if row in option_rows(other)] if name != other else []
    if alike:
        link = f"[as of `{other.removeprefix('bigsgan ')}`](#{other.replace(' ', '-')})"
        named = (
            "options of a recipe"
            if other == "bigsgan train"
            else ", ".join(f"`{row[0].split()[0].strip('`,')}`" for row in alike)
        )
        rows = [(named, link), *(row for row in rows if row not in alike)]
    return shown + (markdown(("option", "meaning"), rows) if rows else "It has no options.")


def option_rows(name: str) -> list[Row]:
    """The options of a command with their meaning."""
    actions = commands()[name][0]._actions
    hidden = [each for each in actions if each.help == argparse.SUPPRESS or isinstance(each, argparse._HelpAction)]
    return [(f"`{option(each)}`", helped(each)) for each in actions if each not in hidden]


def option(action: argparse.Action) -> str:
    """An option with its value, or an argument, as a user writes it."""
    if not action.option_strings:
        return str(action.metavar or action.dest)
    name = ", ".join(action.option_strings)
    if action.nargs == 0:
        return name
    choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices and not action.metavar else ""
    return f"{name} {choices or action.metavar or action.option_strings[0].strip('-').upper().replace('-', '_')}"


def helped(action: argparse.Action) -> str:
    """An option's help as a cell of a table."""
    return cell((action.help or f"default {action.default}").replace("%%", "%"))


# DeepSpeed files.


def deepspeed_table(name: str) -> str:
    """The keys of a section of a DeepSpeed file, with those of sections inside; ``file`` has those of no section."""
    if name == "file":
        rules = {key: rule for key, rule in FILE.keys.items() if isinstance(rule, Rule)}
    else:
        section = FILE.keys[name]
        assert isinstance(section, DeepSpeedSection)
        rules = dict(rules_in(section, ""))
    alike: dict[str, list[str]] = {}
    for key, rule in rules.items():
        alike.setdefault(cell(allowed(rule)) or "see above", []).append(f"`{key}`")
    return markdown(("keys", "must be"), [(", ".join(names), text) for text, names in alike.items()])


def allowed(rule: Rule) -> str:
    """The values of a key, with the reason if it has one."""
    return f"{rule.text} ({rule.detail})" if rule.detail else rule.text


def rules_in(section: DeepSpeedSection, prefix: str) -> Iterator[tuple[str, Rule]]:
    """Every key below a section."""
    for key, rule in section.keys.items():
        if isinstance(rule, Rule):
            yield prefix + key, rule
        else:
            yield from rules_in(rule, f"{prefix}{key}.")


def markdown(header: tuple[str, ...], rows: Sequence[Row]) -> str:
    """A table."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


TABLES = {
    "keys": keys_table,
    "options": options_table,
    "deepspeed": deepspeed_table,
}

if __name__ == "__main__":
    sys.exit(main())
