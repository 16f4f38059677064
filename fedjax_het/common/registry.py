"""What can be named: the package's own records and those that users add, side by side."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from fedjax_het.common.errors import require, require_name


class Record(Protocol):
    """What every registry holds: something with a name and one line about it."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...


R = TypeVar("R", bound=Record)
LONGEST_NAME = 100  # names of files are made of them


class Registry(Mapping[str, R], Generic[R]):
    """Records by name, the package's own first, then users' in the order in which they were added.

        NETWORKS = Registry("network", (mlp.NETWORK, convnet.NETWORK), argument="model")
        NETWORKS["mlp"]                KeyError for an unknown name, as of any mapping
        NETWORKS.require("mpl")        ConfigError: model = 'mpl' is unknown: did you mean 'mlp'?
        NETWORKS.add(Network(...))     what users' `register_network` calls

    kind: what a record is, in words: "network", "data set".
    argument: the setting that chooses among the names, for messages; `kind` unless given.

    What users add lasts as long as the process.
    """

    def __init__(self, kind: str, records: Iterable[R], *, argument: str | None = None):
        records = tuple(records)
        self.kind = kind
        self.argument = argument or kind
        self._records: dict[str, R] = {record.name: record for record in records}
        if len(self._records) < len(records):
            raise ValueError(f"two records of the registry of {kind}s have one name")
        self.built_in: frozenset[str] = frozenset(self._records)

    def __getitem__(self, name: str) -> R:
        return self._records[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"Registry({self.kind!r}: {', '.join(self)})"

    def require(self, name: str, *, argument: str | None = None) -> R:
        """The record of that name; ConfigError with the nearest names where there is none."""
        require_name(argument or self.argument, name, self)
        return self._records[name]

    def add(self, record: R) -> None:
        """Make a record of the user's own known, as long as this process lasts.

        A user's own name may be given again, as when a notebook's cell is run twice; the newest
        record counts. Results on disk are named by settings, names among them, and not by code:
        give what has changed a new name, or its results a new folder.

        Raises: ConfigError if the name is no identifier, or is one of the package's own.
        """
        name = record.name
        word = isinstance(name, str) and name.isidentifier() and len(name) <= LONGEST_NAME
        expected = f"letters, digits and underscores, at most {LONGEST_NAME}"
        require(word, "name", name, expected)
        require(
            name not in self.built_in, "name", name, f"one that no {self.kind} of the package has"
        )
        self._records[name] = record

    def reset(self) -> None:
        """Forget what users added."""
        for name in self._records.keys() - self.built_in:
            del self._records[name]
