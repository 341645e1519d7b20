# SPDX-License-Identifier: Apache-2.0
"""Every error weft raises, as one tree: of the call (UsageError), of what could not be made
(SetupError), and of a group that broke while running (GroupError).

Each text says what was wrong, with both values, and how to fix it.
"""

from __future__ import annotations


class WeftError(Exception):
    """Base of every error weft raises on purpose."""


class UsageError(WeftError, ValueError):
    """The call, or its data, is wrong. The group continues.

    An invalid call sends nothing. What only the device can see, `check()` raises afterwards: an id
    that names no expert was dropped, or a number of tokens was clamped, and everything else was
    served. Peers are not affected.
    """


class InvalidArgument(UsageError):
    """A tensor or an option has the wrong dtype, shape, device or stride."""


class BadCall(InvalidArgument, TypeError):
    """The call has an argument that the function does not take, or lacks one."""


class TokenOverflow(UsageError):
    """More tokens than the workspace was built for."""


class BadExpertId(UsageError):
    """An expert id is out of range, or repeated in one row."""


class OutOfOrder(UsageError):
    """The call came at the wrong time: combine without dispatch, or use after close."""


class SetupError(WeftError, RuntimeError):
    """The group, its memory or its kernels could not be made."""


class RendezvousFailed(SetupError):
    """The ranks did not find, or did not trust, each other."""


class CreationFailed(SetupError):
    """One rank could not do its part of a collective creation. Every rank raises it."""


class PeerAccessDenied(SetupError):
    """Two GPUs cannot reach each other's memory."""


class HandleUnsupported(SetupError):
    """The driver cannot export memory in a form that peers can import."""


class DriverError(SetupError):
    """A CUDA driver call failed."""


class CompileError(SetupError):
    """NVRTC or the C++ compiler rejected the source. The text holds the generated entry."""


class TorchTooOld(SetupError, ImportError):
    """The installed torch is older than weft needs."""


class GroupError(WeftError, RuntimeError):
    """The group broke while running. Call `Group.recover` on one host, or make a new group."""


class PeerTimeout(GroupError):
    """A peer's flag did not arrive before the deadline."""


class PeerDied(GroupError):
    """The process of a peer ended before it made its part of a call."""


class PeerLeft(GroupError):
    """A peer raised, or closed, before it made its part of a call. The text says why."""


class RailFailed(GroupError):
    """An exchange with a rank of another host overran its deadline, or its connection broke."""


class ExpertsLost(GroupError):
    """No living rank holds some of a layer's experts. The group continues, the layer does not."""


class GeometryMismatch(GroupError):
    """A peer called with another geometry (shape, dtype, top_k) than this rank."""


class Aborted(GroupError):
    """A rank called `abort()`; the text says which."""


class RecoveryFailed(GroupError):
    """A survivor did not call `recover`, or a rank that must end is alive. Call `recover` again."""


class RankFailed(GroupError):
    """A rank started by `weft.launch` raised, died or overran its time."""
