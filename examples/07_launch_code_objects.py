"""Run what ``leanmla build --out DIR`` wrote, from its manifest alone: this file imports nothing but Python's own modules and HIP.

    leanmla build --target gfx950 --heads 16 --format mxfp4 --out DIR      # on any machine
    python examples/07_launch_code_objects.py DIR                          # on one with an MI355X

Given DIR and a card, it decodes from a cache of zeros, where the answer is known: out 0, lse = ln(number of keys). Built and
emulated, not yet run on hardware.
"""

import ctypes
import json
import math
import struct
import sys
from pathlib import Path

CODES = {"ptr": "Q", "i64": "q", "i32": "i", "f32": "f"}


def check(status, what):
    if status:
        raise RuntimeError(f"{what} failed with HIP error {status}")


class Launcher:
    """Launches the problems of a manifest. ``hip`` is the HIP runtime; addresses are integers."""

    def __init__(self, folder, hip):
        self.folder, self.hip = Path(folder), hip
        document = json.loads((self.folder / "manifest.json").read_text())
        assert document["schema"] == "leanmla-build/1", document["schema"]
        self.problems = {p["name"]: p for p in document["problems"]}
        self._functions = {}

    def allocate(self, num_bytes, data=None):
        """Device memory of zeros, or of ``data``."""
        address = ctypes.c_void_p()
        check(self.hip.hipMalloc(ctypes.byref(address), ctypes.c_size_t(num_bytes)), "hipMalloc")
        data = data if data is not None else bytes(num_bytes)
        check(self.hip.hipMemcpy(address, data, ctypes.c_size_t(len(data)), 1), "hipMemcpy to the device")
        return address.value

    def read(self, address, num_bytes):
        """Bytes of device memory."""
        data = ctypes.create_string_buffer(num_bytes)
        check(self.hip.hipMemcpy(data, ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), 2), "hipMemcpy to the host")
        return data.raw

    def make_scratch(self, problem):
        """name -> address of everything that is neither the caller's nor his answer."""
        scratch = {}
        for b in problem["buffers"]:
            if b["role"] == "scratch":
                values = b["contents"] if isinstance(b["contents"], list) else None
                scratch[b["name"]] = self.allocate(b["bytes"], struct.pack(f"<{len(values)}i", *values) if values else None)
        return scratch

    def run(self, problem, addresses, parameters, stream=0):
        """One decode step: the launches in order, each with the arguments the manifest says."""
        numbers = {p["name"]: parameters.get(p["name"], p["default"]) for p in problem["parameters"]}
        optional = {b["name"] for b in problem["buffers"] if b["optional"]}
        for launch in problem["launches"]:
            segment = bytearray(launch["kernarg_bytes"])
            for a in launch["arguments"]:
                if "constant" in a:
                    value = a["constant"]
                elif "buffer" in a:
                    value = addresses.get(a["buffer"], 0) if a["buffer"] in optional else addresses[a["buffer"]]
                else:
                    value = numbers[a["parameter"]]
                struct.pack_into("<" + CODES[a["kind"]], segment, a["offset"], value)
            self._launch(launch, bytes(segment), stream)

    def _launch(self, launch, segment, stream):
        key = launch["file"], launch["name"]
        if key not in self._functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            code = (self.folder / launch["file"]).read_bytes()
            check(self.hip.hipModuleLoadData(ctypes.byref(module), code), "hipModuleLoadData")
            check(
                self.hip.hipModuleGetFunction(ctypes.byref(function), module, launch["name"].encode()), "hipModuleGetFunction"
            )
            self._functions[key] = function
        buffer = ctypes.create_string_buffer(segment, len(segment))
        length = ctypes.c_size_t(len(segment))
        # HIP_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE, _END
        extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(length), 3)
        sizes = [ctypes.c_uint(n) for n in (*launch["grid"], *launch["block"], launch["dynamic_lds_bytes"])]
        check(
            self.hip.hipModuleLaunchKernel(self._functions[key], *sizes, ctypes.c_void_p(stream), None, extra),
            f"launching {launch['name']}",
        )


def zeros_decoded(launcher, problem, keys):
    """Decode every sequence of ``problem`` from a cache of ``keys`` zero keys: (largest |out|, largest error of lse)."""
    shape = problem["problem"]
    page = shape["page_size"]
    pages = -(-keys // page)
    batch = shape["batch"]
    offsets = [b * (keys if shape["table_kind"] == "contiguous" else pages) for b in range(batch + 1)]
    contents = {
        "kv_lens": [keys if shape["table_kind"] == "block_table" else keys - (pages - 1) * page] * batch,
        "kv_indptr": offsets,
        "qo_indptr": [b * shape["max_q_len"] for b in range(batch + 1)],
    }
    addresses = launcher.make_scratch(problem)
    for b in problem["buffers"]:
        if b["role"] == "scratch":
            continue
        values = contents.get(b["name"])
        size = {"uint8": 1, "bf16": 2, "fp16": 2}.get(b["dtype"], 4)
        for n in b["shape"]:
            size *= n if n is not None else offsets[-1] + 1
        addresses[b["name"]] = launcher.allocate(size, struct.pack(f"<{len(values)}i", *values) if values else None)
    launcher.run(problem, addresses, {"sm_scale": 576**-0.5})
    by_name = {b["name"]: b for b in problem["buffers"]}
    out = launcher.read(addresses["out"], by_name["out"]["bytes"])
    lse = struct.unpack(f"<{by_name['lse']['bytes'] // 4}f", launcher.read(addresses["lse"], by_name["lse"]["bytes"]))
    seen = [keys - max(0, shape["max_q_len"] - 1 - r) if shape["causal"] else keys for r in range(shape["max_q_len"])]
    rows = [math.log(seen[i // shape["num_heads"] % shape["max_q_len"]]) for i in range(len(lse))]
    return max(out), max(abs(a - b) for a, b in zip(lse, rows))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print(__doc__)
        sys.exit(0)
    try:
        runtime = ctypes.CDLL("libamdhip64.so")
    except OSError as error:
        sys.exit(f"needs the HIP runtime ({error})")
    the_launcher = Launcher(sys.argv[1], runtime)
    for name, one in the_launcher.problems.items():
        largest, error = zeros_decoded(the_launcher, one, min(200, one["problem"]["max_kv_len"]))
        print(
            f"{name}: {len(one['launches'])} launches, out {'0 everywhere' if largest == 0 else 'WRONG'}, lse error {error:.1e}"
        )
