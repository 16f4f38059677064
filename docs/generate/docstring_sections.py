"""Extension of griffe that renders sections of docstrings.

griffe knows the section "Example:" by the name "Examples:" only. Documented fields of a class
become its section "Attributes:", a list, instead of an entry with a signature for each field.
"""

import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import griffe


class DocstringSections(griffe.Extension):
    """Change the docstrings before griffe parses them."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the sections in the docstring of a module, a class, a function or an attribute."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Move the documentation of fields to the docstrings of their classes."""
        classes = [cls for cls in iter_classes(pkg) if cls.docstring is not None]
        fields = [list_documented_fields(cls) for cls in classes]
        for cls, members in zip(classes, fields, strict=True):
            if cls.name == "RunSpec":  # its docstring at run time has the valid numbers, too
                text = inspect.getdoc(pkgutil.resolve_name(cls.path)) or ""
                text = re.sub(r"\n {4}(?=\S)", " ", text)  # a line may not start with ">"
                cls.docstring.value = text.replace("\nExample:\n", "\nExamples:\n")
            elif "\nAttributes:\n" not in cls.docstring.value and members:
                insert_attributes(cls.docstring, members)
        for member in [member for members in fields for member in members]:
            member.docstring = None  # which hides the entry


def iter_classes(module: griffe.Module) -> Iterator[griffe.Class]:
    """Yield the classes of a module and of its submodules."""
    for member in module.members.values():
        if not member.is_alias and member.is_class:
            yield member
        elif not member.is_alias and member.is_module:
            yield from iter_classes(member)


def list_documented_fields(cls: griffe.Class) -> list[griffe.Attribute]:
    """Return the public attributes whose documentation is one paragraph, inherited ones first."""
    members = {**cls.inherited_members, **cls.members}
    return [
        member.final_target if member.is_alias else member
        for name, member in members.items()
        if member.is_attribute and name[0] != "_" and member.docstring is not None
        if "\n\n" not in member.docstring.value
    ]


def insert_attributes(docstring: griffe.Docstring, members: list[griffe.Attribute]) -> None:
    """Insert the section "Attributes:" before the examples of a docstring."""
    lines = ["Attributes:"]
    for member in members:
        lines.append(f"  {member.name}: {' '.join(member.docstring.value.split())}")
    summary, heading, examples = docstring.value.partition("\nExamples:\n")
    text = "\n".join(lines)
    docstring.value = f"{summary.rstrip()}\n\n{text}\n{heading}{examples}"
