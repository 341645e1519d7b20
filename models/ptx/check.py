# SPDX-License-Identifier: Apache-2.0
"""Says of every litmus test whether PTX's memory model lets its bad outcome happen.

It tries every choice of which write each read takes its value from, and every order of writes that
must have one, and asks the axioms of the PTX ISA ("Memory Consistency Model", sections 8.8 to 8.10
of PTX 8) of each. Tests have about ten events, so that takes milliseconds. It knows what
patterns.txt uses: weak and strong accesses, adds, fences but fence.sc, barriers of a CTA, and one
proxy beside the generic one; anything else is an error.

Usage: check.py [test ...]    (without one: all of patterns.txt)
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations, product

from models.ptx.gen import Litmus, read

ALLOWED, FORBIDDEN = "allowed", "forbidden"
_ACCESS = re.compile(
    r"(?P<op>ld|st|sust|atom|red)\.(?P<order>weak|relaxed|acquire|release|acq_rel)"
    r"(\.(?P<scope>cta|gpu|sys))?(\.add)? (?P<operands>.+)"
)
_FENCE = re.compile(r"fence\.acq_rel\.(?P<scope>cta|gpu|sys)")
_PROXY_FENCE = re.compile(r"fence\.proxy\.(?P<proxy>\w+)")
_BARRIER = re.compile(r"bar\.cta\.sync (?P<number>\d+)")
_ALIAS = re.compile(r"(\w+)\s*@\s*(\w+) aliases (\w+)")
_PLACE = re.compile(r"P(\d+)@cta (\d+),gpu (\d+)")
_REGISTER = re.compile(r"P(\d+):(r\d+)")


@dataclass(frozen=True, slots=True)
class Event:
    """One step of a thread. An add is two: a read, and a write that follows it."""

    number: int
    thread: int  # -1: the initial state
    cta: tuple[int, int]  # GPU and CTA
    kind: str  # read, write, fence, barrier or proxy fence
    where: str = ""  # its location, barrier or proxy
    scope: str = ""  # of a strong one
    acquires: bool = False
    releases: bool = False
    proxy: str = "generic"
    value: int = 0  # what a write stores, or an add adds
    register: str = ""
    added_to: int = -1  # of an add's write: the number of its read

    def includes(self, other: Event) -> bool:
        """Whether this is strong, with a scope that has the other's thread in it."""
        reach = {"cta": 2, "gpu": 1, "sys": 0}
        return self.scope != "" and self.cta[: reach[self.scope]] == other.cta[: reach[self.scope]]


Pairs = set[tuple[int, int]]


