"""Put a stand-in into ``sys.modules`` under the original project's name, and take it out again."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from ..errors import InvalidArgument

__all__ = ["NAMES", "Installed", "install", "uninstall"]

#: project -> {name it is imported under: module of ours}
_MODULES: dict[str, dict[str, str]] = {
    "aiter": {
        "aiter": "leanmla.compat.aiter",
        "aiter.mla": "leanmla.compat.aiter.mla",
        "aiter.dtypes": "leanmla.compat.aiter.dtypes",
        "aiter.utility": "leanmla.compat.aiter.utility",
        "aiter.utility.dtypes": "leanmla.compat.aiter.dtypes",
        "aiter.utility.fp4_utils": "leanmla.compat.aiter.utility.fp4_utils",
    },
    "flash_mla": {
        "flash_mla": "leanmla.compat.flash_mla",
        "flash_mla.flash_mla_interface": "leanmla.compat.flash_mla",
    },
    "flashinfer": {
        "flashinfer": "leanmla.compat.flashinfer",
        "flashinfer.mla": "leanmla.compat.flashinfer.mla",
    },
}
NAMES: tuple[str, ...] = tuple(_MODULES)

_installed: dict[str, Installed] = {}


class Installed:
    """A stand-in in place. :meth:`uninstall` restores what was there before; so does leaving it as a context manager, unless it was
    installed before the block."""

    def __init__(self, name: str, module: ModuleType, displaced: dict[str, ModuleType | None]) -> None:
        self.name = name
        self.module = module  #: what ``import name`` now yields
        self._displaced = displaced
        self._active = True
        self._claims = 1  #: calls of install() that no ``with`` block has given back

    def uninstall(self) -> None:
        """Take the stand-in out and put back the modules it displaced. Doing it twice is harmless."""
        if not self._active:
            return
        self._active = False
        _installed.pop(self.name, None)
        for key in _entries(self.name):
            del sys.modules[key]
        sys.modules.update(self._displaced)  # type: ignore[arg-type]

    def __enter__(self) -> ModuleType:
        return self.module

    def __exit__(self, *exc: object) -> None:
        self._claims -= 1
        if self._claims <= 0:
            self.uninstall()

    def __repr__(self) -> str:
        return f"<leanmla stand-in for {self.name!r}, {'installed' if self._active else 'uninstalled'}>"


def _entries(name: str) -> list[str]:
    return [key for key in sys.modules if key == name or key.startswith(name + ".")]


def _real(name: str) -> str | None:
    """Where the real package is, None if it cannot be imported."""
    if name in sys.modules:
        module: ModuleType | None = sys.modules[name]
        if module is None:  # how an import is forbidden
            return None
        return getattr(module, "__file__", None) or "imported already"
    spec = importlib.util.find_spec(name)
    return None if spec is None else spec.origin or "a folder without __init__.py"


def _check_name(name: str) -> None:
    if name not in _MODULES:
        raise InvalidArgument(f"name: expected one of {', '.join(NAMES)}, got {name!r}.")


def install(name: str, force: bool = False) -> Installed:
    """Make ``import name`` yield our stand-in, in this process.

    Args:
        name: "aiter", "flash_mla" or "flashinfer".
        force: install it although the real package can be imported. Its modules are set aside and come back on uninstall;
            code that imported them earlier keeps them.

    Returns:
        A handle with ``uninstall()``, also a context manager. Installing what is installed returns the same handle.

    Raises:
        InvalidArgument: there is no such stand-in, or the real package is importable and ``force`` is not set.

    Example:
        >>> with install("flash_mla", force=True):
        ...     from flash_mla import flash_mla_with_kvcache
        >>> flash_mla_with_kvcache.__module__
        'leanmla.compat.flash_mla'
    """
    _check_name(name)
    if name in _installed:
        _installed[name]._claims += 1
        return _installed[name]
    where = None if force else _real(name)
    if where is not None:
        raise InvalidArgument(
            f"name: the real {name!r} can be imported here ({where}), so its stand-in stays out. Pass force=True to put it in "
            "front all the same."
        )
    modules = {alias: importlib.import_module(target) for alias, target in _MODULES[name].items()}
    displaced: dict[str, ModuleType | None] = {key: sys.modules.pop(key) for key in _entries(name)}
    sys.modules.update(modules)
    handle = _installed[name] = Installed(name, modules[name], displaced)
    return handle


def uninstall(name: str) -> None:
    """Undo :func:`install`; harmless when nothing is installed."""
    _check_name(name)
    if name in _installed:
        _installed[name].uninstall()
