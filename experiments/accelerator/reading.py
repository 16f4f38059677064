"""Parse the kernel launches of a compiled program from its text."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

# Operations that start nothing on a device, or only wait for started operations.
NON_LAUNCHING_OPS = {
    *("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all"),
    *("partition-id", "replica-id", "add-dependency", "opt-barrier"),
}
CONTROL_FLOW_OPS = {"while", "conditional", "call"}  # counted in the called programs
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+)[a-z\d]*\[([\d,]*)\]")
_CALLS = re.compile(r"(?:condition|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


class HloOperation(NamedTuple):
    """An operation, a line of a computation."""

    kind: str  # "fusion", "while", ...; "custom-call:TARGET"
    text: str

    @property
    def called_computations(self) -> list[str]:
        """Computations that the operation runs, if it is control flow."""
        if self.kind not in CONTROL_FLOW_OPS:
            return []
        computations = _CALLS.findall(self.text)
        for branches in _BRANCHES.findall(self.text):
            computations += [name.strip().lstrip("%") for name in branches.split(",")]
        return computations

    @property
    def num_launches(self) -> int:
        """Number of kernels that the operation starts itself, 0 or 1."""
        is_silent = self.kind in NON_LAUNCHING_OPS | CONTROL_FLOW_OPS
        return 0 if is_silent or self.kind.endswith("-done") else 1

    @property
    def result_bytes(self) -> int:
        """Bytes of the results on one device."""
        kind = self.text.split(" = ", 1)[1].split("(" if not self.is_tuple else ") ", 1)[0]
        return sum(map(_type_bytes, _SHAPE.findall(kind)))

    @property
    def is_tuple(self) -> bool:
        """Whether the result is a tuple."""
        return self.text.split(" = ", 1)[1].startswith("(")


class LoopBody(NamedTuple):
    """Launches of one iteration of a loop, without branches and inner loops.

    Attributes:
      name: name of the computation.
      depth: number of loops around it; 0: outside of all loops.
      trips: number of iterations; None: read from the device.
      launches: number of kernels.
      conditionals: number of conditionals.
      collectives: number of collectives by kind.
      collective_bytes: bytes of the results of collectives on one device.
      kinds: number of launches by kind.
    """

    name: str
    depth: int
    trips: int | None
    launches: int
    conditionals: int
    collectives: dict[str, int]
    collective_bytes: int
    kinds: dict[str, int]


def parse_computations(text: str) -> tuple[str, dict[str, list[HloOperation]]]:
    """Parse the text of a compiled program.

    Args:
      text: the text in XLA's HLO format.

    Returns:
      `(entry, computations)`: the name of the entry, and the operations of every computation by
      name.
    """
    computations: dict[str, list[HloOperation]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if header_match := _HEAD.match(line):
            current = computations.setdefault(header_match[2], [])
            entry = header_match[2] if header_match[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and " = " in line:
            current.append(HloOperation(_operation_kind(line), line.strip()))
    return entry, computations


def parse_loop_bodies(text: str) -> list[LoopBody]:
    """Parse the entry and all loop bodies of a program, outer ones first.

    A conditional counts as its longest branch.
    """
    entry, computations = parse_computations(text)
    return list(_iterate_bodies(computations, entry, 0, None, set()))


def count_grouped_convolutions(text: str) -> int:
    """Count convolutions of several groups, which native convolutions of lanes become."""
    group_counts = re.findall(r"(?:feature|batch)_group_count=(\d+)", text)
    return sum(int(number) > 1 for number in group_counts)


def _iterate_bodies(
    computations: dict[str, list[HloOperation]],
    name: str,
    depth: int,
    trips: int | None,
    visited: set[str],
) -> Iterator[LoopBody]:
    if name in visited:
        return
    visited.add(name)
    operations = list(_iterate_operations(computations, name))
    kinds = Counter(operation.kind for operation in operations if operation.num_launches)
    collectives = [(kind, op) for op in operations if (kind := _collective_kind(op.kind))]
    yield LoopBody(
        name,
        depth,
        trips,
        _count_launches(computations, name),
        sum(operation.kind == "conditional" for operation in operations),
        dict(Counter(kind for kind, _ in collectives)),
        sum(operation.result_bytes for _, operation in collectives),
        dict(kinds.most_common()),
    )
    for operation in operations:
        if operation.kind == "while":
            trip_count_match = re.search(r"known_trip_count\W+n\W+(\d+)", operation.text)
            body = re.search(r"body=%?([\w.\-]+)", operation.text)
            assert body is not None
            inner_trips = int(trip_count_match[1]) if trip_count_match else None
            yield from _iterate_bodies(computations, body[1], depth + 1, inner_trips, visited)


def _iterate_operations(
    computations: dict[str, list[HloOperation]], name: str
) -> Iterator[HloOperation]:
    """Yield the operations of a computation, its branches and calls, without its loops."""
    for operation in computations.get(name, ()):
        yield operation
        if operation.kind != "while":
            for callee in operation.called_computations:
                yield from _iterate_operations(computations, callee)


def _count_launches(computations: dict[str, list[HloOperation]], name: str) -> int:
    total = 0
    for operation in computations.get(name, ()):
        total += operation.num_launches
        if operation.kind in ("conditional", "call"):
            called = operation.called_computations
            counts = [_count_launches(computations, callee) for callee in called]
            total += sum(counts) if operation.kind == "call" else max(counts, default=0)
    return total


def _collective_kind(kind: str) -> str | None:
    if kind.endswith("-done"):
        return None
    return next((name for name in COLLECTIVES if kind.startswith(name)), None)


def _operation_kind(line: str) -> str:
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


def _type_bytes(shape: tuple[str, str]) -> int:
    """Return the bytes of an array type."""
    kind, dimensions = shape
    size = 1
    for dimension in filter(None, dimensions.split(",")):
        size *= int(dimension)
    bits = 8 if kind == "pred" else int(re.sub(r"\D", "", kind))
    return size * bits // 8


def parse_command_buffers(thunks: str) -> dict[str, Any]:
    """Count the graphs in XLA's list of thunks, and the reads of the host outside of graphs.

    Args:
      thunks: the list as XLA dumps it.

    Returns:
      `graphs`, their number; `whole`, whether the program is one graph; and `host_reads`, the
      number of loops and branches outside of graphs, whose conditions the host waits for.
    """
    graphs, host_reads, num_outside = 0, 0, 0
    graph_indent: int | None = None  # how far the graph's own line is indented
    for line in thunks.splitlines():
        match = re.match(r"^(\s*)\d+: (k\w+)", line)
        if match is None:
            continue
        depth, kind = len(match[1]), match[2]
        if graph_indent is not None and depth > graph_indent:
            continue
        graph_indent = None
        if kind == "kCommandBuffer":
            graphs, graph_indent = graphs + 1, depth
        else:
            num_outside += 1
            host_reads += kind in ("kWhile", "kConditional")
    return {"graphs": graphs, "whole": graphs == 1 and num_outside == 0, "host_reads": host_reads}
