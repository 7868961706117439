"""Each use of torch's private API does what ``inrun.torch_compat`` says it does."""

import re
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from inrun import torch_compat as compat

SOURCE = Path(compat.__file__).parent
PRIVATE = re.compile(
    r"torch(\.\w+)*\._(?!_)"  # torch._C, torch.utils._pytree, from torch._dynamo import
    r"|from torch[\w.]* import [^#\n]*\b_"
    r"|\._(version|base|is_view|modules|parameters|buffers|backward_hooks|forward_\w*hooks)\b"
    r"|[\"']_(saved_\w+|orig_mod|torchdynamo\w+|modules|parameters|buffers|\w+_hooks)\b"
    r"|_getframe"
)


@pytest.fixture(autouse=True)
def _fresh():
    yield
    torch.compiler.reset()


def test_nothing_else_touches_private_torch():
    touched = [
        f"{path.relative_to(SOURCE)}:{i}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        if path.name != "torch_compat.py"
        for i, line in enumerate(path.read_text().splitlines(), 1)
        if PRIVATE.search(line)
    ]
    assert not touched, "move these to torch_compat.py"


@pytest.mark.parametrize(
    "line",
    ["torch._C.DisableTorchFunction()", "from torch.utils._pytree import tree_map", "t._version",
     "torch.ops.aten._unsafe_view(x)", 'getattr(model, "_orig_mod", model)',
     "from torch.nn.modules.batchnorm import _NormBase"],
)  # fmt: skip
def test_the_search_finds_what_it_should(line):
    assert PRIVATE.search(line)


# Tensors


def test_versions_count_writes_in_place():
    t = torch.zeros(3)
    before = compat.version_of(t)
    t + 1
    assert compat.version_of(t) == before
    t.add_(1)
    assert compat.version_of(t) > before


def test_the_base_of_a_view():
    t = torch.zeros(4)
    assert compat.base_of(t) is None
    assert compat.base_of(t.view(2, 2)) is t


def test_hooks_of_a_tensor():
    w = nn.Parameter(torch.zeros(2))
    assert not compat.hooks_of_tensor(w)
    handle = w.register_hook(lambda g: g)
    assert compat.hooks_of_tensor(w)
    handle.remove()
    assert not compat.hooks_of_tensor(w)


def test_an_unsafe_view_shares_memory_and_is_no_view():
    t = torch.arange(6.0)
    out = compat.unsafe_view(t, (2, 3))
    assert out.data_ptr() == t.data_ptr() and out.shape == (2, 3)
    assert compat.base_of(out) is None


def test_one_flat_tensor_in_the_shapes_of_others():
    flat = torch.arange(5.0)
    a, b = compat.unflatten_dense_tensors(flat, [torch.empty(2), torch.empty(3, 1)])
    assert torch.equal(compat.flatten_dense_tensors([a, b]), flat)
    assert a.tolist() == [0, 1] and b.tolist() == [[2], [3], [4]]
    assert a.data_ptr() == flat.data_ptr()


def test_work_on_many_tensors():
    a, b = [torch.ones(2), torch.ones(3)], [torch.zeros(2), torch.zeros(3)]
    compat.foreach_add_(b, 2.0)
    assert [t.tolist() for t in compat.foreach_sub(b, a)] == [[1, 1], [1, 1, 1]]
    assert [t.tolist() for t in compat.foreach_mul(b, 3.0)] == [[6, 6], [6, 6, 6]]
    assert [float(n) for n in compat.foreach_norm(b, float("inf"))] == [2, 2]
    compat.foreach_copy_(b, a)
    assert torch.equal(b[1], a[1])
    compat.foreach_zero_(b)
    assert not any(t.any() for t in b)


def test_trees():
    tree = {"a": [1, (2,)], "b": 3}
    leaves, spec = compat.tree_flatten(tree)
    assert leaves == compat.tree_leaves(tree) == [1, 2, 3]
    assert isinstance(spec, compat.TreeSpec)
    assert compat.tree_unflatten(leaves, spec) == tree
    assert compat.tree_map(str, tree) == {"a": ["1", ("2",)], "b": "3"}


# Modules


def test_what_a_module_holds():
    norm = nn.BatchNorm1d(2)
    model = nn.Sequential(norm)
    assert set(compat.parameters_of(norm)) == {"weight", "bias"}
    assert set(compat.buffers_of(norm)) == {
        "running_mean", "running_var", "num_batches_tracked",
    }  # fmt: skip
    assert compat.children_of(model) == {"0": norm}
    assert [vars(norm)[k] for k in compat.MODULE_STORES] == [
        compat.buffers_of(norm), compat.parameters_of(norm), compat.children_of(norm),
    ]  # fmt: skip
    assert isinstance(norm, compat.NormBase) and not isinstance(nn.LayerNorm(2), compat.NormBase)
    own = set(vars(norm)) - compat.MODULE_ATTRIBUTES
    assert own == {"num_features", "eps", "momentum", "affine", "track_running_stats"}