class Program:
    """The events of a test, and what holds of them in every execution."""

    def __init__(self, test: Litmus) -> None:
        self.events: list[Event] = []
        self.outcome = test.outcome
        aliases = {alias: (where, proxy) for alias, proxy, where in _ALIAS.findall(test.init)}
        for where, value in re.findall(r"(?<![\w:])([a-z]\w*)=(\d+)", test.init):
            self._add(-1, (-1, -1), "write", where=where, value=int(value))
        for place, *code in test.threads:
            found = _PLACE.fullmatch(place)
            if found is None:
                raise ValueError(f"{test.name}: {place} is no place of a thread")
            thread, cta, gpu = map(int, found.groups())
            for text in code:
                self._parse(text.strip(), thread, (gpu, cta), aliases)
        self.reads = [e for e in self.events if e.kind == "read"]
        self.writes = [e for e in self.events if e.kind == "write"]
        pairs = list(permutations(self.events, 2))
        self.po = {
            (a.number, b.number)
            for a, b in pairs
            if a.number < b.number and (a.thread == b.thread or a.thread < 0)
        }
        self.strong = {(a.number, b.number) for a, b in pairs if self._morally_strong(a, b)}

    def _add(self, thread: int, cta: tuple[int, int], kind: str, **more: object) -> int:
        self.events.append(Event(len(self.events), thread, cta, kind, **more))  # type: ignore[arg-type]
        return len(self.events) - 1

    def _parse(
        self, text: str, thread: int, cta: tuple[int, int], aliases: dict[str, tuple[str, str]]
    ) -> None:
        if found := _FENCE.fullmatch(text):
            self._add(thread, cta, "fence", scope=found["scope"])
            return
        if found := _BARRIER.fullmatch(text):
            if any(e.kind == "barrier" and e.thread == thread for e in self.events):
                raise ValueError("this checker knows one barrier of a thread")
            self._add(thread, cta, "barrier", where=found["number"])
            return
        if found := _PROXY_FENCE.fullmatch(text):
            self._add(thread, cta, "proxy fence", where=found["proxy"])
            return
        found = _ACCESS.fullmatch(text)
        if found is None or (found["order"] == "weak") != (found["scope"] is None):
            raise ValueError(f"{text!r} is no instruction that this checker knows")
        op, order, operands = found["op"], found["order"], found["operands"].split(", ")
        register = operands.pop(0) if op in ("ld", "atom") else ""
        where, proxy = aliases.get(operands[0], (operands[0], "generic"))
        if (op == "sust") != (proxy != "generic"):
            raise ValueError(f"{text!r}: only sust goes through a proxy")
        how = {"where": where, "proxy": proxy, "scope": found["scope"] or ""}
        acquires, releases = order in ("acquire", "acq_rel"), order in ("release", "acq_rel")
        loaded = -1
        if op in ("ld", "atom", "red"):
            loaded = self._add(thread, cta, "read", register=register, acquires=acquires, **how)
        if op != "ld":
            value = int(operands[1])
            more = {"value": value, "releases": releases, "added_to": loaded}
            self._add(thread, cta, "write", **more, **how)

    def _morally_strong(self, a: Event, b: Event) -> bool:
        both_access = {a.kind, b.kind} <= {"read", "write"}
        if both_access and (a.where != b.where or a.proxy != b.proxy):
            return False
        return (
            -1 in (a.thread, b.thread) or a.thread == b.thread or (a.includes(b) and b.includes(a))
        )

    def release_patterns(self) -> Iterator[tuple[Event, Event]]:
        """First operation, and the write that may be observed."""
        for w in self.writes:
            if w.thread >= 0 and w.scope:
                if w.releases:
                    yield w, w
                for first in self._before(w):
                    same = first.kind == "write" and first.releases and first.where == w.where
                    if same or first.kind == "fence":
                        yield first, w

    def acquire_patterns(self) -> Iterator[tuple[Event, Event]]:
        """The read that may observe, and the last operation."""
        for r in self.reads:
            if r.scope:
                if r.acquires:
                    yield r, r
                for last in self._behind(r):
                    same = last.kind == "read" and last.acquires and last.where == r.where
                    if same or last.kind == "fence":
                        yield r, last

    def _before(self, event: Event) -> Iterator[Event]:
        return (e for e in self.events[: event.number] if e.thread == event.thread)

    def _behind(self, event: Event) -> Iterator[Event]:
        return (e for e in self.events[event.number + 1 :] if e.thread == event.thread)

    def executions(self) -> Iterator[tuple[dict[int, int], dict[int, int]]]:
        """Which write each read takes its value from, and the value of each event."""
        choices = [[w.number for w in self.writes if w.where == r.where] for r in self.reads]
        for chosen in product(*choices):
            source = dict(zip((r.number for r in self.reads), chosen, strict=True))
            values = {w.number: w.value for w in self.writes if w.added_to < 0}
            while True:
                new = {r: values[w] for r, w in source.items() if w in values and r not in values}
                for w in self.writes:
                    if w.added_to in values | new and w.number not in values:
                        new[w.number] = (values | new)[w.added_to] + w.value
                if not new:
                    break
                values |= new
            if len(values) == len(self.reads) + len(self.writes):  # else: out of thin air
                yield source, values

    def happens(self, values: dict[int, int]) -> bool:
        """Whether the outcome is the one that the test asks for."""
        found = {
            (str(r.thread), r.register): values[r.number] for r in self.reads if r.register != ""
        }
        text = self.outcome.replace("/\\", " and ").replace("\\/", " or ")
        text = _REGISTER.sub(lambda name: str(found[name[1], name[2]]), text)
        return _holds(ast.parse(text.strip(), mode="eval").body)


def _holds(term: ast.expr) -> bool:
    match term:
        case ast.BoolOp(ast.And(), terms):
            return all(map(_holds, terms))
        case ast.BoolOp(ast.Or(), terms):
            return any(map(_holds, terms))
        case ast.Compare(ast.Constant(left), [ast.Eq()], [ast.Constant(right)]):
            return left == right
        case ast.Compare(ast.Constant(left), [ast.NotEq()], [ast.Constant(right)]):
            return left != right
    raise ValueError(f"{ast.unparse(term)!r} is no outcome that this checker knows")


