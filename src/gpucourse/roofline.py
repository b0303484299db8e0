"""The roofline bound: no faster than the arithmetic, no faster than the bytes.

All of it is imported from here; it stands in six files, one idea each: `work` counts what an operation must do,
`bound` holds what a device can do and the larger of the two times, `call_work` reads the work off a trace,
`measured_roof` measures the ceilings, `step_budget` explains a whole
step, and `shape_ceilings` measures its calls alone. The arithmetic needs no torch.

>>> roof = Roofline(peak_flops=989e12, bandwidth=4.8e12)
>>> add = elementwise_work(2**24, reads=(4, 4), writes=(4,), flops_per_element=1)
>>> roof.least_time(add).bound, round(roof.least_time(add).time_ms * 1e3, 1)
('memory', 41.9)
"""

from __future__ import annotations

from gpucourse.bound import (
    LeastTime,
    Roofline,
    RooflineInputError,
    RooflineInputs,
    compute_c12,
    is_finite,
    validate_shapes_and_units,
)
from gpucourse.call_work import Missing, family_of, generated_arguments, work_of_call
from gpucourse.measured_roof import Ceiling, MeasuredRoofline, measure_roofline, sustained
from gpucourse.shape_ceilings import shape_ceilings
from gpucourse.step_budget import BudgetRow, StepBudget, step_budget
from gpucourse.work import (
    Step,
    Work,
    attention_work,
    convolution_work,
    elementwise_work,
    layer_norm_backward_work,
    layer_norm_steps,
    layer_norm_work,
    linear_backward_work,
    matmul_work,
    matrix_vector_work,
    softmax_backward_work,
    softmax_steps,
    softmax_work,
)

__all__ = [
    "METHOD_VERSION",
    "BudgetRow",
    "Ceiling",
    "LeastTime",
    "MeasuredRoofline",
    "Missing",
    "Roofline",
    "RooflineInputError",
    "RooflineInputs",
    "Step",
    "StepBudget",
    "Work",
    "attention_work",
    "compute_c12",
    "convolution_work",
    "elementwise_work",
    "family_of",
    "generated_arguments",
    "is_finite",
    "layer_norm_backward_work",
    "layer_norm_steps",
    "layer_norm_work",
    "linear_backward_work",
    "matmul_work",
    "matrix_vector_work",
    "measure_roofline",
    "shape_ceilings",
    "softmax_backward_work",
    "softmax_steps",
    "softmax_work",
    "step_budget",
    "sustained",
    "validate_shapes_and_units",
    "work_of_call",
]

METHOD_VERSION = 3  # rises when a counting rule, the way a ceiling is measured or a budget is made changes
