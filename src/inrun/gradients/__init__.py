"""Rules for the operations in which parameters take part, one file per family."""

from inrun.gradients import (
    attention,
    conv,
    elementwise,
    embedding,
    fused_libraries,
    linear,
    norm,
    recurrent,
)
from inrun.gradients.call import Call, Form, OpRule, op_rule, register_op, replay
from inrun.gradients.records import Dense, Record

__all__ = [
    "Call",
    "Dense",
    "Form",
    "OpRule",
    "Record",
    "attention",
    "conv",
    "elementwise",
    "embedding",
    "fused_libraries",
    "linear",
    "norm",
    "op_rule",
    "recurrent",
    "register_op",
    "replay",
]  # fmt: skip
