"""Extension of griffe for docstrings and defaults of the API pages.

It renders the section "Example:" of docstrings as code of Python, because griffe knows this section
by the name "Examples:" only. Fields of dataclasses have their defaults without their metadata.
"""

import re
from typing import Any

import griffe


class DocstringExamples(griffe.Extension):
    """Rename the sections "Example:" before griffe parses the docstrings."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the sections in the docstring of a module, a class, a function or an attribute."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Replace `field(default=None, metadata=...)` by `None`."""
        if match := re.fullmatch(r"field\(default=(.*?), metadata=.*\)", str(attr.value)):
            attr.value = match[1]
