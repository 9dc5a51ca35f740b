"""Peak rates: the floating-point operations that a device can do in a second."""

import re
from typing import Final

# Words that a device's name must contain, the more demanding first, and its peaks in TFLOP/s.
_PEAKS: Final[tuple[tuple[str, dict[str, float]], ...]] = (
    ("a100", {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312}),
    ("h100 pcie", {"fp32": 51.2, "tf32": 378, "bf16": 756, "fp16": 756}),
    ("h100 nvl", {"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5}),
    ("h100", {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4}),
    ("h200 nvl", {"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5}),
    ("h200", {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4}),
    ("b200", {"fp32": 75, "tf32": 1125, "bf16": 2250, "fp16": 2250}),
    ("l4", {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121}),
    ("l40s", {"fp32": 91.6, "tf32": 183, "bf16": 362.05, "fp16": 362.05}),
    ("a10g", {"fp32": 35, "tf32": 35, "bf16": 70, "fp16": 70}),
    ("v100 pcie", {"fp32": 14, "fp16": 112}),
    ("v100", {"fp32": 15.7, "fp16": 125}),
    ("t4", {"fp32": 8.1, "fp16": 65}),
    ("4090", {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2}),
    ("3090", {"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71}),
    ("mi250x", {"fp32": 47.9, "bf16": 191.5, "fp16": 191.5}),
    ("mi300x", {"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4}),
)
# A part of a device, or a smaller one of the same number.
_LESSER: Final = frozenset(("mig", "grid", "laptop", "mobile", "d", "ti", "max"))


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the floating-point operations that a device can do in a second, without sparsity.

    From the makers' data sheets and architecture papers (NVIDIA A100, H100, H200, HGX B200, L4, L40S,
    A10G, V100, T4, Ada and GA102; AMD CDNA 2 and 3): of matrix units, accumulating in ``fp32``, where
    a device has them for the precision, else of vector units. ``fp32`` of AMD's counts matrix units.
    torch shows the two halves of an MI250X as two devices, so half of its figures count.

    Args:
        device_name: As ``torch.cuda.get_device_name()`` returns it.
        precision: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.

    Returns:
        Operations per second; None for a device, a part of one, or a precision that is not known.
    """
    words = frozenset(re.split(r"[^a-z0-9]+", device_name.lower()))
    if words & _LESSER:
        return None
    for wanted, peaks in _PEAKS:
        if words.issuperset(wanted.split()):
            tera = peaks.get(precision)
            return None if tera is None else tera * 1e12
    return None
