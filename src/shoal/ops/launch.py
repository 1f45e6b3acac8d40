"""Launches of Triton kernels that take little of the host's time.

A step is a dozen launches of twenty arguments each, and Triton looks at every one. Here the launches of a call are a
`Program`, made once for each kind of call: which kernels, with which arguments, of which few are *variables* that every
call fills anew. What a kernel takes, and what a call brings, are records: see arguments.py. The first call compiles the
kernels; from then on the native core launches all of them in one go.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import triton
from torch import Tensor

from shoal import _native
from shoal.errors import DeviceError
from shoal.ops.arguments import Kind, Record, Variable, flat, leaves
from shoal.torch_private import current_device, current_stream_handle

INTERPRETED = bool(triton.knobs.runtime.interpret)
_MOST_LAYOUTS = 32
_PIECE_BYTES = 256  # pieces of an allocation begin at multiples of it


def require(device: torch.device) -> None:
    """Raise DeviceError where kernels cannot run on this device."""
    if device.type != "cuda" and not INTERPRETED:
        raise DeviceError(
            f"[device] Triton kernels run on a GPU; got {device}. Set TRITON_INTERPRET=1 before the import to try them "
            f"on cpu, slowly."
        )


@dataclass(frozen=True)
class Launch:
    """One kernel: its grid, its arguments, its constants and options; grid and arguments may be variables.

    `arguments`: the kernel's record. REQUIRES: constants are the kernel's last parameters, and its numbers are not
    specialised on.
    """

    kernel: Any
    grid: tuple[int | Variable, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        declared = [name for name, _kind in leaves(type(self.arguments))]
        wanted = self.kernel.arg_names[: len(declared)]
        assert declared == wanted, f"{self.kernel.__name__} takes {wanted}; its record says {declared}"

    def named(self) -> Iterator[tuple[str, Kind, Any]]:
        """The name, kind and value of each argument, in order."""
        for (name, kind), value in zip(leaves(type(self.arguments)), flat(self.arguments), strict=True):
            yield name, kind, value


@dataclass(frozen=True)
class Fill:
    """All of a tensor's elements the same, -1 or 0; so many words of 32 bits."""

    tensor: Any  # a variable
    words: int | Variable
    value: int


@dataclass(frozen=True)
class Send:
    """A tensor's copy to pinned memory of the host, and after it an event. Both are variables."""

    to: Any
    tensor: Tensor
    event: Any


class Pieces:
    """How the tensors of a record lie in one allocation: `lengths` is that record, with lengths in place of tensors."""

    __slots__ = ("begins", "bytes", "pieces", "places")

    def __init__(self, lengths: tuple[Any, ...]) -> None:
        named = zip(leaves(type(lengths)), flat(lengths), strict=True)
        self.pieces = [(kind.dtype, n) for (_name, kind), n in named]
        self.places = {name: place for place, (name, _kind) in enumerate(leaves(type(lengths)))}
        self.begins = []
        at = 0
        for dtype, n in self.pieces:
            self.begins.append(at)
            at += -(-dtype.itemsize * n // _PIECE_BYTES) * _PIECE_BYTES
        self.bytes = at


class Space:
    """Several tensors in one allocation."""

    __slots__ = ("buffer", "layout")

    def __init__(self, buffer: Tensor, layout: Pieces) -> None:
        self.buffer = buffer
        self.layout = layout

    @classmethod
    def of(cls, layout: Pieces, device: torch.device) -> "Space":
        """A new allocation."""
        return cls(torch.empty(layout.bytes, dtype=torch.uint8, device=device), layout)

    def as_(self, _record: type[Record]) -> Record:
        """This, in the place of that record in a call."""
        return cast(Record, self)

    def addresses(self) -> list[int]:
        """Where each piece begins."""
        at = self.buffer.data_ptr()
        return [at + begin for begin in self.layout.begins]

    def tensor(self, name: str) -> Tensor:
        """A piece as a tensor."""
        return self._piece(self.layout.places[name])

    def tensors(self) -> list[Tensor]:
        """Each piece as a tensor."""
        return [self._piece(place) for place in range(len(self.layout.pieces))]

    def _piece(self, place: int) -> Tensor:
        begin, (dtype, n) = self.layout.begins[place], self.layout.pieces[place]
        return self.buffer[begin : begin + dtype.itemsize * n].view(dtype)


class Scratch:
    """Memory for what lives no longer than a call, kept from one to the next. For one caller and stream at a time."""

    def __init__(self, device: torch.device) -> None:
        self._kept = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, layout: Pieces) -> Space:
        """Tensors with whatever is in them."""
        if self._kept.numel() < layout.bytes:
            wanted = layout.bytes + layout.bytes // 4
            self._kept = torch.empty(wanted, dtype=torch.uint8, device=self._kept.device)
        return Space(self._kept, layout)

    def forget(self) -> None:
        """Take other memory for the next call, which is on another stream."""
        self._kept = self._kept[:0].clone()


