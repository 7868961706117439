"""Optimizers of `torch.optim` whose step is no function of one gradient that could be credited."""

from torch.optim import LBFGS, Rprop, SparseAdam

from inrun.optimizers.base import refuse_optimizer

refuse_optimizer(
    LBFGS,
    "its step evaluates the closure several times and searches along a line, so no single batch "
    "gradient explains it. Train with AdamW, SGD or Muon to measure data values.",
)
refuse_optimizer(
    Rprop,
    "it uses only the signs of successive gradients and is meant for full batches, where the "
    "examples of a step cannot be told apart by its update. Use SGD or RMSprop instead.",
)
refuse_optimizer(
    SparseAdam,
    "it takes sparse gradients, whose untouched rows keep stale moments; captured gradients are "
    "dense. Use AdamW with nn.Embedding(sparse=False) instead.",
)
_IN_BACKWARD = (
    "it steps during backward(), parameter by parameter, and moves weights before all gradients of "
    "the batch are known, so no coalition of the batch has a step. Use an optimizer that steps "
    "after backward()"
)
for name in (
    "transformers.LayerWiseDummyOptimizer", "lomo_optim.Lomo", "lomo_optim.AdaLomo",
    "pytorch_optimizer.LOMO", "pytorch_optimizer.AdaLOMO",
):  # fmt: skip
    refuse_optimizer(name, _IN_BACKWARD)
