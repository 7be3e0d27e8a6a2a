"""Every Triton kernel compiles without a GPU, within bounds (aot.py), and aot.py sees what it has to see."""

import os
import subprocess
import sys

import pytest

aot = pytest.importorskip("aot", reason="needs Triton")

LOOP = """
#loc1 = loc("x.py":1:1)
module attributes {"ttg.num-warps" = 4 : i32} {
  tt.func public @kernel(%x: !tt.tensordesc<64x64xbf16> loc(#loc1)) {
    %zero = arith.constant dense<0.0> : tensor<64x64xf32> loc(#loc1)
    %a = tt.descriptor_load %x[%c0, %c0] : !tt.tensordesc<64x64xbf16> -> tensor<64x64xbf16> loc(#loc1)
    %t = tt.trans %a {order = array<i32: 1, 0>} : tensor<64x64xbf16> -> tensor<64x64xbf16> loc(#loc1)
    %s:2 = scf.for %i = %c0 to %n step %c1 iter_args(%acc = %zero, %state = %zero) -> (tensor<64x64xf32>, tensor<64x64xf32>) : i32 {
      %p = tt.dot %a, %t, %acc, inputPrecision = tf32 : tensor<64x64xbf16> * tensor<64x64xbf16> -> tensor<64x64xf32> loc(#loc1)
      %b = arith.truncf %state : tensor<64x64xf32> to tensor<64x64xbf16> loc(#loc1)
      %r = tt.dot %b, %a, %state, inputPrecision = tf32 : tensor<64x64xbf16> * tensor<64x64xbf16> -> tensor<64x64xf32> loc(#loc1)
      scf.yield %p, %r : tensor<64x64xf32>, tensor<64x64xf32> loc(#loc1)
    } loc(#loc1)
    %w = arith.truncf %s#0 : tensor<64x64xf32> to tensor<64x64xbf16> loc(#loc1)
    %b = tt.trans %w {order = array<i32: 1, 0>} : tensor<64x64xbf16> -> tensor<64x64xbf16> loc(#loc1)
    END
    tt.return loc(#loc1)
  } loc(#loc1)
} loc(#loc1)
"""


@pytest.mark.parametrize(
    "line, found",
    [
        ("%y = tt.dot %w, %a, %zero", []),  # a dot's result as it is
        ("%y = tt.dot %t, %a, %zero", []),  # the transpose of what was loaded
        ("%y = tt.dot %a, %a, %b", []),  # the transpose is the accumulator
        ("%y = tt.dot %b, %a, %zero", ["%y.1"]),  # through a loop, rounded, transposed
        ("%y = tt.dot %a, %b, %zero", ["%y.1"]),
    ],
)
def test_transposed_results_are_found(line, found):
    assert aot.transposed_results(LOOP.replace("END", f"{line} : tensor<64x64xbf16> -> tensor<64x64xf32> loc(#loc1)")) == found


def test_results_are_followed_through_branches_and_out_of_loops():
    carried = LOOP.replace("%p = tt.dot %a, %t, %acc", "%p = arith.addf %acc, %acc").replace(
        "= arith.truncf %state", "= tt.trans %state"
    )
    assert aot.transposed_results(carried.replace("END", "")) == ["%r.1"]
    branch = """%o = scf.if %c -> (tensor<64x64xbf16>) {
      scf.yield %b : tensor<64x64xbf16> loc(#loc1)
    } else {
      scf.yield %a : tensor<64x64xbf16> loc(#loc1)
    } loc(#loc1)
    %y = tt.dot %o, %a, %zero : tensor<64x64xbf16> -> tensor<64x64xf32>"""
    assert aot.transposed_results(LOOP.replace("END", branch)) == ["%y.1"]


def run(root, *words):
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "tests/aot.py", *words], cwd=root, capture_output=True, text=True, env=environment)


def test_every_kernel_compiles_within_bounds(root):
    done = run(root, "quick")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.slow
def test_every_kernel_compiles_in_every_type_on_every_part(root):
    done = run(root)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_bad_arguments(root):
    done = run(root, "sm_70")
    assert done.returncode == 1 and done.stderr.startswith("error: sm_70: known are quick, ")
