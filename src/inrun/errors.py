"""The errors users meet. Each says what, where, why and what to do."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from inrun.gradients import Call


OWNERS = (
    "Where examples have no row of their own (packed sequences, flattened tokens, the nodes of a "
    "graph batch), say whose each position is with run.batch(ids, owner=...)."
)


class CaptureError(RuntimeError):
    """A parameter cannot be scored: the message names it, the operation and the ways out."""


class BatchError(ValueError):
    """Ids that do not fit the batch, or a batch used in the wrong place."""


class ValidationError(ValueError):
    """The validation data or its loss cannot be used."""


def refusal(call: Call, outs: Sequence[Tensor], why: str) -> CaptureError:
    """For an operation of a parameter and examples that cannot be scored."""
    names = sorted({r for n in call.nodes if n is not None for r in n.roots})
    inputs = [tuple(x.shape) for x in call.leaves if isinstance(x, Tensor)]
    return CaptureError(
        f"parameter {', '.join(names)} takes part in the operation '{call.name}' "
        f"(inputs of shape {inputs}, output {[tuple(t.shape) for t in outs]}), and {why}. "
        "If the batch dimension is not the first, pass watch(..., batch_dim=...). A constant that "
        f"is not part of the model should be one of its buffers (register_buffer). {OWNERS} "
        "Otherwise leave the "
        f"parameter out with watch(..., ignore={names!r}), or teach inrun the operation with "
        "inrun.register_layout (where the examples are in its output) and inrun.register_op "
        "(docs/operations.md)."
    )


def unproven_rows(name: str, operation: str) -> CaptureError:
    """For an input that has as many entries as the batch has examples, perhaps by chance."""
    return CaptureError(
        f"the model's input {name} has one entry for each id, and a parameter meets it in "
        f"'{operation}', but nothing shows that entry k belongs to ids[k]: no operation lays its "
        "rows beside the batch's, and it was seen with one batch size only. If it does belong to "
        "the examples, use validation batches of another size than the training batches: that "
        "shows it. If it does not (a memory, a list of classes), make it a buffer of the model "
        "(register_buffer)."
    )


def list_of_examples(name: str, B: int, dim: int) -> CaptureError:
    """For a list of as many tensors as examples, each with as many entries."""
    return CaptureError(
        f"the model receives {name}, a list of {B} tensors that have size {B} in dimension {dim}: "
        f"with {B} ids each tensor may be one example, or hold a row of every example. Give the "
        f"model one tensor (torch.stack) with the examples in dimension {dim}, or use another "
        "batch size first: that shows which it is."
    )


def no_positions(name: str, shape: tuple[int, ...], dtype: Any) -> BatchError:
    """For tokens=True and an input whose two leading dimensions are not examples and positions."""
    return BatchError(
        f"run.batch(ids, tokens=True) gives each position of the model's input a value, and {name} "
        f"({dtype}, shape {shape}) has no dimension of positions after that of the examples: it "
        "takes integers [B, T] or vectors [B, T, ...]. Leave out tokens=True for this model."
    )


def mixed_positions(error: CaptureError) -> CaptureError:
    """For tokens=True in a batch that is refused, perhaps because of it."""
    return CaptureError(
        f"run.batch(ids, tokens=True) tells positions apart, not only examples, so it refuses "
        "operations that compute one position from others with the same parameters (recurrence and "
        "convolution over positions, a token that the model adds). Without tokens=True such a "
        f"model may be scored. Here: {error}"
    )


def two_dimensions(name: str, shape: tuple[int, ...], batch_dim: int, dim: int) -> CaptureError:
    """For an input two of whose dimensions could hold the examples: the loop has transposed it."""
    return CaptureError(
        f"the model receives {name} of shape {shape}, which the loop made inside run.batch(ids) by "
        f"moving the dimensions of a tensor: the examples may be in dimension {batch_dim}, as "
        f"batch_dim={batch_dim} says, or in dimension {dim}, where the rows of that tensor went; "
        "both have one entry for each id. Make the model's input before the with block: then "
        f"dimension {batch_dim} counts (watch(..., batch_dim=...) names another)."
    )


def random_parameter(operation: str, roots: Collection[str]) -> CaptureError:
    """For dropout and the like on a tensor made of parameters alone."""
    names = sorted(roots)
    return CaptureError(
        f"parameter {', '.join(names)} goes through '{operation}' before it meets an example: its "
        "random choice cannot be made again when the parameter is scored. Apply it after the "
        f"example is there, or leave it out with watch(..., ignore={names!r})."
    )


def written_to() -> CaptureError:
    """For a tensor that is overwritten in a compiled graph; elsewhere a copy is kept."""
    return CaptureError(
        "a buffer that a parameter is combined with inside a compiled graph (a mask on weights, "
        "say) was written to in place before optimizer.step(), so what it held for an earlier "
        "micro-batch is gone. Assign a new tensor to the buffer instead of writing to it "
        "(self.mask = torch.bernoulli(...)), or take one micro-batch per step."
    )


def overwritten(call: Any) -> CaptureError:
    """For an input of an operation, or its gradient, that is written to after the backward pass."""
    roots = sorted({r for n in call.nodes if n is not None for r in n.roots})
    shapes = [tuple(x.shape) for x in call.leaves if isinstance(x, Tensor)]
    return CaptureError(
        f"a tensor that parameter {', '.join(roots)} met in '{call.name}' (operands of shape "
        f"{shapes}), or the gradient that came back from there, was written to in place between "
        "backward() and optimizer.step(), so what it held for the batch is gone. Write to a copy "
        "(x.clone()), or make a new tensor instead."
    )


def nested(nodes: Collection[Any]) -> CaptureError:
    """For a nested tensor: rows of different lengths in one tensor."""
    names = sorted({r for n in nodes for r in n.roots})
    return CaptureError(
        f"parameter {', '.join(names)} meets a nested tensor (torch.nested, jagged or strided), "
        "whose examples have different lengths; inrun has no rules for these. Pad the sequences to "
        "one length (torch.nested.to_padded_tensor, torch.nn.utils.rnn.pad_sequence) and mask the "
        "padding in attention and loss."
    )


def transformed(names: Collection[str]) -> CaptureError:
    """For torch.func: vmap hides the examples' dimension, and gradients inside grad are not those
    of the training."""
    return CaptureError(
        f"parameter {', '.join(sorted(names))} is used inside a transformation of torch.func "
        "(vmap, grad, jvp, ...), where inrun cannot tell the examples apart. Call the model on the "
        "whole batch without vmap (an ensemble: one module after the other); what is not trained "
        "on belongs under torch.no_grad() or outside run.batch(ids). Otherwise leave the parameter "
        f"out with watch(..., ignore={sorted(names)!r})."
    )


def unseen_function(name: str, names: Sequence[str]) -> CaptureError:
    """For a custom autograd function: torch shows what it computes, but not its derivative."""
    function = name.removesuffix("Backward")
    loha = "This is peft's LoHa: use LoKr or LoRA. " if function.startswith("Hada") else ""
    return CaptureError(
        f"parameter {', '.join(sorted(names)[:5])} goes through the custom autograd function "
        f"'{function}' before it meets an example, and inrun does not know its derivative. {loha}"
        "Write the function with torch's own operations (a loss fused with its head: describe it, "
        "see inrun.register_function), or leave the parameter out with "
        f"watch(..., ignore={sorted(names)[:5]!r})."
    )


def complex_parameters(names: Sequence[str]) -> CaptureError:
    """For complex parameters: update maps are functions of real numbers."""
    return CaptureError(
        f"parameter {', '.join(names[:5])} is complex, and the optimizer's update of complex "
        "numbers cannot be scored. Keep it as a real parameter of pairs, "
        "nn.Parameter(torch.view_as_real(w)), and use torch.view_as_complex(self.w) in forward(): "
        "torch's own optimizers treat a complex parameter as just these pairs, so the training is "
        "the same."
    )


def data_without_ids(names: Collection[str]) -> CaptureError:
    """For a loss that depends on parameters through data that is not the batch."""
    return CaptureError(
        f"the loss depends on parameter {', '.join(sorted(names)[:3])} through data that is not "
        "the batch of run.batch(ids), or through random numbers: these have no ids, so what they "
        "do to the model would be credited to nobody. Pass an id for every row of all that the "
        "model is called with inside the block, or detach this part of the loss. A constant (the "
        "weights before fine-tuning, say) should be a buffer of the model (register_buffer)."
    )


def number_of_all(names: Collection[str], operation: str) -> CaptureError:
    """For a loss in which parameters meet a number made of all examples other than by adding."""
    return CaptureError(
        f"parameter {', '.join(sorted(names)[:3])} meets a number that is made of all examples "
        f"(the mean of their losses, say) in the operation '{operation}': what each of them does "
        "to it cannot be told. Let it meet the loss of each example (reduction='none') and take "
        "the mean after that; add a penalty on weights to the loss last."
    )


def nothing_recorded(
    B: int, batch_dim: int, owner: tuple[int, ...] | None, shapes: Sequence[tuple[int, ...]]
) -> BatchError:
    """For a batch without records. ``shapes``: the inputs, if no parameter met an example;
    ``owner``: the shape of owner=."""
    if shapes and owner is not None:
        return BatchError(
            f"owner has shape {owner}, but no tensor that entered the model has these leading "
            f"dimensions; shapes seen: {list(shapes[:4])}. owner[r, t] = k says that position t of "
            "row r of the model's inputs belongs to ids[k] (of inputs without rows: owner[t])."
        )
    if shapes:
        return BatchError(
            f"run.batch got {B} ids, but no tensor that entered the model has size {B} in "
            f"dimension {batch_dim}; shapes seen: {list(shapes[:4])}. Pass one id per example, or "
            f"watch(..., batch_dim=...) if the examples are elsewhere. {OWNERS}"
        )
    return BatchError(
        "no backward() ran from an example through the model inside run.batch(ids), so there is "
        "nothing to score. Make the batch before the with block, and call the forward pass and "
        "loss.backward() inside it, with the model's own parameters (torch.func.functional_call "
        "and stack_module_state may have been given copies)."
    )
