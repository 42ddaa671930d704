"""Stand-ins under the original names: in, out, and never in front of the real thing by accident."""

import importlib
import inspect
import sys
import types

import pytest

from leanmla import compat
from leanmla.errors import InvalidArgument


def importable(name):
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


@pytest.mark.parametrize("name", compat.NAMES)
def test_install_and_undo(name):
    if importable(name):
        pytest.skip(f"the real {name} is installed")
    before = set(sys.modules)
    handle = compat.install(name)
    assert importlib.import_module(name) is handle.module
    assert compat.install(name) is handle, "installing twice is one installation"
    handle.uninstall()
    handle.uninstall()
    assert not importable(name)
    assert not [m for m in set(sys.modules) - before if m == name or m.startswith(name + ".")]


def test_aiter_imports_as_submissions_write_them():
    with compat.install("aiter", force=True):
        from aiter import dtypes, get_mla_metadata_info_v1, get_mla_metadata_v1, mla_reduce_v1  # noqa: F401
        from aiter.mla import mla_decode_fwd
        from aiter.utility.fp4_utils import dynamic_mxfp4_quant, e8m0_to_f32, mxfp4_to_f32  # noqa: F401
        import aiter.utility.fp4_utils  # isort: skip

        assert aiter.dtypes is dtypes and aiter.utility.fp4_utils.mxfp4_to_f32 is mxfp4_to_f32
        assert aiter.decode_update_mla_metadata_v1
        assert mla_decode_fwd.__module__.startswith("leanmla.")
        with pytest.raises(ImportError):
            import aiter.no_such_module


def test_other_imports():
    with compat.install("flash_mla", force=True), compat.install("flashinfer", force=True):
        import flashinfer
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata  # noqa: F401
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        assert flashinfer.mla.BatchMLAPagedAttentionWrapper is BatchMLAPagedAttentionWrapper


def test_the_real_package_comes_first_unless_forced(tmp_path, monkeypatch):
    package = tmp_path / "flash_mla"
    package.mkdir()
    (package / "__init__.py").write_text("real = True\n")
    (package / "inner.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidArgument, match="the real 'flash_mla' can be imported here .*force=True"):
        compat.install("flash_mla")
    assert "flash_mla" not in sys.modules
    real = importlib.import_module("flash_mla")
    inner = importlib.import_module("flash_mla.inner")
    try:
        with compat.install("flash_mla", force=True) as module:
            import flash_mla

            assert flash_mla is module and not hasattr(flash_mla, "real") and "flash_mla.inner" not in sys.modules
        assert sys.modules["flash_mla"] is real and sys.modules["flash_mla.inner"] is inner
    finally:
        for key in ("flash_mla", "flash_mla.inner"):
            sys.modules.pop(key, None)


def test_unknown_names_are_refused():
    for call in (compat.install, compat.uninstall):
        with pytest.raises(InvalidArgument, match="name: expected one of aiter, flash_mla, flashinfer, got 'numpy'"):
            call("numpy")
    compat.uninstall("aiter")  # nothing there: nothing happens


def test_every_public_function_says_what_differs():
    from leanmla.compat import aiter, flash_mla
    from leanmla.compat.aiter import mla
    from leanmla.compat.aiter.utility import fp4_utils
    from leanmla.compat.flashinfer import BatchMLAPagedAttentionWrapper as Wrapper

    functions = [getattr(m, n) for m in (aiter, mla, flash_mla, fp4_utils) for n in m.__all__]
    functions = [f for f in functions if inspect.isfunction(f)] + [Wrapper, Wrapper.plan, Wrapper.run]
    assert len(functions) >= 13
    for f in functions:
        assert "Differs from the original:" in (f.__doc__ or ""), f.__qualname__


def test_a_name_that_is_blocked_or_half_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiter", None)  # how an import is forbidden
    with compat.install("aiter"):
        assert importable("aiter.mla")
    assert sys.modules["aiter"] is None
    monkeypatch.setitem(sys.modules, "aiter", types.ModuleType("aiter"))  # without a __spec__, which find_spec refuses
    with pytest.raises(InvalidArgument, match="the real 'aiter' can be imported here .imported already"):
        compat.install("aiter")


def test_every_way_to_import_the_module_in_flash_mla():
    with compat.install("flash_mla", force=True) as module:
        import flash_mla.flash_mla_interface
        import flash_mla.flash_mla_interface as interface
        from flash_mla import flash_mla_interface

        assert flash_mla.flash_mla_interface is interface is flash_mla_interface
        assert interface.flash_mla_with_kvcache is module.flash_mla_with_kvcache


def test_a_block_inside_a_block_takes_out_nothing():
    with compat.install("aiter", force=True) as outer:
        with compat.install("aiter") as inner:
            assert inner is outer
        assert sys.modules.get("aiter") is outer
    assert sys.modules.get("aiter") is not outer
