# SPDX-License-Identifier: Apache-2.0
"""weft's plug-in for transformers: expert parallelism.

    weft.plugins.transformers.register()
    config = DistributedConfig(tp_size=4, ep_size=4, ep_implementation="weft")
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)

docs/user/transformers.md lists what is supported.
"""

from __future__ import annotations

import functools
import importlib

from weft.arguments import check_int, check_seconds
from weft.errors import SetupError
from weft.plugins.engine_api import ExpectedAPI, list_differences
from weft.plugins.transformers.exchange import list_exchanges

__all__ = ["check", "close", "register"]

_OLDEST = "5.23"
_MODULE = "transformers.distributed.expert_parallel"
EXPECTED_API = (
    ExpectedAPI(
        _MODULE + ".EPImplementation.__init__",
        "self, experts, ep_mesh, tp_mesh",
        attributes="experts_forward num_local_experts ep_mesh tp_mesh shares_batch",
    ),
    ExpectedAPI(
        _MODULE + ".EPImplementation.__call__",
        "self, hidden_states, top_k_index, top_k_weights",
    ),
    ExpectedAPI(_MODULE + ".EPImplementationInterface.register", "cls, key, value"),
)


def register(*, max_tokens: int = 1024, timeout: float = 120.0) -> None:
    """Make `DistributedConfig(ep_implementation="weft")` available to models loaded afterwards.

    Call it on every rank with equal arguments, before the model is loaded. It allocates nothing:
    loading a model creates one `weft.Group`, and its first forward pass the operators.

    Args:
        max_tokens: Rows per rank in one round. A larger batch runs in several rounds, the same
            number on every rank. Memory per rank: at most 2 * ranks * max_tokens rows of the model.
        timeout: Seconds that a layer waits for a late peer before it raises PeerTimeout. A peer
            that died or raised is detected at once.

    Raises:
        InvalidArgument: If an argument is invalid.
        SetupError: If transformers is older than 5.23 or has another interface.
    """
    max_tokens, timeout = (
        check_int("max_tokens", max_tokens, 1, 1 << 20),
        check_seconds("timeout", timeout),
    )
    _check_interface()
    from transformers.distributed.expert_parallel import EPImplementationInterface

    from weft.plugins.transformers.experts import ExpertParallel

    implementation = functools.partial(ExpertParallel, max_tokens=max_tokens, timeout=timeout)
    EPImplementationInterface.register("weft", implementation)


def check() -> None:
    """Raise the error that the layers' kernels recorded: a broken group or invalid input.

    Every layer checks this when it is called. On GPUs a call returns before its kernel has run, so
    synchronize and call this function after the last forward pass.
    """
    for exchange in list_exchanges():
        exchange.check()


def close() -> None:
    """Free memory and groups of all models in this process that use weft.

    Local and idempotent. A model's memory is also freed when Python collects the model, and a
    process that exits frees everything. Layers of a closed model raise OutOfOrder.
    """
    for exchange in list_exchanges():
        exchange.close()


def _check_interface() -> None:
    """Raise SetupError if transformers is missing or has another interface."""
    fix = f"pip install 'transformers>={_OLDEST}'"
    try:
        version = importlib.import_module("transformers").__version__
    except ImportError as error:
        raise SetupError(f"transformers cannot be imported: {error}; {fix}") from error
    try:
        importlib.import_module(_MODULE)
        differences = list(list_differences(EXPECTED_API, _OLDEST))
    except ImportError as error:  # more specific than the list of missing names
        differences = [str(error)]
    if differences:
        raise SetupError(
            f"transformers {version} lacks the expert-parallel interface that weft needs, added in "
            f"{_OLDEST}: {'; '.join(differences)}; {fix}, or use a newer weft"
        )
