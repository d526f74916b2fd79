"""The emulator's code that differs between CPU types also works on aarch64.

If a compiler for aarch64 is installed, the tests compile this code. If a user-mode QEMU is
installed, the tests also run this code.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch_npu

EMULATOR = Path(__file__).resolve().parents[3] / "emulator"
ACL_HEADERS = Path(torch_npu.__file__).parent / "include/third_party/acl/inc"
AARCH64 = "aarch64-linux-gnu-g++"

needs_cross_compiler = pytest.mark.skipif(
    shutil.which(AARCH64) is None, reason=f"{AARCH64} is not installed"
)

EXPORTED = """
#include "ops/export.h"

struct Pair { double first, second; };      // in registers
struct Block { int64_t numbers[5]; };       // in memory

// More of each kind than any processor has registers for, and narrow ones between wide ones.
template <class... Rest>
int call(void *list, int64_t a, bool b, int8_t c, double d, float e, Pair pair, Block block,
         int64_t f, int64_t g, double h, double i, double j, double k, double l, double m, float n,
         int8_t o, bool p, int64_t q, float r, int s, Rest *...rest) {
  double total = a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * pair.first + 7 * pair.second +
                 8 * block.numbers[4] + 9 * f + 10 * g + 11 * h + 12 * i + 13 * j + 14 * k +
                 15 * l + 16 * m + 17 * n + 18 * o + 19 * p + 20 * q + 21 * r + 22 * s;
  *static_cast<double *>(list) = total;
  return ((*rest = 23, 1) + ...);
}
static constexpr auto function = &call<uint64_t, uint64_t>;
EMU_EXPORT(exported, function)
"""

# Like torch_npu, this program looks the function up by its name, and declares the function's type
# itself.
CALLER = """
#include <cstdint>
#include <cstdio>
#include <dlfcn.h>

struct Pair { double first, second; };
struct Block { int64_t numbers[5]; };
using Exported = int (*)(void *, int64_t, bool, int8_t, double, float, Pair, Block, int64_t,
                         int64_t, double, double, double, double, double, double, float, int8_t,
                         bool, int64_t, float, int, uint64_t *, uint64_t *);

int main(int, char **arguments) {
  void *library = dlopen(arguments[1], RTLD_NOW);
  auto exported = library ? reinterpret_cast<Exported>(dlsym(library, "exported")) : nullptr;
  if (!exported)
    return puts(dlerror()), 1;
  double total = 0;
  uint64_t bytes = 0, executor = 0;
  int count = exported(&total, -1, true, -3, 4.5, 5.5f, {6.5, 7.5}, {{0, 0, 0, 0, -8}}, 1ll << 40,
                       10, 11.5, 12.5, 13.5, 14.5, 15.5, 16.5, 17.5f, -18, true, -20, 21.5f, -22,
                       &bytes, &executor);
  printf("%d %.17g %d %d", count, total, int(bytes), int(executor));
}
"""
TOTAL = (
    -1 + 2 * 1 + 3 * -3 + 4 * 4.5 + 5 * 5.5 + 6 * 6.5 + 7 * 7.5 + 8 * -8 + 9 * 2.0**40 + 10 * 10
    + 11 * 11.5 + 12 * 12.5 + 13 * 13.5 + 14 * 14.5 + 15 * 15.5 + 16 * 16.5 + 17 * 17.5 + 18 * -18
    + 19 * 1 + 20 * -20 + 21 * 21.5 + 22 * -22
)  # fmt: skip


def build_exported_call(compiler: str, folder: Path) -> list[str]:
    """Build a library that exports a function, and a program that calls it; return the paths of
    both.
    """
    (folder / "exported.cpp").write_text(EXPORTED)
    (folder / "caller.cpp").write_text(CALLER)
    includes = [f"-I{EMULATOR / 'src'}", f"-I{ACL_HEADERS}", f"-I{ACL_HEADERS / 'acl'}"]
    options = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Werror"]
    library, program = folder / "libexported.so", folder / "caller"
    for name, *arguments in (
        ("exported.cpp", *includes, "-shared", "-o", str(library)),
        ("caller.cpp", "-ldl", "-o", str(program)),
    ):
        subprocess.run([compiler, *options, str(folder / name), *arguments], check=True)
    return [str(program), str(library)]


def user_mode_qemu() -> list[str] | None:
    """Return the command that runs a program for aarch64 on this machine.

    Programs then load the shared libraries that belong to the aarch64 compiler.
    """
    programs = ("qemu-aarch64-static", "qemu-aarch64")
    if not (qemu := next(filter(None, map(shutil.which, programs)), None)):
        return None
    query = [AARCH64, "-print-file-name=libc.so.6"]
    library = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
    return [qemu, "-L", str(Path(library).resolve().parents[1])]


def run_exported_call(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_an_exported_function_gets_every_kind_of_argument(tmp_path):
    command = build_exported_call("g++", tmp_path)

    assert run_exported_call(command) == f"2 {TOTAL:.17g} 23 23"


@needs_cross_compiler
def test_an_exported_function_gets_every_kind_of_argument_on_aarch64(tmp_path):
    command = build_exported_call(AARCH64, tmp_path)
    if (qemu := user_mode_qemu()) is None:
        pytest.skip("compiled; there is no qemu-aarch64 to run it")

    assert run_exported_call([*qemu, *command]) == f"2 {TOTAL:.17g} 23 23"


@needs_cross_compiler
@pytest.mark.parametrize("source", ["kernels/convert", "hccl/reduce", "hccl.1"])
def test_sources_that_depend_on_the_processor_compile_for_aarch64(source, tmp_path):
    build = tmp_path / "build"

    target = [f"B={build}", f"CXX={AARCH64}", f"{build}/{source}.o"]
    make = ["make", "-C", str(EMULATOR), f"PYTHON={sys.executable}", *target]
    done = subprocess.run(make, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
