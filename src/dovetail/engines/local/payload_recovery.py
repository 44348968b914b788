"""Recovery of the readable items of a payload that cannot be unpickled as a whole.

The stream is read again by the pure-Python unpickler of the standard library, whose steps can be overridden: an object
that cannot be created is replaced by a `BrokenItem`. Everything created from a BrokenItem is a BrokenItem, too, because
user code must never see one; lists, dicts and similar containers only hold it. An item that references a BrokenItem is
reported as one.

A stream per item would make this module unnecessary, but every payload would pay for it: 2,000 rows of text take 1.8
times as long to pickle and 2.7 times as long to load, and are 5 times as large.
"""

from __future__ import annotations

import gc
import io
import pickle
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.control.engine import UnreadableItem
from dovetail.engines.local.payload_codec import borrow_views, describe_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from _typeshed import ReadableBuffer

CONTAINER_TYPES = (list, tuple, dict, set, frozenset)
"""Containers that can hold a BrokenItem without running user code."""
OPAQUE_TYPES = (type, ModuleType, FunctionType)
"""Types whose contents existed before or were checked when they were added."""


class BrokenItem(UnreadableItem):
    """Replaces an object that could not be loaded."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Broken({self.error_text!r})"


def recover_items(stream: ReadableBuffer, buffers: Sequence[ReadableBuffer]) -> tuple[Any, list[Any]]:
    """The keys, and the items with a `BrokenItem` for each that cannot be loaded. UnpicklingError if nothing is
    readable."""
    reader = _TolerantUnpickler(io.BytesIO(stream), buffers=borrow_views(buffers))
    try:
        loaded = reader.load()
    except MemoryError:
        raise
    except Exception as error:
        raise pickle.UnpicklingError(f"the stream is damaged: {describe_error(error)}") from None
    if type(loaded) is not tuple or len(loaded) != 2 or type(loaded[1]) is not list:
        raise pickle.UnpicklingError("this is not a payload")
    keys, items = loaded
    search = _BrokenSearch(reader.spoiled)
    broken = search.find_broken(keys)
    if broken is not None:
        raise pickle.UnpicklingError(f"the keys cannot be loaded: {broken.error_text}")
    return keys, [search.find_broken(item) or item for item in items]


# the only unpickler whose steps can be overridden; `Any`, because its steps and stack are not in the type stubs
_PythonUnpickler: Any = pickle._Unpickler  # noqa: SLF001


class _TolerantUnpickler(pickle._Unpickler):  # noqa: SLF001
    """Continues behind objects that cannot be created. Exactly the steps that run user code are overridden."""

    dispatch: ClassVar[dict[int, Any]] = dict(_PythonUnpickler.dispatch)
    stack: list[Any]
    metastack: list[list[Any]]

    def __init__(self, file: io.BytesIO, *, buffers: Iterator[memoryview]) -> None:
        super().__init__(file, buffers=buffers)
        self.spoiled: dict[int, tuple[object, BrokenItem]] = {}
        """Objects that were created but not completed, by identity: others may already refer to them."""
        self._any_broken = False
        self._failed: tuple[BrokenItem, object] | None = None
        """Result of the last failed REDUCE, and its first argument."""

    def find_class(self, module: str, name: str) -> Any:
        return self._try_call(super().find_class, module, name)

    def load_reduce(self) -> None:
        args = self.stack.pop()
        function = self.stack.pop()
        made = self._find_broken((function, args)) or self._try_call(lambda: function(*args))
        self.stack.append(made)
        if type(made) is BrokenItem and type(args) is tuple and args:
            self._failed = made, args[0]

    def load_newobj(self) -> None:
        args = self.stack.pop()
        cls = self.stack.pop()
        self.stack.append(self._find_broken((cls, args)) or self._try_call(lambda: cls.__new__(cls, *args)))

    def load_newobj_ex(self) -> None:
        kwargs = self.stack.pop()
        args = self.stack.pop()
        cls = self.stack.pop()
        broken = self._find_broken((cls, args, kwargs))
        self.stack.append(broken or self._try_call(lambda: cls.__new__(cls, *args, **kwargs)))

    def load_frozenset(self) -> None:
        members = _PythonUnpickler.pop_mark(self)
        self.stack.append(self._try_call(frozenset, members))

    def load_build(self) -> None:
        self._apply_step(_PythonUnpickler.load_build, 1)

    def load_append(self) -> None:
        self._apply_step(_PythonUnpickler.load_append, 1)

    def load_setitem(self) -> None:
        self._apply_step(_PythonUnpickler.load_setitem, 2)

    def load_appends(self) -> None:
        self._apply_step(_PythonUnpickler.load_appends)

    def load_setitems(self) -> None:
        self._apply_step(_PythonUnpickler.load_setitems)

    def load_additems(self) -> None:
        self._apply_step(_PythonUnpickler.load_additems)

    def load_pop(self) -> None:
        """A state setter is a REDUCE of (object, state) whose result is dropped: its failure belongs to the object."""
        failed, self._failed = self._failed, None
        dropped = self.stack[-1] if self.stack else None
        _PythonUnpickler.load_pop(self)
        if failed is not None and dropped is failed[0] and self.stack and self.stack[-1] is failed[1]:
            self._mark_spoiled(failed[0])

    def _try_call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except MemoryError:
            raise
        except Exception as error:
            self._any_broken = True
            return BrokenItem(describe_error(error))

    def _apply_step(self, step: Callable[[Any], None], count: int = 0) -> None:
        """Run a step that changes an object by the `count` topmost values, or by all values since the mark."""
        target = self.stack[-count - 1] if count else self.metastack[-1][-1]
        values = self.stack[-count:]  # everything, if count is 0: a mark begins a new stack
        holds = type(target) in CONTAINER_TYPES and step is not _PythonUnpickler.load_build
        broken = None if holds else self._find_broken((target, values))
        if broken is None:
            # a step pops its values before anything in it can fail
            broken = self._try_call(step, self)
        elif count:
            del self.stack[-count:]
        else:
            _PythonUnpickler.pop_mark(self)
        if broken is not None:
            self._mark_spoiled(broken)

    def _mark_spoiled(self, broken: BrokenItem) -> None:
        """Mark the topmost object as broken. The memo may still return it, so its identity is recorded."""
        target = self.stack[-1]
        if type(target) is not BrokenItem:
            self.stack[-1] = broken
            self.spoiled[id(target)] = target, broken

    def _find_broken(self, value: object) -> BrokenItem | None:
        """A BrokenItem inside the value, behind containers only.

        Other objects are not searched: one that received a BrokenItem is marked as broken itself.
        """
        seen: set[int] = set()
        waiting = [value] if self._any_broken else []
        while waiting:
            found = waiting.pop()
            if type(found) is BrokenItem:
                return found
            if id(found) in self.spoiled:
                return self.spoiled[id(found)][1]
            if type(found) in CONTAINER_TYPES and id(found) not in seen:
                seen.add(id(found))
                waiting += _members(found)
        return None


_OVERRIDDEN = "reduce newobj newobj_ex frozenset build append setitem appends setitems additems pop"
for _name in _OVERRIDDEN.split():
    _TolerantUnpickler.dispatch[getattr(pickle, _name.upper())[0]] = getattr(_TolerantUnpickler, f"load_{_name}")


def _members(holder: Any) -> list[Any]:
    return [*holder.keys(), *holder.values()] if type(holder) is dict else list(holder)


class _BrokenSearch:
    """The objects from which a BrokenItem can be reached, through everything that the garbage collector tracks."""

    __slots__ = ("_clean", "_spoiled")

    def __init__(self, spoiled: dict[int, tuple[object, BrokenItem]]) -> None:
        self._spoiled = spoiled
        self._clean: set[int] = set()
        """Objects of unbroken items; they are alive, so their identities are stable."""

    def find_broken(self, item: object) -> BrokenItem | None:
        seen: set[int] = set()
        waiting = [item]
        while waiting:
            found = waiting.pop()
            if type(found) is BrokenItem:
                return found
            if id(found) in self._spoiled:
                return self._spoiled[id(found)][1]
            if id(found) in seen or id(found) in self._clean:
                continue
            if gc.is_tracked(found) and not issubclass(type(found), OPAQUE_TYPES):
                seen.add(id(found))
                waiting += gc.get_referents(found)
        self._clean |= seen
        return None
