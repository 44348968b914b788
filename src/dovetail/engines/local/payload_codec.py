"""Payload codec: items to a pickle stream with out-of-band buffers in an aligned layout, and back.

A payload is one pickle stream of `(keys, items)` followed by the large out-of-band buffers (of arrays, tensors,
tables), each aligned to 64 bytes. The layout is the same inside a message and in shared memory (`buffer_pool.py`).
"""

from __future__ import annotations

import copyreg
import pickle
import sys
from typing import TYPE_CHECKING, Any

from dovetail.control.engine import UnsendableItemError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from _typeshed import ReadableBuffer

MAX_INLINE_BYTES = 128 * 1024
"""Payloads up to this size are sent inside the message."""
MIN_OUT_OF_BAND_BYTES = 8192
"""Smaller buffers stay in the pickle stream."""
ALIGN_BYTES = 64
PICKLE_PROTOCOL = 5


class PackedPayload:
    """A payload before it is sent. It aliases its items: copy it (`join_layout`, `BufferPool.put`) before they
    change."""

    __slots__ = ("buffers", "chunks", "first", "items", "size")

    def __init__(self, items: int, chunks: list[bytes | bytearray], buffers: list[memoryview]) -> None:
        self.items = items
        self.chunks = chunks
        """The pickle stream in chunks. Large `bytes` objects are not copied."""
        self.buffers = buffers
        """Flat views of the out-of-band buffers."""
        self.size = sum(map(len, chunks)) + sum(map(len, buffers))
        """All bytes, without alignment gaps."""
        self.first: Any = None
        """The key of its first item, where needed."""


class Unpicklable(UnsendableItemError):
    """An item that neither pickle nor cloudpickle can serialize. `index` is -1 if each item alone can be serialized."""

    def __str__(self) -> str:
        what = f"item {self.index}" if self.index >= 0 else "the payload as a whole"
        return f"{what} cannot be pickled: {self.error_text}"


def pack_items(keys: object, items: list[Any]) -> PackedPayload:
    """Pack items. Raises `Unpicklable` or MemoryError."""
    try:
        return _dump(pickle.Pickler, keys, items)
    except MemoryError:
        raise
    except (Exception, SystemExit):  # noqa: S110  cloudpickle can pickle more, and its error is more precise
        pass
    try:
        return _dump(_cloudpickler(), keys, items)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        raise next(
            (Unpicklable(*bad) for bad in find_unpicklable(items)), Unpicklable(-1, describe_error(error))
        ) from None


def pack_split(keys: object, split: Any) -> PackedPayload:
    """Pack a split in place of its items."""
    try:
        return _dump(pickle.Pickler, keys, split, split.items)
    except MemoryError:
        raise
    except Exception as error:
        raise Unpicklable(-1, describe_error(error)) from None


def find_unpicklable(items: list[Any]) -> Iterator[tuple[int, str]]:
    """Index of every item that cannot be pickled, with the reason. A generator: often the first one is enough."""
    for index, item in enumerate(items):
        why = ""
        for pickler_type in (pickle.Pickler, _cloudpickler()):
            try:
                _dump(pickler_type, None, [item])
            except MemoryError:
                raise
            except (Exception, SystemExit) as error:
                why = describe_error(error)
            else:
                break
        else:
            yield index, why


def unpack_payload(stream: ReadableBuffer, buffers: Sequence[ReadableBuffer]) -> tuple[Any, Any]:
    """The keys and the items, or the split that replaces them. Arrays and tensors are views of `buffers` and equally
    writable."""
    keys, items = pickle.loads(stream, buffers=borrow_views(buffers))  # noqa: S301  written by our own processes
    return keys, items


def borrow_views(buffers: Sequence[ReadableBuffer]) -> Iterator[memoryview]:
    """A separate view for every user of a buffer, so that ours can be released while theirs live.

    torch.frombuffer keeps a reference to the view but no export of it: releasing that view would leave a dangling
    tensor.
    """
    return map(memoryview, buffers)


