"""Run as ``ld.lld -shared IN.o -o OUT.hsaco``: links a gfx950 object with the linker inside the triton wheel.

FlyDSL calls ``$ROCM_PATH/llvm/bin/ld.lld``. Where there is no ROCm, toolchain.py puts a script of that name in front of this
file. It is run by path, so it must import nothing of this package.
"""

import sys


def main(arguments: list[str]) -> None:
    """Link the one object file among ``arguments`` to the file after ``-o``."""
    from triton._C.libtriton import amd

    amd.link_hsaco(next(a for a in arguments if a.endswith(".o")), arguments[arguments.index("-o") + 1])


if __name__ == "__main__":
    main(sys.argv[1:])
