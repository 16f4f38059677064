"""What can be named: the package's own records and those that users add, side by side."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from fedjax_het.utils.errors import require, require_name


class RegistryEntry(Protocol):
    """What every registry holds: something with a name and one line about it."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...


EntryT = TypeVar("EntryT", bound=RegistryEntry)
MAX_NAME_LENGTH = 100  # names of files are made of them


class Registry(Mapping[str, EntryT], Generic[EntryT]):
    """Records by name, the package's own first, then users' in the order in which they were added.

        NETWORKS = Registry("network", (mlp.NETWORK, convnet.NETWORK), argument="model")
        NETWORKS["mlp"]                KeyError for an unknown name, as of any mapping
        NETWORKS.require("mpl")        ConfigError: model = 'mpl' is unknown: did you mean 'mlp'?
        NETWORKS.add(Network(...))     what users' `register_network` calls

    kind: what a record is, in words: "network", "data set".
    argument: the setting that chooses among the names, for messages; `kind` unless given.

    What users add lasts as long as the process.
    """

    def __init__(self, kind: str, entries: Iterable[EntryT], *, argument: str | None = None):
        entries = tuple(entries)
        self.kind = kind
        self.argument = argument or kind
        self._entries: dict[str, EntryT] = {entry.name: entry for entry in entries}
        if len(self._entries) < len(entries):
            raise ValueError(f"two records of the registry of {kind}s have one name")
        self.built_in: frozenset[str] = frozenset(self._entries)

    def __getitem__(self, name: str) -> EntryT:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Registry({self.kind!r}: {', '.join(self)})"

    def require(self, name: str, *, argument: str | None = None) -> EntryT:
        """The record of that name; ConfigError with the nearest names where there is none."""
        require_name(argument or self.argument, name, self)
        return self._entries[name]

    def add(self, entry: EntryT) -> None:
        """Make a record of the user's own known, as long as this process lasts.

        A user's own name may be given again, as when a notebook's cell is run twice; the newest
        record counts. Results on disk are named by settings, names among them, and not by code:
        give what has changed a new name, or its results a new folder.

        Raises: ConfigError if the name is no identifier, or is one of the package's own.
        """
        name = entry.name
        is_valid_name = (
            isinstance(name, str) and name.isidentifier() and len(name) <= MAX_NAME_LENGTH
        )
        expected = f"letters, digits and underscores, at most {MAX_NAME_LENGTH}"
        require(is_valid_name, "name", name, expected)
        require(
            name not in self.built_in, "name", name, f"one that no {self.kind} of the package has"
        )
        self._entries[name] = entry

    def reset(self) -> None:
        """Forget what users added."""
        for name in self._entries.keys() - self.built_in:
            del self._entries[name]