def describe_error(error: BaseException) -> str:
    """'TypeError: cannot pickle ...', even if the error's own `__str__` raises."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        return name
    return f"{name}: {text}" if text else name


# ------------------------------------------------------------------------------------------------------------ layout


def part_lengths(packed: PackedPayload) -> tuple[int, ...]:
    """Length of the stream, then of every buffer; a reader needs them."""
    return (sum(map(len, packed.chunks)), *map(len, packed.buffers))


def part_offsets(lengths: Sequence[int]) -> tuple[int, ...]:
    """Offsets of the stream and the buffers."""
    starts = []
    at = 0
    for length in lengths:
        starts.append(at)
        at += -(-length // ALIGN_BYTES) * ALIGN_BYTES
    return tuple(starts)


def layout_bytes(lengths: Sequence[int]) -> int:
    """Bytes from the start of the stream to the end of the last buffer."""
    return part_offsets(lengths)[-1] + lengths[-1]


def layout_chunks(packed: PackedPayload) -> list[ReadableBuffer]:
    """All chunks in layout order, including gaps; joined they are the layout."""
    found: list[ReadableBuffer] = [*packed.chunks]
    last = sum(map(len, packed.chunks))
    for buffer in packed.buffers:
        found += (bytes(-last % ALIGN_BYTES), buffer)
        last = len(buffer)
    return found


def join_layout(packed: PackedPayload) -> bytes:
    """The layout as one object. Receive it into a bytearray, so that loaded arrays are writable."""
    return b"".join(layout_chunks(packed)) if packed.buffers else b"".join(packed.chunks)


def split_layout(memory: memoryview, lengths: Sequence[int]) -> tuple[memoryview, list[memoryview]]:
    """The stream and the buffers as views of a flat memory that contains the layout."""
    first, *others = zip(part_offsets(lengths), lengths, strict=True)
    return memory[: first[1]], [memory[start : start + length] for start, length in others]


# ----------------------------------------------------------------------------------------------------------- picklers


# cloudpickle defines a class attribute of the same name that is read only once
_dispatch_table: Any = pickle.Pickler.__dict__["dispatch_table"]


class _ChunkFile:
    """File object of a pickler: a list of chunks, not joined."""

    __slots__ = ("write",)

    def __init__(self, chunks: list[Any]) -> None:
        self.write = chunks.append


def _dump(pickler_type: Any, keys: object, items: Any, count: int | None = None) -> PackedPayload:
    chunks: list[bytes | bytearray] = []
    buffers: list[memoryview] = []

    def in_stream(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if len(raw) < MIN_OUT_OF_BAND_BYTES:
            return True
        buffers.append(raw)
        return False

    pickler = pickler_type(_ChunkFile(chunks), PICKLE_PROTOCOL, buffer_callback=in_stream)
    tensor_type = getattr(sys.modules.get("torch"), "Tensor", None)  # missing while torch is being imported
    if tensor_type is not None:
        table = getattr(pickler, "dispatch_table", copyreg.dispatch_table)
        _dispatch_table.__set__(pickler, {**table, tensor_type: _reduce_tensor})
    pickler.dump((keys, items))
    return PackedPayload(len(items) if count is None else count, chunks, buffers)


def _cloudpickler() -> Any:
    import cloudpickle  # late: most payloads do not need it

    return cloudpickle.Pickler


# ------------------------------------------------------------------------------------------------------ torch tensors


def _reduce_tensor(tensor: Any) -> Any:
    """Reduce a plain CPU tensor to a buffer of bytes; others use torch's own reduction.

    torch would copy the tensor's whole storage into the stream, even for a small slice.
    """
    if _is_plain_tensor(tensor):
        try:
            flat = tensor.detach().contiguous().reshape(-1).view(sys.modules["torch"].uint8).numpy()
        except (RuntimeError, TypeError):  # no numpy, or a dtype without a numpy equivalent
            pass
        else:
            dtype = str(tensor.dtype).removeprefix("torch.")
            return _load_tensor, (pickle.PickleBuffer(flat), dtype, tuple(tensor.shape), tensor.requires_grad)
    return tensor.__reduce_ex__(PICKLE_PROTOCOL)


def _is_plain_tensor(tensor: Any) -> bool:
    """Whether dtype, shape, bytes and one flag describe the tensor completely."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is sys.modules["torch"].strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and (tensor.is_leaf or not tensor.requires_grad)
        and not (tensor.__dict__ or tensor._backward_hooks)  # noqa: SLF001  torch's own reduce asks the same
        and tensor.untyped_storage().nbytes() >= tensor.nbytes  # otherwise expanded: more bytes than its storage
    )


def _load_tensor(data: ReadableBuffer, dtype: str, shape: tuple[int, ...], requires_grad: bool) -> Any:
    """The inverse of the tensor reduction; every stream with a tensor refers to it by name."""
    from importlib import import_module

    torch = import_module("torch")
    view = memoryview(data)
    if not len(view):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    else:
        writable = bytearray(view) if view.readonly else data  # torch has no read-only tensors
        tensor = torch.frombuffer(writable, dtype=torch.uint8).view(getattr(torch, dtype)).reshape(shape)
    return tensor.requires_grad_() if requires_grad else tensor