class Program:
    """Launches in order. Each call gives the values of the variables.

    `alone`: calls come one at a time, so the driver can keep the launches, which costs far less than handing them over.
    """

    def __init__(self, launches: Sequence[Launch | Fill | Send], alone: bool = False) -> None:
        self._launches = launches
        self._alone = alone
        self._native: Any = None
        self._folded: list[tuple[int, Callable[[Any], list[Any]]]] = []

    def run(self, call: tuple[Any, ...]) -> None:
        """Launch all on the current stream, with the values of the program's record. A Space stands for its pieces."""
        if self._native is None:
            self._run_first(call)
            return
        values = list(call)
        for at, unfold in self._folded:
            values[at : at + 1] = unfold(values[at])
        self._native.run(current_stream_handle(current_device()), values)

    def _run_first(self, call: tuple[Any, ...]) -> None:
        values: list[Any] = []
        for value in flat(call):
            values += value.tensors() if isinstance(value, Space) else [value]

        def given(argument: Any) -> Any:
            if not isinstance(argument, Variable):
                return argument
            value: Any = values[argument.place]
            return value[argument.first :] if argument.first else value

        compiled: list[Any] = []
        complete = True
        for launch in self._launches:
            if isinstance(launch, Fill):
                if given(launch.words):
                    given(launch.tensor).view(torch.int32)[: given(launch.words)].fill_(launch.value)
                compiled.append(None)
                continue
            if isinstance(launch, Send):
                given(launch.to).copy_(launch.tensor, non_blocking=True)
                if launch.tensor.is_cuda:
                    given(launch.event).record()
                compiled.append(None)
                continue
            grid = tuple(given(extent) for extent in launch.grid)
            if 0 in grid:
                complete = False  # the next call is a first one too
                continue
            arguments = []
            for name, kind, argument in launch.named():
                value = given(argument)
                right = kind.takes(value.dtype) if isinstance(value, Tensor) else kind.usual == "i32"
                assert right, f"{name} of {launch.kernel.__name__} is {kind}; got {value}"
                arguments.append(value)
            compiled.append(launch.kernel[grid](*arguments, **launch.constants, **launch.options))
        if complete and not INTERPRETED and all(one is None or _is_plain(one) for one in compiled):
            self._folded = _folded(call)
            program = _native.Program(self._alone)
            for launch, made in zip(self._launches, compiled, strict=True):
                _add(program, launch, made)
            self._native = program  # whole: lookups of other threads may be waiting for it


def _folded(call: tuple[Any, ...]) -> list[tuple[int, Callable[[Any], list[Any]]]]:
    """Where a call has values that are no number or tensor, from the last one on, and what makes such of them."""
    return [(at, unfold) for at, value in reversed([*enumerate(call)]) if (unfold := _unfolding(value)) is not None]


