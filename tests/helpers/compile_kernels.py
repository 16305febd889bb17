"""Compiles the kernels for GPUs that are not here; prints the size of their code, registers and spills as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import triton
from triton.backends.compiler import GPUTarget

from equilibria.tensors import _product_kernels as kernels

TARGETS = {"A100": ("cuda", 80, 32), "H100": ("cuda", 90, 32), "MI300": ("hip", "gfx942", 64)}
TYPES = dict.fromkeys(("work", "blocks", "copied", "units", "places", "w_places", "g_places", "v_places"), "*i64")
TYPES |= dict.fromkeys(("found", "_found", "sums", "now", "first", "second", "third", "before", "out"), "*fp64")
TYPES |= {"gathered": "*fp32"}
TYPES |= dict.fromkeys(("width", "copies", "references", "is_known"), "i32")
CONSTANTS = {"LANES": kernels._LANES, "AT_ONCE": kernels._AT_ONCE}


def compiled(name: str, target: tuple):
    kernel = getattr(kernels, name)
    signature = {argument: TYPES.get(argument, "constexpr") for argument in kernel.arg_names}
    fixed = {(place,): CONSTANTS[arg] for place, arg in enumerate(kernel.arg_names) if arg in CONSTANTS}
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=fixed)
    return triton.compile(source, target=GPUTarget(*target), options={"num_warps": kernels.WARPS[name]})


def registers(assembly: dict, target: tuple) -> dict[str, int]:
    """Registers of a thread, and what a kernel keeps in memory for want of them: bytes (NVIDIA) or registers (AMD)."""
    if "amdgcn" in assembly:
        lines = [line.split() for line in assembly["amdgcn"].splitlines() if "gpr_" in line and "_count:" in line]
        counts = {name.strip("."): int(count) for name, count in (line for line in lines if len(line) == 2)}
        return {
            "registers": counts["vgpr_count:"],
            "spilled": counts["sgpr_spill_count:"] + counts["vgpr_spill_count:"],
        }
    arch = f"sm_{target[1]}" + ("a" if target[1] == 90 else "")
    command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={arch}", "-", "-o", "/dev/null"]
    done = subprocess.run(command, input=assembly["ptx"], capture_output=True, text=True, check=True)
    stores = re.findall(r"(\d+) bytes spill stores", done.stderr)
    used = re.findall(r"Used (\d+) registers", done.stderr)
    assert stores and used, done.stderr
    return {"registers": max(map(int, used)), "spilled": sum(map(int, stores))}


if __name__ == "__main__":
    report: dict[str, dict[str, dict[str, int]]] = {}
    for gpu, target in TARGETS.items():
        for name in kernels.WARPS:
            assembly = compiled(name, target).asm
            code = assembly.get("cubin") or assembly["hsaco"]
            report.setdefault(gpu, {})[name] = {"bytes": len(code), **registers(assembly, target)}
    sys.stdout.write(json.dumps(report))
