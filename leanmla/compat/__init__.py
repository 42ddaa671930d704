"""Other projects' signatures in, our call out.

Each module here offers the functions of one project under their own names and argument orders:

* :mod:`leanmla.compat.aiter`      for ``aiter`` (MLA decode, its metadata, its reduction, its MXFP4 helpers);
* :mod:`leanmla.compat.flash_mla`  for ``flash_mla`` (dense and sparse decode over a paged cache);
* :mod:`leanmla.compat.flashinfer` for ``flashinfer.mla.BatchMLAPagedAttentionWrapper``.

:func:`install` puts one of them into ``sys.modules`` under the original name, so that code which imports that project runs
unchanged. Every function's docstring says what differs from the original.
"""

from __future__ import annotations

from .install import NAMES, Installed, install, uninstall

__all__ = ["NAMES", "Installed", "install", "uninstall"]
