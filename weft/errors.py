"""Every error weft raises, as one tree.

    WeftError
    ├── UsageError                 the call or its data is wrong; no peer was harmed
    │   ├── InvalidArgument        a tensor or option has the wrong dtype, shape, device or stride
    │   ├── TokenOverflow          more tokens than the workspace was built for
    │   ├── BadExpertId            an expert id is out of range or stands twice in a row
    │   └── OutOfOrder             no dispatch before combine, or the reverse; use after close
    ├── SetupError                 the group, its memory or its kernels could not be made
    │   ├── RendezvousFailed       the ranks did not find or did not trust each other
    │   ├── CreationFailed         one rank could not do its part, so no rank goes on
    │   ├── PeerAccessDenied       two GPUs cannot reach each other's memory
    │   ├── HandleUnsupported      the driver cannot export memory in a form that peers can import
    │   ├── DriverError            a CUDA driver call failed
    │   ├── CompileError           NVRTC or the C++ compiler refused the source
    │   └── TorchTooOld            this torch lacks what weft calls; also an ImportError
    └── GroupError                 the group broke while running; recover it, or make a new one
        ├── PeerTimeout            a peer's flag did not arrive before the deadline
        ├── PeerDied               the process of a peer ended
        ├── PeerLeft               a peer raised or closed before it made its part of a call
        ├── RailFailed             rows to or from another host did not arrive in time, or cannot
        ├── ExpertsLost            no living rank holds some of a layer's experts
        ├── GeometryMismatch       a peer called with another geometry
        ├── Aborted                a rank asked the group to stop
        ├── RecoveryFailed         the survivors of a death could not go on yet; the text says why
        └── RankFailed             a launched rank raised or died

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
    """An expert id is out of range, or stands twice in one row."""


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
    """The group broke while running. Call `recover`, or close it and make a new one."""


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
