"""Read the machine code of kernels: registers, and on Hopper whether a loop touches what its products still use.

A product is a group of HGMMA instructions, of which the last one says `gsb0`; `WARPGROUP.DEPBAR.LE gsb0, n` waits until
n groups are left. Until then no other instruction may read or write the registers of its sums, or write those of its
first operand. The compiler should see to that, but ptxas 12.8 has read sums before the wait for them: it had computed
an operand between the instructions of a group, and so made several groups of it.

Source: the PTX manual, "wgmma.wait_group"; what the instructions are called in `nvdisasm -c`.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from triton import knobs

_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x\S+ R(\d+), (?:R(\d+)|gdesc)")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)")
_REGISTER = re.compile(r"(?<!U)\bR(\d+)")


class Product(NamedTuple):
    """The registers of a HGMMA instruction, those of its sums and of its first operand, and its text."""

    sums: frozenset[int]
    operand: frozenset[int]
    text: str


def usage(binary):
    """Read from a cubin how many registers each thread takes, and the bytes of memory in their place."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {"registers": int(re.search(r"REG:(\d+)", text)[1]), "spilled": int(re.search(r"STACK:(\d+)", text)[1])}


def usage_on_amd(binary):
    """Read the same from the notes of an hsaco, which are in MessagePack: a name, and then a small or a long number."""
    found = {}
    for name, key in (("registers", b".vgpr_count"), ("spilled", b".vgpr_spill_count")):
        at = binary.index(key) + len(key)
        size = {0xCC: 1, 0xCD: 2, 0xCE: 4}.get(binary[at], 0)
        found[name] = int.from_bytes(binary[at + 1 : at + 1 + size], "big") if size else binary[at]
    return found


def disassemble(binary: bytes) -> list[str]:
    """Return the instructions of a cubin, and the labels among them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^(\.L_x_\d+):|^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", text, re.MULTILINE)
    return [label or instruction for label, instruction in found]


def loops_of_products(code: list[str]) -> Iterator[list[str]]:
    """Return the innermost loops that have products, each from its label to the branch back."""
    at = {line: i for i, line in enumerate(code) if line.startswith(".L_x_")}
    ends = ((re.search(r"BRA.*`\((\.L_x_\d+)\)", line), i) for i, line in enumerate(code))
    loops = [(at[end[1]], i) for end, i in ends if end and at[end[1]] < i]
    for first, last in loops:
        has_product = any("HGMMA" in line for line in code[first:last])
        inner = any(first <= a and b <= last and (a, b) != (first, last) for a, b in _with_products(code, loops))
        if has_product and not inner:
            yield code[first : last + 1]


def _with_products(code: list[str], loops: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(a, b) for a, b in loops if any("HGMMA" in line for line in code[a:b])]


def touched_in_flight(loop: list[str]) -> list[str]:
    """Return the instructions of a loop that touch registers of products under way, in two rounds of it."""
    groups: list[list[Product]] = [[]]  # the last one is not complete
    wrong = []
    for line in loop * 2:
        product, wait = _PRODUCT.search(line), _WAIT.search(line)
        if product:
            columns, sums, operand = (int(x) if x else None for x in product.groups())
            assert columns is not None and sums is not None
            of_operand = frozenset() if operand is None else frozenset(range(operand, operand + 4))
            groups[-1].append(Product(frozenset(range(sums, sums + columns // 2)), of_operand, line))
            if "gsb0" in line:
                groups.append([])
        elif wait:
            complete = len(groups) - 1
            groups = groups[max(complete - int(wait[1]), 0) :]
        else:
            read, written = _registers(line)
            for one in (x for group in groups for x in group):
                if one.sums & (read | written) or one.operand & written:
                    wrong.append(f"{line}, after {one.text}")
    return wrong


def _registers(line: str) -> tuple[set[int], set[int]]:
    """Return the registers that an instruction reads and writes; a first operand that is no address is written."""
    name, _, operands = re.sub(r"^@!?U?P\d+ ", "", line).partition(" ")
    size = 4 if re.search(r"\.128|LDSM|STSM", name) else 2 if re.search(r"\.64|WIDE", name) else 1
    sides: tuple[set[int], set[int]] = (set(), set())
    for place, operand in enumerate(operands.split(",")):
        is_written = place == 0 and not name.startswith(("ST", "BAR", "SYNCS", "ARRIVES")) and "[" not in operand
        is_wide = is_written or (name.startswith("ST") and "[" not in operand)
        for register in map(int, _REGISTER.findall(operand)):
            wide = size if is_wide else 2 if ".64" in operand else 1
            sides[is_written].update(range(register, register + wide))
    return sides
