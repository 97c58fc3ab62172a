"""One operator of op_db: its sample inputs cut in every way, against the plain op."""

from __future__ import annotations

import enum
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_map

from shardfield._report import report
from shardfield.domain_parallel import ShardTensor, shard_tensor

RTOL, ATOL = 1e-8, 1e-9
SAMPLES = 6

# Their values depend on uninitialised memory or on the generator's stream, so only the sizes are
# compared; the masks and fills of the library's own generator have their own tests.
VALUES_DIFFER = {
    "bernoulli",
    "cauchy",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "exponential",
    "geometric",
    "log_normal",
    "multinomial",
    "new_empty",
    "new_empty_strided",
    "nn.functional.alpha_dropout",
    "nn.functional.dropout",
    "nn.functional.dropout2d",
    "nn.functional.dropout3d",
    "nn.functional.feature_alpha_dropout",
    "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d",
    "nn.functional.multi_head_attention_forward",
    "nn.functional.rrelu",
    "normal",
    "pca_lowrank",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "svd_lowrank",
    "uniform",
}


class Verdict(enum.IntEnum):
    """What a call did, from best to worst."""

    SHARDED = 0
    GATHERED = 1
    REFUSED = 2
    WRONG = 3
    HUNG = 4
    CRASHED = 5


@dataclass(frozen=True)
class Outcome:
    """The verdict on one call: operator, sample number, cut dim, what the others were."""

    operator: str
    sample: int
    dim: int
    others: str
    verdict: Verdict
    detail: str = ""


def _op_db() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from torch.testing._internal.common_methods_invocations import op_db
        except ModuleNotFoundError as error:
            raise ImportError(
                f"selftest: PyTorch's list of operators needs the package {error.name}; "
                f"pip install {error.name}"
            ) from error
    return op_db


def operator_names() -> list[str]:
    """Full names of the operators in op_db, variants after a dot, in its order."""
    return [op.full_name for op in _op_db()]


def _dtype_of(op: Any) -> torch.dtype | None:
    wanted = (torch.float64, torch.complex128, torch.float32, torch.int64, torch.bool)
    supported = op.supported_dtypes("cpu")
    return next((t for t in wanted if t in supported), None)


