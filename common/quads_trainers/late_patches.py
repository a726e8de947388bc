"""Patch a module when it is imported, so that registering a patch imports nothing.

Trainers load plug-ins in every process and before their own modules; importing those from a plug-in
would be slow and circular.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["patch_when_imported"]

Patch = Callable[[ModuleType], None]


def patch_when_imported(module: str, patch: Patch) -> None:
    """Call ``patch(module)`` right after ``module`` ran, or now if it is there already."""
    if module in sys.modules:
        patch(sys.modules[module])
        return
    if not any(finder is _FINDER for finder in sys.meta_path):
        sys.meta_path.insert(0, _FINDER)
    _FINDER.pending.setdefault(module, []).append(patch)


class _PatchingFinder(importlib.abc.MetaPathFinder):
    """Finds what the other finders find, and runs the patches after the module's own code.

    Patches stay pending until that: finding a module does not mean importing it, and an import
    that fails may be tried again.
    """

    def __init__(self) -> None:
        self.pending: dict[str, list[Patch]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.pending:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _PatchingLoader(spec.loader, self.pending)
                return spec
        return None


class _PatchingLoader(importlib.abc.Loader):
    def __init__(self, loader: Any, pending: dict[str, list[Patch]]) -> None:
        self.loader, self.pending = loader, pending

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self.loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        for patch in self.pending.get(module.__name__, ()):
            patch(module)
        self.pending.pop(module.__name__, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


_FINDER = _PatchingFinder()
