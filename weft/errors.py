"""Every error weft raises, as one tree: of the call (UsageError), of what could not be made
(SetupError), and of a group that broke while running (GroupError).

Each text says what was wrong, with both values, and how to fix it.
"""

from __future__ import annotations


class WeftError(Exception):
    """Base of every error weft raises on purpose."""


class UsageError(WeftError, ValueError):
    """The call, or the data in it, is wrong; the group goes on.

    What the host refuses sends nothing. What only the device can see, `check()` reports
    afterwards: an id that names no expert was dropped, a count of tokens clamped, and everything
    else was served. Peers are affected by neither.
    """


class InvalidArgument(UsageError):
    """A tensor or an option has the wrong dtype, shape, device or stride."""


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
    """One rank could not do its part of a collective creation, so every rank raises this."""


class PeerAccessDenied(SetupError):
    """Two GPUs cannot reach each other's memory."""


class HandleUnsupported(SetupError):
    """The driver cannot export memory in a form that peers can import."""


class DriverError(SetupError):
    """A CUDA driver call failed."""


class CompileError(SetupError):
    """NVRTC or the C++ compiler refused the source; the text holds the generated entry."""


class TorchTooOld(SetupError, ImportError):
    """The installed torch is older than weft needs."""


class GroupError(WeftError, RuntimeError):
    """The group broke while running. Call `recover` where it is on one host, or make a new one."""


class PeerTimeout(GroupError):
    """A peer's flag did not arrive before the deadline."""


class PeerDied(GroupError):
    """The process of a peer ended before it made its part of a call."""


class PeerLeft(GroupError):
    """A peer raised, or closed, before it made its part of a call; the text says why."""


class RailFailed(GroupError):
    """An exchange with a rank of another host overran its deadline, or its connection broke."""


class ExpertsLost(GroupError):
    """No living rank holds some of a layer's experts; the group goes on, the layer does not."""


class GeometryMismatch(GroupError):
    """A peer called with another geometry (shape, dtype, top_k) than this rank."""


class Aborted(GroupError):
    """A rank called `abort()`; the text says which."""


class RecoveryFailed(GroupError):
    """Not all survivors came to `recover`, or a rank that must be gone lives; call it again."""


class RankFailed(GroupError):
    """A rank started by `weft.launch` raised, died or overran its time."""
