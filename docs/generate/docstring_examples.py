"""Extension of griffe that renders the section "Example:" of docstrings as code of Python.

griffe knows this section by the name "Examples:" only.
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