def test_a_parameter_can_be_exchanged_in_place():
    layer = nn.Linear(2, 2)
    other = nn.Parameter(torch.zeros(2, 2))
    compat.parameters_of(layer)["weight"] = other
    assert layer.weight is other


def test_hooks_of_a_module():
    def found(module):
        return [name for name in compat.MODULE_HOOKS if vars(module)[name]]

    for i, register in enumerate(
        ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
         "register_full_backward_pre_hook"]
    ):  # fmt: skip
        module = nn.Linear(2, 2)
        assert not found(module)
        getattr(module, register)(lambda *args: None)
        assert found(module) == [compat.MODULE_HOOKS[i]]


# Autograd


@pytest.mark.parametrize(
    ("operation", "saves"),
    [(torch.exp, True), (torch.tanh, True), (torch.sqrt, True), (torch.sin, False),
     (lambda x: F.linear(x, x), False), (lambda x: torch.softmax(x, -1), True)],
)  # fmt: skip
def test_operations_that_save_their_output(operation, saves):
    out = operation(torch.ones(2, 2, requires_grad=True))
    assert any(hasattr(out.grad_fn, name) for name in compat.SAVES_OUTPUT) == saves
    out.mul_(2)  # autograd says the same
    if saves:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    else:
        out.sum().backward()


def test_layer_norm_saves_its_statistics():
    x = torch.randn(3, 5, requires_grad=True)
    out = F.layer_norm(x, (5,), torch.ones(5), torch.zeros(5))
    mean, rstd = (getattr(out.grad_fn, name) for name in compat.LAYER_NORM_STATISTICS)
    assert torch.allclose(mean.flatten(), x.mean(1))
    assert torch.allclose(rstd.flatten(), (x.var(1, correction=0) + 1e-5).rsqrt())


def test_saved_tensors_hooks_are_seen():
    assert not compat.saved_tensors_hooks()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert compat.saved_tensors_hooks()
    assert not compat.saved_tensors_hooks()


def test_the_backward_pass_is_seen():
    seen = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: seen.append(compat.in_backward()))
    assert not compat.in_backward()
    y.backward()
    assert seen == [True] and not compat.in_backward()


# Dispatch of torch's functions


class Calls(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_modes_see_nothing_where_torch_function_is_disabled():
    with Calls() as calls:
        with compat.DisableTorchFunction():
            torch.ones(2).sin()
        assert calls.names == []
        torch.ones(2).sin()
    assert "sin" in calls.names


def test_transformations_are_seen_and_unwrapped():
    inner, active = [], []

    def f(x):
        inner.append(compat.unwrapped(x))
        active.append(compat.functorch_transforms_active())
        return (x * x).sum()

    x = torch.ones(3, 2)
    torch.vmap(torch.func.grad(f))(x)
    assert active == [True] and not compat.functorch_transforms_active()
    assert inner[0].shape == x.shape and inner[0].data_ptr() == x.data_ptr()
    assert compat.unwrapped(x) is x


def test_composite_functions_come_in_parts():
    body = compat.composite(F.multi_head_attention_forward)
    layer, x = nn.MultiheadAttention(4, 2), torch.randn(3, 1, 4)
    args = (x, x, x, 4, 2, layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0,
            layer.out_proj.weight, layer.out_proj.bias)  # fmt: skip
    with Calls() as calls:
        out = body(*args)
    assert "linear" in calls.names and "multi_head_attention_forward" not in calls.names
    assert torch.equal(out[0], F.multi_head_attention_forward(*args)[0])
    assert compat.composite(torch.sin) is None
    assert compat.composite(lambda x: x) is None


# torch.compile


def test_fake_tensors_have_no_data():
    with compat.FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.zeros(2, 3), static_shapes=True)
        assert isinstance(fake, compat.FakeTensor) and (fake @ fake.T).shape == (2, 2)


def test_skipped_code_is_not_compiled_and_sees_that_what_it_calls_is():
    graphs, seen = [], []

    def inner(x):
        return x.sin()

    def skipped(x):
        seen.append(compat.get_eval_frame_callback() is not None)
        return inner(x.cos())

    def backend(gm, inputs):
        graphs.append([str(n.target) for n in gm.graph.nodes if n.op == "call_method"])
        return gm

    compat.skip_code(skipped.__code__)
    torch.compile(skipped, backend=backend)(torch.ones(2))
    assert graphs == [["sin"]]
    skipped(torch.ones(2))
    assert seen == [True, False]


