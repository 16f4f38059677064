"""What a compiled program launches, read from its text."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

# Operations that start nothing on a device, or only wait for what was started.
FREE = {
    "parameter",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "constant",
    "after-all",
    "partition-id",
    "replica-id",
    "add-dependency",
    "opt-barrier",
}
CONTROL = {"while", "conditional", "call"}  # what they start is counted in what they call
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+)[a-z\d]*\[([\d,]*)\]")
_CALLS = re.compile(r"(?:condition|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


class Operation(NamedTuple):
    """A line of a computation."""

    kind: str  # "fusion", "while", ...; "custom-call:TARGET"
    text: str

    @property
    def called(self) -> list[str]:
        """The computations that it runs through, if it is one of `CONTROL`."""
        if self.kind not in CONTROL:
            return []
        named = _CALLS.findall(self.text)
        for branches in _BRANCHES.findall(self.text):
            named += [name.strip().lstrip("%") for name in branches.split(",")]
        return named

    @property
    def launches(self) -> int:
        if self.kind in FREE or self.kind in CONTROL or self.kind.endswith("-done"):
            return 0
        return 1

    @property
    def bytes(self) -> int:
        """Of its results, on one device."""
        kind = self.text.split(" = ", 1)[1].split("(" if not self.is_tuple else ") ", 1)[0]
        return sum(map(_size, _SHAPE.findall(kind)))

    @property
    def is_tuple(self) -> bool:
        return self.text.split(" = ", 1)[1].startswith("(")


class Body(NamedTuple):
    """What a loop's iteration launches; of a branch, or a loop inside, see theirs."""

    name: str
    depth: int  # loops around it: 0 outside of all
    trips: int | None  # of its loop; None where they are read from the device
    launches: int
    conditionals: int
    collectives: dict[str, int]  # by kind
    collective_bytes: int  # their results, on one device
    kinds: dict[str, int]


def program_of(text: str) -> tuple[str, dict[str, list[Operation]]]:
    """-> (the entry's name, the operations of every computation by its name)."""
    found: dict[str, list[Operation]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = found.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and " = " in line:
            current.append(Operation(_kind(line), line.strip()))
    return entry, found


def bodies_of(text: str) -> list[Body]:
    """The entry, and every loop's body, outer ones first; a conditional counts as its longest
    branch."""
    entry, found = program_of(text)
    return list(_bodies(found, entry, 0, None, set()))


def grouped_convolutions(text: str) -> int:
    """Convolutions of several groups: lanes as the backend's own convolution has them."""
    groups = re.findall(r"feature_group_count=(\d+)", text) + re.findall(
        r"batch_group_count=(\d+)", text
    )
    return sum(int(number) > 1 for number in groups)


def _bodies(
    found: dict[str, list[Operation]], name: str, depth: int, trips: int | None, seen: set[str]
) -> Iterator[Body]:
    if name in seen:
        return
    seen.add(name)
    here = list(_inside(found, name))
    kinds = Counter(operation.kind for operation in here if operation.launches)
    exchanged = [
        (kind, operation) for operation in here if (kind := _collective(operation.kind)) is not None
    ]
    yield Body(
        name,
        depth,
        trips,
        _launches(found, name),
        sum(operation.kind == "conditional" for operation in here),
        dict(Counter(kind for kind, _ in exchanged)),
        sum(operation.bytes for _, operation in exchanged),
        dict(kinds.most_common()),
    )
    for operation in here:
        if operation.kind == "while":
            known = re.search(r"known_trip_count\W+n\W+(\d+)", operation.text)
            body = re.search(r"body=%?([\w.\-]+)", operation.text)
            assert body is not None
            inner = int(known[1]) if known else None
            yield from _bodies(found, body[1], depth + 1, inner, seen)


def _inside(found: dict[str, list[Operation]], name: str) -> Iterator[Operation]:
    """A computation's operations with those of its branches and calls, but not of its loops."""
    for operation in found.get(name, ()):
        yield operation
        if operation.kind != "while":
            for called in operation.called:
                yield from _inside(found, called)


def _launches(found: dict[str, list[Operation]], name: str) -> int:
    total = 0
    for operation in found.get(name, ()):
        total += operation.launches
        if operation.kind == "conditional":
            total += max((_launches(found, branch) for branch in operation.called), default=0)
        elif operation.kind == "call":
            total += sum(_launches(found, called) for called in operation.called)
    return total


def _collective(kind: str) -> str | None:
    if kind.endswith("-done"):
        return None
    return next((name for name in COLLECTIVES if kind.startswith(name)), None)


def _kind(line: str) -> str:
    value = line.split(" = ", 1)[1]
    if value.startswith("("):  # of a tuple's type, which may hold brackets
        depth = 0
        for i, letter in enumerate(value):
            depth += (letter == "(") - (letter == ")")
            if depth == 0:
                value = value[i + 1 :].strip()
                break
    else:
        value = value.split(" ", 1)[1]
    name = re.match(r"[a-z0-9\-]+", value)
    kind = name[0] if name else "?"
    if kind == "custom-call":
        target = re.search(r'custom_call_target="([^"]+)"', line)
        return f"custom-call:{target[1] if target else '?'}"
    if kind == "fusion" and (special := re.search(r'"kind":"(__[^"]+)"', line)):
        return f"fusion:{special[1].strip('_')}"
    return kind


def _size(shape: tuple[str, str]) -> int:
    """Bytes of an array's type as the text has it."""
    kind, sides = shape
    size = 1
    for side in filter(None, sides.split(",")):
        size *= int(side)
    bits = 8 if kind == "pred" else int(re.sub(r"\D", "", kind))
    return size * bits // 8


def graphs_of(thunks: str) -> dict[str, Any]:
    """Of XLA's list of what a program starts: graphs, and what the host still starts and reads.

    whole: whether all of it is one graph; host_reads: loops and branches outside of graphs, whose
    conditions the host waits for.
    """
    graphs, reads, outside = 0, 0, 0
    inside: int | None = None  # how far the graph's own line is indented
    for line in thunks.splitlines():
        found = re.match(r"^(\s*)\d+: (k\w+)", line)
        if found is None:
            continue
        depth, kind = len(found[1]), found[2]
        if inside is not None and depth > inside:
            continue
        inside = None
        if kind == "kCommandBuffer":
            graphs, inside = graphs + 1, depth
        else:
            outside += 1
            reads += kind in ("kWhile", "kConditional")
    return {"graphs": graphs, "whole": graphs == 1 and outside == 0, "host_reads": reads}
