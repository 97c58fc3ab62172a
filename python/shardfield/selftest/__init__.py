"""Every operator of PyTorch's own test list on sharded inputs, beside the plain op.

    shardfield selftest --ranks 2 --ops "add|conv" --table out.md

PyTorch's `torch.testing._internal.common_methods_invocations.op_db` names each operator and draws
its sample inputs. The first input is cut along each dim in turn, the other tensors stay plain or
are cut alike; output and gradients must be those of the plain op, or the call must be refused with
a clear error.
"""

from shardfield.selftest._check import Outcome, Verdict, check_operator, operator_names

__all__ = ["Outcome", "Verdict", "check_operator", "operator_names"]
