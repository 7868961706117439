"""Rules for the operations in which parameters take part, one file per family."""

from inrun.ops import attention, conv, elementwise, embedding, linear, norm
from inrun.ops.call import Call, Form, OpRule, op_rule, register_op, replay
from inrun.ops.records import Dense, Record

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
    "linear",
    "norm",
    "op_rule",
    "register_op",
    "replay",
]  # fmt: skip
