# SPDX-License-Identifier: Apache-2.0
"""PTX as calls of the emulator: each `asm` statement of a kernel becomes equivalent C++.

An instruction that is not known here is an error.
"""

import re
from collections.abc import Callable, Iterator

_ASM = re.compile(r"\basm\b\s*(?:volatile)?\s*\(")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_ACCESS = re.compile(
    r"(?P<kind>ld|st)(?:\.(?P<order>weak|relaxed|acquire|release))?(?:\.(?P<scope>cta|gpu|sys))?"
    r"\.global(?:\.L1::no_allocate)?(?P<many>\.v[24])?\.[bu](?P<bits>\d+)"
)
# Of one value each; `a`, `b`, ... are the operands after the first, the target.
_VALUES: dict[str, Callable[..., str]] = {
    "mov.u64": lambda a: {
        "%globaltimer": "emulated::clock_ns()",
        "%clock64": "emulated::clock_ns()",
    }[a],
    "mov.u32": lambda a: {
        "%cluster_nctarank": "emulated::cta->neighbours",
        "%cluster_ctarank": "emulated::cta->rank",
    }[a],
    "cvt.f32.f16": lambda a: f"emulated::widen_fp16({a})",
    "cvt.rn.bf16x2.f32": lambda a, b: (
        f"emulated::narrow_bf16({a}) << 16 | emulated::narrow_bf16({b})"
    ),
    "cvt.rn.f16x2.f32": lambda a, b: (
        f"emulated::narrow_fp16({a}) << 16 | emulated::narrow_fp16({b})"
    ),
    "cvt.rn.satfinite.e4m3x2.f32": lambda a, b: (
        f"emulated::to_e4m3({a}) << 8 | emulated::to_e4m3({b})"
    ),
    "cvt.rn.f16x2.e4m3x2": lambda a: f"emulated::halves_of_e4m3({a})",
    "div.full.f32": lambda a, b: f"({a}) / ({b})",
    "rcp.approx.ftz.f32": lambda a: f"1.0f / ({a})",
    "ex2.approx.ftz.f32": lambda a: f"__builtin_exp2f({a})",
    "min.NaN.f32": lambda a, b: f"emulated::least({a}, {b})",
    "max.NaN.f32": lambda a, b: f"emulated::most({a}, {b})",
    "prmt.b32": lambda a, b, c: f"emulated::permute_bytes({a}, {b}, {c})",
}
_EFFECTS: dict[str, Callable[..., str]] = {
    "griddepcontrol.wait": lambda: "",
    "griddepcontrol.launch_dependents": lambda: "",
    "barrier.cluster.arrive.release": lambda: "emulated::arrive_cluster();",
    "barrier.cluster.wait.acquire": lambda: "emulated::wait_cluster();",
    "bar.sync": lambda a, b: f"emulated::meet({a}, {b});",
}


def translated(text: str) -> str:
    """Return a header without assembly. Raises ValueError for an unknown instruction."""
    parts, at = [], 0
    for begin, end, statement in _statements(text):
        parts += [text[at:begin], statement]
        at = end
    return "".join([*parts, text[at:]])


def _statements(text: str) -> Iterator[tuple[int, int, str]]:
    for match in _ASM.finditer(text):
        fields, end = _fields(text, match.end())
        semicolon = text.index(";", end)
        assert not text[end:semicolon].strip(), text[match.start() : semicolon]
        code = "".join(_STRING.findall(fields[0]))
        inputs = [o for field in fields[1:3] for o in _split(field, ",") if o.strip()]
        operands = [_STRING.sub("", o, count=1).strip() for o in inputs]
        yield match.start(), semicolon + 1, "{ " + _code(code, operands) + " }"


def _code(code: str, operands: list[str]) -> str:
    body = code.strip().removeprefix("{").removesuffix("}") if code.strip()[:1] == "{" else code

    def named(argument: str) -> str:
        inputs = re.sub(r"%(\d+)", lambda m: operands[int(m[1])], argument)
        return inputs.strip().replace("%%", "%")

    result = []
    for statement in filter(None, (s.strip() for s in _split(body, ";"))):
        name, _, rest = statement.partition(" ")
        result.append(_instruction(name, [named(a) for a in _split(rest, ",") if a.strip()]))
    return " ".join(result)


def _instruction(name: str, arguments: list[str]) -> str:
    if name == ".reg":
        kind, first = arguments[0].split()
        return f"unsigned long long {', '.join([first, *arguments[1:]])};"
    if match := _ACCESS.fullmatch(name):
        return _access(match, *arguments)
    if name in ("mov.b64", "mov.b32"):
        return _packed(int(name[-2:]) // 2, *arguments)
    try:
        if name in _VALUES:
            return f"{arguments[0]} = {_VALUES[name](*arguments[1:])};"
        return _EFFECTS[name](*arguments)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the emulator does not know {name} {', '.join(arguments)}") from error


def _access(match: re.Match[str], first: str, second: str) -> str:
    order, scope = match["order"] or "weak", match["scope"]
    how = f"emulated::{order}, emulated::{f'scope_{scope}' if scope else 'no_scope'}"
    word = f"emulated::Word<{match['bits']}>"
    address, values = (second, first) if match["kind"] == "ld" else (first, second)
    address, values = address.strip("[]"), values.strip("{}")
    items = [v.strip() for v in values.split(",")] if match["many"] else [values]
    count = len(items)
    if match["kind"] == "ld":
        puts = " ".join(f"{item} = loaded.word[{i}];" for i, item in enumerate(items))
        return (
            f"const auto loaded = emulated::load_words<{word}, {count}>({address}, {how}); {puts}"
        )
    return f"emulated::store_words<{word}, {count}>({address}, {{{', '.join(items)}}}, {how});"


def _packed(bits: int, to: str, value: str) -> str:
    """Return the C++ that packs two registers into one of twice the size, or unpacks one."""
    mask = f"{(1 << bits) - 1:#x}u"
    if to.startswith("{"):
        low, high = to.strip("{}").split(",")
        return f"{low} = {value} & {mask}; {high} = {value} >> {bits} & {mask};"
    low, high = value.strip("{}").split(",")
    return f"{to} = (unsigned long long)({low}) | (unsigned long long)({high}) << {bits};"


def _fields(text: str, at: int) -> tuple[list[str], int]:
    """Return the parts of a statement between its colons, and its end."""
    end, depth = at, 1
    for match in re.finditer(r'"(?:[^"\\]|\\.)*"|[()]', text[at:]):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            end = at + match.start()
            break
    return [*_split(text[at:end], ":"), "", ""], end + 1


def _split(text: str, at: str) -> list[str]:
    parts, depth = [""], 0
    for match in re.finditer(r'"(?:[^"\\]|\\.)*"|.', text, re.DOTALL):
        piece = match[0]
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(piece, 0)
        if piece == at and depth == 0:
            parts.append("")
        else:
            parts[-1] += piece
    return parts
