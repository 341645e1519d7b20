# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism of transformers by weft.

    weft.plugins.transformers.register()
    config = DistributedConfig(tp_size=4, ep_size=4, ep_implementation="weft")
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)

docs/user/transformers.md says what is served.
"""

from __future__ import annotations

import functools
import importlib

from weft.arguments import integer, seconds
from weft.errors import SetupError
from weft.plugins.names import Known, differences
from weft.plugins.transformers.exchange import exchanges

__all__ = ["check", "close", "register"]

_OLDEST = "5.23"
_MODULE = "transformers.distributed.expert_parallel"
KNOWN = (
    Known(
        _MODULE + ".EPImplementation.__init__",
        "self, experts, ep_mesh, tp_mesh",
        names="experts_forward num_local_experts ep_mesh tp_mesh shares_batch",
    ),
    Known(
        _MODULE + ".EPImplementation.__call__",
        "self, hidden_states, top_k_index, top_k_weights",
    ),
    Known(_MODULE + ".EPImplementationInterface.register", "cls, key, value"),
)


def register(*, max_tokens: int = 1024, timeout: float = 120.0) -> None:
    """Make `DistributedConfig(ep_implementation="weft")` available to models loaded from now on.

    Call it on every rank with equal arguments, before the model is loaded. Nothing is allocated
    here: loading makes one `weft.Group` for a model, and its first forward pass the operators.

    Args:
        max_tokens: Rows of a rank that one round moves. A larger batch takes several rounds, as
            many on every rank. Memory of a rank, at most: 2 * ranks * max_tokens rows of the model.
        timeout: Seconds that a layer waits for a peer that is late, before PeerTimeout. A peer that
            died or raised is noticed at once.

    Raises:
        InvalidArgument: an argument is invalid.
        SetupError: transformers is older than 5.23 or has another interface.
    """
    max_tokens, timeout = integer("max_tokens", max_tokens, 1, 1 << 20), seconds("timeout", timeout)
    _check_interface()
    from transformers.distributed.expert_parallel import EPImplementationInterface

    from weft.plugins.transformers.experts import ExpertParallel

    made = functools.partial(ExpertParallel, max_tokens=max_tokens, timeout=timeout)
    EPImplementationInterface.register("weft", made)


def check() -> None:
    """Raise what the layers' kernels have recorded: a broken group, or input that was refused.

    Every layer does so itself when it is called. On GPUs a call returns before its kernel has run,
    so synchronise and call this after the last forward pass.
    """
    for exchange in exchanges():
        exchange.check()


def close() -> None:
    """Give back the memory and the groups of all models of this process that use weft.

    Local and idempotent. A model that is dropped gives back its own, when Python collects it; a
    process that ends gives back everything. A closed model's layers raise OutOfOrder.
    """
    for exchange in exchanges():
        exchange.close()


def _check_interface() -> None:
    """Raise SetupError for a transformers that is not known."""
    fix = f"pip install 'transformers>={_OLDEST}'"
    try:
        version = importlib.import_module("transformers").__version__
    except ImportError as error:
        raise SetupError(f"transformers cannot be imported: {error}; {fix}") from error
    try:
        importlib.import_module(_MODULE)
        wrong = list(differences(KNOWN, _OLDEST))
    except ImportError as error:  # says more than that its names are not there
        wrong = [str(error)]
    if wrong:
        raise SetupError(
            f"transformers {version} lacks the interface of expert parallelism that weft knows, "
            f"which came with {_OLDEST}: {'; '.join(wrong)}; {fix}, or use a newer weft"
        )