def _samples(op: Any, dtype: torch.dtype) -> Iterator[tuple[int, Any]]:
    grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        samples = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), 200))
    # The whole range of what the list draws, not its first few.
    usable = [(i, s) for i, s in enumerate(samples) if _largest_dim(s) > 0]
    step = max(1, len(usable) // SAMPLES)
    yield from usable[::step][:SAMPLES]


def _first(sample: Any) -> torch.Tensor | None:
    value = sample.input
    if isinstance(value, (list, tuple)):
        value = next((v for v in value if isinstance(v, torch.Tensor)), None)
    return value if isinstance(value, torch.Tensor) else None


def _largest_dim(sample: Any) -> int:
    first = _first(sample)
    if first is None or first.layout != torch.strided:
        return 0
    return first.dim()


def _cut(value: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> torch.Tensor:
    """The sharded copy of a tensor, a leaf when it was one."""
    out = shard_tensor(value.detach().clone(), mesh, placements)
    return out.requires_grad_(value.requires_grad)


def _plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, ShardTensor) else value  # type: ignore[attr-defined]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor)]


def _loss(outputs: list[torch.Tensor]) -> torch.Tensor | None:
    """A sum that weighs every element differently; None when nothing can be differentiated."""
    total = None
    for k, out in enumerate(outputs):
        if not out.requires_grad or not (out.is_floating_point() or out.is_complex()):
            continue
        weight = torch.linspace(0.3, 1.7 + k, out.numel(), dtype=torch.float64).reshape(out.shape)
        real = out.real + 2 * out.imag if out.is_complex() else out
        part = (real * weight.to(real.dtype)).sum()
        total = part if total is None else total + part
    return total


def _run(
    op: Any, sample: Any, convert: Callable[[Any, bool], Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Outputs and the gradients of every tensor argument."""
    first = _first(sample)
    value, args, kwargs = tree_map(
        lambda v: convert(v, v is first), (sample.input, sample.args, sample.kwargs)
    )
    leaves = [t for t in _tensors((value, args, kwargs)) if t.requires_grad]
    result = op(value, *args, **kwargs)
    outputs = _tensors(sample.output_process_fn_grad(result)) if leaves else _tensors(result)
    loss = _loss(outputs) if leaves else None
    if loss is None:
        return outputs, []
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return outputs, list(grads)


def _difference(
    name: str, got: list[torch.Tensor | None], want: list[torch.Tensor | None], values: bool
) -> str:
    if len(got) != len(want):
        return f"{name}: {len(got)} tensors, expected {len(want)}"
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        if g is None or w is None:
            other = w if g is None else g
            if other is not None and bool(_full(other).any()):
                return f"{name} {k}: one is None"
            continue
        whole = _full(g.detach())
        if whole.shape != w.shape or whole.dtype != w.dtype:
            return f"{name} {k}: {tuple(whole.shape)} {whole.dtype}, expected {tuple(w.shape)} {w.dtype}"
        if values and not torch.allclose(
            whole.resolve_conj(), w.detach().resolve_conj(), RTOL, ATOL, equal_nan=True
        ):
            error = (whole - w).abs().max() if w.dtype != torch.bool else "bool"
            return f"{name} {k}: differs by {error}"
    return ""


def _placements(mesh: DeviceMesh, dim: int, ndim: int) -> list[Placement]:
    """Cut along `dim` by the last axis; the axes before it cut the dims that follow."""
    out: list[Placement] = []
    for axis in range(mesh.ndim):
        d = dim + mesh.ndim - 1 - axis
        out.append(Shard(d % ndim) if d < dim + ndim else Replicate())
    return out


def _check_call(
    op: Any, number: int, sample: Any, mesh: DeviceMesh, dim: int, alike: bool
) -> Outcome:
    first = _first(sample)
    assert first is not None
    placements = _placements(mesh, dim, first.dim())

    def convert(value: Any, is_first: bool) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if is_first or (alike and value.shape == first.shape):
            return _cut(value, mesh, placements)
        return _plain(value)

    others = "alike" if alike else "plain"

    def outcome(verdict: Verdict, detail: str = "") -> Outcome:
        return Outcome(op.full_name, number, dim, others, verdict, detail)

    want, want_grads = _run(op, sample, lambda v, _: _plain(v))
    try:
        torch.manual_seed(0)
        with report() as counts:
            got, got_grads = _run(op, sample, convert)
            values = op.name not in VALUES_DIFFER
            wrong = _difference("output", got, want, values)
            wrong = wrong or _difference("gradient", got_grads, want_grads, values)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        # The ranks made different calls: no error of the op, and the group is lost.
        parted = any(s in str(error) for s in ("a peer failed", "pair closure", "Timed out"))
        verdict = Verdict.HUNG if parted else Verdict.REFUSED
        return outcome(verdict, f"{type(error).__name__}: {error}")
    if wrong:
        return outcome(Verdict.WRONG, wrong)
    if counts.fallbacks:
        return outcome(Verdict.GATHERED, ", ".join(counts.fallbacks))
    return outcome(Verdict.SHARDED)


def check_operator(mesh: DeviceMesh, name: str) -> list[Outcome]:
    """Every cut of an operator's sample inputs. Collective over the mesh.

    Args:
        mesh: a mesh of CPU ranks with one or two axes.
        name: one of `operator_names()`.

    Returns:
        One outcome per sample, cut dim, and kind of the other tensors.
    """
    outcomes: list[Outcome] = []
    for op in (o for o in _op_db() if o.full_name == name):
        dtype = _dtype_of(op)
        if dtype is None:
            continue
        for number, sample in _samples(op, dtype):
            try:
                _run(op, sample, lambda v, _: _plain(v))
            except Exception:  # the plain op does not run here: nothing to compare with
                continue
            first = _first(sample)
            assert first is not None
            same = [t for t in _tensors((sample.args, sample.kwargs)) if t.shape == first.shape]
            for dim in range(first.dim()):
                for alike in (False, True) if same else (False,):
                    outcomes.append(_check_call(op, number, sample, mesh, dim, alike))
                    if outcomes[-1].verdict == Verdict.HUNG:
                        return outcomes
    return outcomes
