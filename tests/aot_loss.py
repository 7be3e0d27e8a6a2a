"""Every entry of the launch tables of kernels/triton_loss.py for `aot.py`."""

from kernels import triton_loss as loss


def cases(architecture):
    for size, kind in ((2, "bf16"), (4, "fp32")):
        signature = {"logits": f"*{kind}", "labels": "*i64", "nll": "*fp32", "scale": "*fp32", "width": "i32:16", "V": "i32"}
        for gradient, scaled in ((True, False), (True, True), (False, False))[: 3 if size == 2 else 1]:
            constants = {"GRADIENT": gradient, "SCALED": scaled}
            options = loss.row_options(loss.LAUNCH[architecture, size]["cross_entropy"], 50304, gradient)
            yield f"cross_entropy {kind} {gradient=} {scaled=}", loss.cross_entropy_kernel, signature, constants, options, 0