def verdict(test: Litmus) -> str:
    """Whether the bad outcome of a test can happen."""
    program = Program(test)
    possible = any(
        program.happens(values) and _consistent(program, source)
        for source, values in program.executions()
    )
    return ALLOWED if possible else FORBIDDEN


def _consistent(p: Program, source: dict[int, int]) -> bool:
    """Whether some order of the writes meets every axiom."""
    rf = {(w, r) for r, w in source.items()}
    causes = _causality(p, rf)
    of = {where: [w for w in p.writes if w.where == where] for where in {w.where for w in p.writes}}
    for orders in product(*(permutations(writes) for writes in of.values())):
        # Coherence orders writes that are morally strong, or that causality orders, and no others.
        ahead = {(a.number, b.number) for writes in orders for a, b in combinations(writes, 2)}
        co = _closed(ahead & (p.strong | causes))
        fr = {(r, after) for r, w in source.items() for before, after in co if before == w}
        if not any((b, a) in causes for a, b in ahead) and _meets(p, rf | co | fr, co, fr, causes):
            return True
    return False


def _meets(p: Program, com: Pairs, co: Pairs, fr: Pairs, causes: Pairs) -> bool:
    """Atomicity, sequential consistency of each location, and causality."""
    for w in p.writes:
        between = {b for a, b in fr & p.strong if a == w.added_to and b != w.number}
        if any((b, w.number) in co & p.strong for b in between):
            return False
    places = [e.where if e.kind in ("read", "write") else None for e in p.events]
    in_turn = {(a, b) for a, b in p.po & p.strong if places[a] == places[b] is not None}
    once = _closed(com & p.strong | in_turn)
    if any((a, a) in once for a in range(len(p.events))):
        return False
    return not any((b, a) in com for a, b in causes)


def _causality(p: Program, rf: Pairs) -> Pairs:
    """Base causality, kept where proxies keep it, behind an observation or not."""
    strong_rf = rf & p.strong
    adds = {(w.added_to, w.number) for w in p.writes if w.added_to >= 0}
    observed = _closed(strong_rf | adds)
    synchronized = {
        (first.number, last.number)
        for first, write in p.release_patterns()
        for read_, last in p.acquire_patterns()
        if (write.number, read_.number) in observed and (first.number, last.number) in p.strong
    }
    barriers = [e for e in p.events if e.kind == "barrier"]
    synchronized |= {
        (a.number, b.number)
        for a, b in permutations(barriers, 2)
        if (a.cta, a.where) == (b.cta, b.where)
    }
    base = _closed(p.po | synchronized)
    kept = {(a, b) for a, b in base if _kept_by_proxies(p, base, a, b)}
    seen = {
        (a, b) for a, b in observed if (p.events[a].kind, p.events[b].kind) == ("write", "read")
    }
    return kept | {(a, d) for a, b in seen for c, d in kept if b == c}


def _kept_by_proxies(p: Program, base: Pairs, a: int, b: int) -> bool:
    """Whether base causality from a to b, on one location, survives the proxies they go through."""
    one, two = p.events[a], p.events[b]
    if not {one.kind, two.kind} <= {"read", "write"} or one.where != two.where:
        return False
    if one.thread < 0 or one.proxy == two.proxy and one.cta == two.cta:
        return True
    fenced = [e for e in p.events if e.kind == "proxy fence"]
    path = [a]
    for access in (one, two):
        if access.proxy != "generic":
            near = [f for f in fenced if f.where == access.proxy and f.cta == access.cta]
            if not near:
                return False
            path.append(near[0].number)
            if len(near) > 1:
                raise ValueError("this checker knows one proxy fence of a kind and CTA")
    return all(step in base for step in pairwise([*path, b]))


def _closed(pairs: Pairs) -> Pairs:
    """The transitive closure."""
    closed = set(pairs)
    while more := {(a, d) for a, b in closed for c, d in closed if b == c} - closed:
        closed |= more
    return closed


if __name__ == "__main__":
    wrong = 0
    for litmus in read():
        if len(sys.argv) < 2 or litmus.name in sys.argv[1:]:
            found = verdict(litmus)
            wrong += found != litmus.expect
            print(f"{litmus.name:56} bad outcome {found:10} expected {litmus.expect}")
    raise SystemExit(wrong != 0)
