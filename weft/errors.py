# SPDX-License-Identifier: Apache-2.0
"""All errors that weft raises.

UsageError reports a wrong call, SetupError a failed creation and GroupError a group that broke
at runtime. Each text has the expected and the actual value and the fix.
"""

from __future__ import annotations


class WeftError(Exception):
    """Base class of all errors that weft raises deliberately."""


class UsageError(WeftError, ValueError):
    """The call or its data is wrong. The group continues.

    An invalid call sends nothing. Errors that only the device can detect are raised by a later
    `check()`: the kernel dropped an out-of-range expert id or clamped a token count, and processed
    everything else. Peers are not affected.
    """


class InvalidArgument(UsageError):
    """A tensor or an option has the wrong dtype, shape, device or stride."""


class BadCall(InvalidArgument, TypeError):
    """The call has an unknown argument, or a required one is missing."""


class TokenOverflow(UsageError):
    """A call has more tokens than the workspace was built for."""


class BadExpertId(UsageError):
    """An expert id is out of range, or repeated in one row."""


class OutOfOrder(UsageError):
    """The call is not valid in this state: combine without dispatch, or use after close."""


class SetupError(WeftError, RuntimeError):
    """The group, its memory or its kernels could not be created."""


class RendezvousFailed(SetupError):
    """The ranks could not find or authenticate each other."""


class CreationFailed(SetupError):
    """A collective creation failed on one rank. Every rank raises this error."""


class PeerAccessDenied(SetupError):
    """Two GPUs cannot access each other's memory."""


class HandleUnsupported(SetupError):
    """The driver cannot export memory in a form that peers can import."""


class DriverError(SetupError):
    """A CUDA driver call failed."""


class CompileError(SetupError):
    """NVRTC or the C++ compiler rejected the source. The text has the generated entry."""


class TorchTooOld(SetupError, ImportError):
    """The installed torch is older than weft needs."""


class GroupError(WeftError, RuntimeError):
    """The group broke at runtime. Call `Group.recover` (one host) or create a new group."""


class PeerTimeout(GroupError):
    """A peer's flag did not arrive before the deadline."""


class PeerDied(GroupError):
    """The process of a peer ended before it finished its part of a call."""


class PeerLeft(GroupError):
    """A peer raised or closed before it finished its part of a call. The text has the reason."""


class RailFailed(GroupError):
    """An exchange with a rank of another host overran its deadline, or its connection broke."""


class ExpertsLost(GroupError):
    """Some experts of a layer are on no living rank. The group continues without the layer."""


class GeometryMismatch(GroupError):
    """A peer called with a different geometry (shape, dtype, top_k) than this rank."""


class Aborted(GroupError):
    """A rank called `abort()`; the text names it."""


class RecoveryFailed(GroupError):
    """A survivor did not call `recover`, or an excluded rank is alive. Call `recover` again."""


class RankFailed(GroupError):
    """A rank started by `weft.launch` raised, died or timed out."""