def _unfolding(value: Any) -> Callable[[Any], list[Any]] | None:
    if isinstance(value, Space):
        return Space.addresses
    if isinstance(value, torch.cuda.Event):
        return _handle
    if not isinstance(value, tuple):
        return None
    folded = _folded(value)

    def unfold(record: tuple[Any, ...]) -> list[Any]:
        values = list(record)
        for at, inner in folded:
            values[at : at + 1] = inner(values[at])
        return values

    return unfold


def _handle(event: Any) -> list[int]:
    return [event.cuda_event]


def _is_plain(compiled: Any) -> bool:
    """Whether a launch needs nothing but a kernel's handle and its arguments."""
    metadata = compiled.metadata
    # A Triton that does not tell of both kinds of scratch memory passes other arguments.
    scratch = [getattr(metadata, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    return bool(
        metadata.target.backend == "cuda"
        and metadata.num_ctas == 1
        and not metadata.launch_cooperative_grid
        and not metadata.launch_pdl
        and scratch == [0, 0]
    )


def _add(program: Any, launch: Launch | Fill | Send, compiled: Any) -> None:
    if isinstance(launch, Send):
        source = (launch.tensor.data_ptr(), -1)
        program.add_copy_to_host((0, launch.to.place), source, (launch.tensor.nbytes, -1))
        program.add_record((0, launch.event.place))
        return
    if isinstance(launch, Fill):
        words = (0, launch.words.place) if isinstance(launch.words, Variable) else (launch.words, -1)
        program.add_fill((4 * launch.tensor.first, launch.tensor.place), words, launch.value % 2**32)
        return
    types = compiled.src.signature
    arguments = []
    for name, _kind, argument in launch.named():
        spelled = types[name]
        assert spelled != "constexpr", f"{name} of {launch.kernel.__name__} was specialised on"
        if isinstance(argument, Variable):
            size = _size_of(spelled) if argument.first else 0
            arguments.append((size * argument.first, argument.place))
        else:
            arguments.append((argument.data_ptr() if isinstance(argument, Tensor) else argument, -1))
    arguments += [(0, -1), (0, -1)]  # Triton's scratch memory, of which there is none
    grid = [(0, extent.place) if isinstance(extent, Variable) else (extent, -1) for extent in launch.grid]
    grid += [(1, -1)] * (3 - len(grid))
    metadata = compiled.metadata
    threads = metadata.num_warps * metadata.target.warp_size
    program.add_kernel(compiled.function, threads, metadata.shared, tuple(grid), arguments)


def _size_of(pointer: str) -> int:
    return {"8": 1, "16": 2, "32": 4, "64": 8}[pointer.lstrip("*bfipu")]


class Layouts:
    """Pieces for batches of the sizes that came last."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Pieces] = {}

    def of(self, size: Hashable, make: Callable[[], Pieces]) -> Pieces:
        """Those of that size."""
        layout = self._made.get(size)
        if layout is None:
            if len(self._made) >= _MOST_LAYOUTS:
                self._made.clear()
            layout = self._made[size] = make()
        return layout


class Programs:
    """The programs of one owner, made when they are first asked for."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Program] = {}

    def of(self, kind: Hashable, alone: bool, make: Callable[[], Sequence[Launch | Fill | Send]]) -> Program:
        """The program of that kind of call: arguments of other types or alignment are another kind."""
        program = self._made.get(kind)
        if program is None:
            program = self._made[kind] = Program(make(), alone)
        return program


# Triton has both as functions of its language, which cost a few microseconds a call.
def blocks(n: int, size: int) -> int:
    """How many blocks of that size cover n."""
    return -(-n // size)


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def kind_of(*tensors: Tensor | None) -> Hashable:
    """What tells apart tensors that come from elsewhere."""
    return tuple(None if one is None else (one.dtype, one.data_ptr() % 16 == 0) for one in tensors)
