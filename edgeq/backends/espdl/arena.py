"""Forecast the memory that the runtime plans for the activations of a graph, by the rules of its greedy planner.

The planner goes through the nodes in order. It frees tensors that no later node reads, and puts each new tensor into
the smallest free chunk that holds it, at multiples of 16 bytes. Operators that change a tensor in place get no memory
of their own. Source: espressif/esp-dl 3.3.9, dl_memory_manager_greedy.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from edgeq.backends.espdl.network import EspGraph, EspNode, EspTensor

ALIGNMENT = 16
# Operators that write their result over an input ("changes"), or give its memory another shape ("keeps").
_CHANGES = frozenset({"Add", "Clip", "LUT", "QuantizeLinear", "DequantizeLinear", "Relu", "RequantizeLinear"})
_KEEPS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})


@dataclass(frozen=True)
class EspMemory:
    """Describe the memory of a model on a chip, in bytes. The activations are in internal RAM as far as they fit.

    Attributes:
        arena: the activations.
        weights: constants, which the runtime copies to RAM unless `param_copy` is off.
        file: the .espdl file in flash.
    """

    arena: int
    weights: int
    file: int

    @property
    def note(self) -> str:
        """Return one sentence."""
        return (
            f"forecast: {_kib(self.arena)} KiB of RAM for activations, {_kib(self.weights)} KiB for a copy of the "
            f"weights (none with param_copy = false), {_kib(self.file)} KiB of flash"
        )


def _kib(size: int) -> str:
    return f"{-(-size // 1024):,}"


def memory_of(graph: EspGraph, file: int) -> EspMemory:
    """Return the memory of a graph whose file has `file` bytes."""
    constants = (tensor for tensor in graph.tensors() if tensor.values is not None)
    return EspMemory(arena_bytes(graph), sum(_aligned(tensor.bytes) for tensor in constants), file)


@dataclass
class _Life:
    """Hold when a tensor is in memory: from the node `begin` up to, not including, the node `end` (None: forever)."""

    tensor: EspTensor
    begin: int
    end: int | None = None
    leader: _Life | None = None
    dirty: _Life | None = None
    clean: _Life | None = None

    def extend(self, end: int | None) -> None:
        """Lengthen the life of the tensor whose memory this one uses."""
        if self.leader is not None:
            self.leader.extend(end)
        else:
            # Without a reader, as an output of the model, the tensor stays until the end.
            self.end = end if end is None or self.end is None else max(self.end, end)


@dataclass
class _Chunk:
    offset: int
    size: int
    owner: _Life | None = None


@dataclass
class _ChunkList:
    """Hold the chunks of memory in the order of their offsets, and the free ones in the order of their sizes."""

    chunks: list[_Chunk] = field(default_factory=list)

    def free(self, life: _Life) -> None:
        """Free the chunk of a tensor, and join it with free neighbours."""
        place = next((i for i, chunk in enumerate(self.chunks) if chunk.owner is life), None)
        if place is None:
            return
        self.chunks[place].owner = None
        for first in (place, place - 1):
            if 0 <= first < len(self.chunks) - 1 and not self.chunks[first].owner and not self.chunks[first + 1].owner:
                self.chunks[first].size += self.chunks.pop(first + 1).size

    def take(self, life: _Life) -> None:
        """Give a tensor the smallest free chunk that holds it, or extend the memory."""
        size = _aligned(life.tensor.bytes)
        fitting = [chunk for chunk in self.chunks if chunk.owner is None and chunk.size >= life.tensor.bytes]
        if fitting:
            chunk = min(fitting, key=lambda chunk: chunk.size)
            if chunk.size > size:
                self.chunks.insert(self.chunks.index(chunk) + 1, _Chunk(chunk.offset + size, chunk.size - size))
                chunk.size = size
        elif self.chunks and self.chunks[-1].owner is None:
            chunk = self.chunks[-1]
            chunk.size = size
        else:
            chunk = _Chunk(self.total, size)
            self.chunks.append(chunk)
        chunk.owner = life

    @property
    def total(self) -> int:
        """Return the end of the last chunk."""
        return self.chunks[-1].offset + self.chunks[-1].size if self.chunks else 0


def arena_bytes(graph: EspGraph) -> int:
    """Return the size of the memory for all activations of a graph, in bytes."""
    lives = [life for life in _lives(graph) if life.leader is None]
    memory = _ChunkList()
    for step in range(len(graph.nodes)):
        for life in lives:
            if life.end == step:
                memory.free(life)
        for life in lives:
            if life.begin == step:
                memory.take(life)
    return memory.total


def _lives(graph: EspGraph) -> list[_Life]:
    outputs = {port.tensor for port in graph.outputs}
    lives = {port.tensor: _Life(port.tensor, 0) for port in graph.inputs}
    for step, node in enumerate(graph.nodes):
        sources = [lives[tensor] for tensor in node.data if tensor in lives]
        for life in sources:
            # Another reader would see the changed values, so the change in place is undone.
            if life.dirty is not None:
                life.dirty.leader = None
                life.dirty = None
            if life.tensor not in outputs:
                life.extend(step + 1)
        for tensor in node.outputs:
            lives[tensor] = _Life(tensor, step)
        _share(node, sources, lives[node.outputs[0]], outputs)
    return list(lives.values())


def _share(node: EspNode, sources: list[_Life], life: _Life, outputs: set[EspTensor]) -> None:
    """Give the result of a node the memory of one of its inputs, if the operator allows it."""
    if node.kind not in _CHANGES | _KEEPS:
        return
    fitting = (s for s in sources if s.tensor.bytes >= life.tensor.bytes and s.tensor not in outputs)
    leader = next(fitting, None)
    if leader is None:
        return
    if node.kind in _KEEPS:
        life.leader, leader.clean = leader, life
    elif leader.clean is None:
        life.leader, leader.dirty = leader, life
    # Only the readers of the result tell how long the memory is used from here on.
    life.extend(None)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
