"""Compiles kernels for GPUs that are not there, and reads what the compiler made of them."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Compiled:
    """ptx: text. registers, stack: per thread, as ptxas allotted them; shared: bytes."""

    ptx: str
    cubin: bytes
    registers: int
    stack: int
    shared: int

    def sass(self) -> str:
        """The machine code as text."""
        return cuobjdump(self.cubin, "-sass")


def compile_kernel(
    kernel, arguments: dict[str, str | int | float | bool], capability: int, **options
) -> Compiled:
    """Compile for ``sm_<capability>``.

    arguments: of every parameter of the kernel its Triton type ("*fp16", "i32") or the value of its
    constexpr; strings are types where the parameter is none. Pointers and integers are taken as
    divisible by 16, as the launcher finds them for real sizes.
    """
    constexprs = {kernel.arg_names[p.num] for p in kernel.params if p.is_constexpr}
    signature = {n: "constexpr" if n in constexprs else arguments[n] for n in kernel.arg_names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, (n, kind) in enumerate(signature.items())
        if n not in constexprs and (kind.startswith("*") or kind == "i32")
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={n: arguments[n] for n in constexprs},
        attrs=attributes,
    )
    options = {"enable_fp_fusion": False} | options
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    cubin = built.asm["cubin"]
    usage = cuobjdump(cubin, "-res-usage")
    registers, stack = (int(re.search(rf"{n}:(\d+)", usage)[1]) for n in ("REG", "STACK"))
    return Compiled(built.asm["ptx"], cubin, registers, stack, built.metadata.shared)


def cuobjdump(cubin: bytes, option: str) -> str:
    """What the tool says of machine code, e.g. with "-sass" or "-res-usage"."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def contracted(compiled: Compiled) -> list[str]:
    """Multiply-adds that may round otherwise than a product and a sum would.

    Not those that the source asks for: half of something plus a constant, whose product is exact,
    and those of inline assembly.
    """
    ptx = re.sub(r"// begin inline asm.*?// end inline asm", "", compiled.ptx, flags=re.DOTALL)
    halves = r"fma\.rn\.f32 \t%\w+, %\w+, 0f3F000000, 0f4B000000;"
    return re.findall(r"fma\.rn\.f32.*", re.sub(halves, "", ptx))