def test_the_model_inside_a_compiled_one():
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    assert compat.uncompiled(compiled) is compat.uncompiled(model) is model
    names = [name.removeprefix(compat.COMPILED_PREFIX) for name, _ in compiled.named_parameters()]
    assert names == ["weight", "bias"]


def test_operators_that_take_a_graph():
    assert isinstance(torch.ops.higher_order.cond, compat.HigherOrderOperator)
    assert not isinstance(torch.ops.aten.sin, compat.HigherOrderOperator)


def test_settings_for_gradients_in_any_layout():
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    before = inductor.bw_outputs_user_visible, functorch.force_non_lazy_backward_lowering
    with compat.gradients_in_any_layout():
        assert not inductor.bw_outputs_user_visible
        assert functorch.force_non_lazy_backward_lowering
    assert before == (
        inductor.bw_outputs_user_visible, functorch.force_non_lazy_backward_lowering,
    )  # fmt: skip


def backends_found(*calls):
    """The user's backends that ours finds while it takes their place."""
    found = []

    def ours(gm, inputs):
        backend = compat.compile_backend()
        found.append(getattr(backend, "compiler_fn", backend))  # torch.compile wraps functions
        return gm

    with torch.compiler.set_stance("default", force_backend=ours):
        for call in calls:
            call(torch.ones(2))
    return found


class Tanh(nn.Module):
    def forward(self, x):
        return x.tanh()


def one(gm, inputs):
    return gm


def another(gm, inputs):
    return gm


def test_the_users_backend_is_found_for_each_graph():
    inner = torch.compile(lambda x: x.tan(), backend=another)

    @torch.compiler.disable
    def elsewhere(x):
        return inner(x)

    def broken(x):
        return elsewhere(x.sin()).cos()

    module = Tanh()
    module.compile(backend=another)
    found = backends_found(
        torch.compile(lambda x: x.sin(), backend=one), torch.compile(nn.ReLU(), backend=another),
        module, torch.compile(broken, backend=one), torch.compile(lambda x: x.exp()),
    )  # fmt: skip
    assert found[:-1] == [one, another, another, one, another, one]
    assert compat.is_inductor(found[-1]) and not compat.is_inductor(one)


def test_a_torch_that_is_built_differently(monkeypatch):
    """The backend if there is one only; otherwise inductor, and a warning says so."""
    torch.compiler.reset()
    monkeypatch.setattr(compat, "_COMPILED_CALL", None)
    assert backends_found(torch.compile(lambda x: x.sin(), backend=one)) == [one]
    torch.compile(lambda x: x, backend=another)
    with pytest.warns(RuntimeWarning, match="cannot find the backend that torch.compile was given"):
        found = backends_found(torch.compile(lambda x: x.cos(), backend=one))
    x = torch.ones(2)
    graph = torch.fx.symbolic_trace(lambda x: (x.cos(),))
    assert callable(found[0]) and found[0].__module__.startswith("torch._dynamo.backends")
    assert torch.equal(found[0](graph, [x])(x)[0], x.cos())


def test_torch_is_built_as_expected():
    assert compat._COMPILED_CALL is not None


# CUDA graphs


def asked_in_a_thread():
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(torch.cuda.is_current_stream_capturing())
    )
    thread.start()
    thread.join()
    return answers[0]


@pytest.fixture
def _no_capture(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.mark.usefixtures("_no_capture")
def test_only_the_thread_of_a_trial_hears_of_a_capture():
    own = torch.cuda.is_current_stream_capturing
    with pytest.raises(KeyError), compat.pretend_capture():
        assert torch.cuda.is_current_stream_capturing() and not asked_in_a_thread()
        with compat.pretend_capture():
            assert torch.cuda.is_current_stream_capturing()
        assert torch.cuda.is_current_stream_capturing()
        raise KeyError
    assert torch.cuda.is_current_stream_capturing is own


@pytest.mark.usefixtures("_no_capture")
def test_trials_of_two_threads_overlap():
    own, inside, leave = (
        torch.cuda.is_current_stream_capturing,
        threading.Event(),
        threading.Event(),
    )
    answers = []

    def trial():
        with compat.pretend_capture():
            inside.set()
            leave.wait(10)
            answers.append(torch.cuda.is_current_stream_capturing())

    thread = threading.Thread(target=trial)
    with compat.pretend_capture():
        thread.start()
        inside.wait(10)
    assert not torch.cuda.is_current_stream_capturing()  # this thread has left, the other has not
    leave.set()
    thread.join()
    assert answers == [True] and torch.cuda.is_current_stream_capturing is own


@pytest.mark.usefixtures("_no_capture")
def test_a_function_that_replaced_ours_stays(monkeypatch):
    def theirs():
        return False

    with compat.pretend_capture():
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", theirs)
    assert torch.cuda.is_current_stream_capturing is theirs
