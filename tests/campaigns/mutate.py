"""Damage and attacks: mutations of JSON, safetensors, zip archives and bytes, drawn from a `random.Random`."""

import contextlib
import copy
import io
import json
import random
import struct
import zipfile
from collections.abc import Callable
from typing import Any

NUMBERS = (0, -1, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**63, 10**12, 10**400, -0.0, 0.5, 1e-320, 1e38, 1e308)
TEXTS = ("", "\x00", "../../x", "/etc/passwd", "\ud800", "a" * 5000, "<script>", "=1+1", "\n\r\x1b[31m", "nan", "{}")
VALUES: tuple[Any, ...] = (
    *(None, True, False, [], {}, [[]], [None], {"": None}, {"a": {"b": [1]}}),
    *(float("nan"), float("inf"), -float("inf")),
    *NUMBERS,
    *TEXTS,
)


def json_text(value: Any, draw: random.Random) -> bytes:
    """JSON of a value after one to three mutations, or text that is no JSON any more."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        value = json_value(value, draw)
    text = json.dumps(value)
    kind = draw.randrange(12)
    if kind == 0:
        depth = draw.choice((100, 2000, 100_000))
        text = draw.choice(("[", '{"a":')) * depth + text
    elif kind == 1:
        text = text.replace(":", f': {"9" * draw.choice((30, 5000))}, "x":', 1)
    elif kind == 2 and text[:1] == "{":  # a key twice
        text = "{" + text[1:-1] + "," + text[1:]
    data = text.encode("utf-8", "surrogatepass")
    return some_bytes(data, draw) if kind == 3 else data


def json_value(value: Any, draw: random.Random) -> Any:
    """A copy of a JSON value with one mutation at a random place."""
    value = copy.deepcopy(value)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, entry in entries:
            places.append((node, key))
            walk(entry)

    walk(value)
    if not places or draw.random() < 0.02:
        return draw.choice(VALUES)
    node, key = draw.choice(places)
    kind = draw.randrange(7)
    if kind == 0:
        del node[key]
    elif kind == 1:
        other, place = draw.choice(places)
        node[key] = copy.deepcopy(other[place])
    elif kind == 2 and isinstance(node[key], int | float) and not isinstance(node[key], bool):
        node[key] = draw.choice((-node[key], node[key] + 1, node[key] * 2, node[key] * 10**9, str(node[key])))
    elif kind == 3 and isinstance(node[key], list):
        node[key] = node[key] * draw.choice((0, 2, 100)) if len(node[key]) < 100 else node[key][:-1]
    elif kind == 4 and isinstance(node, dict):
        node[draw.choice(TEXTS)] = node.pop(key)
    else:
        node[key] = copy.deepcopy(draw.choice(VALUES))
    return value


def some_bytes(data: bytes, draw: random.Random) -> bytes:
    """Bytes with a bit flipped, cut short, a piece removed, doubled or overwritten."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(changed) + 1)
        length = min(draw.choice((1, 4, 64)), len(changed) - at)
        kind = draw.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            del changed[at : at + length]
        elif kind == 3:
            changed[at:at] = changed[at : at + length]
        elif kind == 4:
            changed[at : at + length] = draw.randbytes(length)
        else:
            changed[at:at] = draw.choice((b"\x00", b"\xff\xfe", b"\n", b'"', b",", b"[", b"\xf0\x9f", b"1e999"))
    return bytes(changed)


def safetensors(data: bytes, draw: random.Random) -> bytes:
    """A safetensors file with another header: entries, offsets, dtypes, or a length that is not that of the header."""
    (length,) = struct.unpack("<Q", data[:8])
    header, values = json.loads(data[8 : 8 + length]), data[8 + length :]
    kind = draw.randrange(8)
    if kind == 0:
        return some_bytes(data, draw)
    if kind == 1:
        return struct.pack("<Q", draw.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1))) + data[8:]
    name = draw.choice([name for name in header if name != "__metadata__"])
    if kind == 2:
        begin, end = header[name]["data_offsets"]
        offsets = draw.choice(([0, end], [begin, end - 4], [end, begin], [-4, end], [begin, 2**63], [begin, end, 0]))
        header[name]["data_offsets"] = offsets
    elif kind == 3:
        header[name]["shape"] = draw.choice(([2**32, 2**32], [-1, -4], [0], [], [10**12], header[name]["shape"][::-1]))
    elif kind == 4:
        header[name]["dtype"] = draw.choice(("F64", "F16", "BF16", "I64", "BOOL", "F8_E4M3", "X", None))
    elif kind == 5:
        header |= {f"{name}.{number}": header[name] for number in range(draw.choice((1, 1000)))}
    elif kind == 6:
        values = draw.choice((values[:-4], values + b"\x00" * 8, b""))
    text = json.dumps(header).encode() if kind < 7 else json_text(header, draw)
    return struct.pack("<Q", len(text)) + text + values


def archive(data: bytes, draw: random.Random) -> bytes:
    """A zip archive (.npz) with one entry damaged, renamed or doubled."""
    if draw.random() < 0.3:
        return some_bytes(data, draw)
    with zipfile.ZipFile(io.BytesIO(data)) as read:
        entries = {name: read.read(name) for name in read.namelist()}
    name = draw.choice(list(entries))
    kind, content = draw.randrange(4), entries.pop(name)
    if kind == 0:
        entries[name] = some_bytes(content, draw)
    elif kind == 1:
        end = 10 + struct.unpack("<H", content[8:10])[0]
        head = content[10:end].decode("latin1")
        shape = draw.choice(("(0,)", "()", "(10**12,)", "(1000000000000,)", "(-1,)", "(2, 2, 2)", "None"))
        dtype = draw.choice(("<f8", "<i8", "|O", "<U3", "<c16", "|b1", "|V8", "<M8[s]"))
        text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
        head = draw.choice((text, head.replace("<f", ">f"), head.replace("False", "True"))).strip()
        padded = head.ljust(-(len(head) + 11) % 64 + len(head)) + "\n"
        entries[name] = content[:8] + struct.pack("<H", len(padded)) + padded.encode() + content[end:]
    elif kind == 2:
        entries[draw.choice(("logits.npy", "labels.npy", "group.npy", "features.npy", "../x.npy"))] = content
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as write:
        for entry, value in entries.items():
            write.writestr(entry, value)
    return stream.getvalue()


def lines(data: bytes, draw: random.Random) -> bytes:
    """Lines of text (CSV, JSON lines) with a cell or a row replaced, removed or doubled."""
    if draw.random() < 0.2:
        return some_bytes(data, draw)
    rows = data.decode(errors="replace").splitlines()
    for _ in range(draw.choice((1, 2))):
        number = draw.randrange(len(rows)) if draw.random() < 0.8 else 0
        with contextlib.suppress(ValueError, RecursionError):
            if draw.random() < 0.8:
                rows[number] = json_text(json.loads(rows[number]), draw).decode("utf-8", "replace")
                continue
        cells = rows[number].split(",")
        kind = draw.randrange(6)
        if kind == 0:
            cells[draw.randrange(len(cells))] = str(draw.choice(VALUES))
        elif kind == 1:
            del cells[draw.randrange(len(cells))]
        elif kind == 2:
            cells += cells
        elif kind == 3:
            cells = cells[::-1]
        elif kind == 4:
            rows.insert(number, draw.choice(("", ",,,", "null", '"', "[]", "=1+1,@x")))
        else:
            rows[number + 1 :] = []
        rows[number] = ",".join(cells)
    return "\n".join(rows).encode("utf-8", "replace")


def mutator(name: str) -> Callable[[bytes, random.Random], bytes]:
    """The mutation that knows the format of a file of this name."""
    if name.endswith(".json"):
        return lambda data, draw: json_text(json.loads(data), draw)
    by_suffix = {".safetensors": safetensors, ".npz": archive, ".csv": lines, ".jsonl": lines, ".txt": lines}
    return next((function for suffix, function in by_suffix.items() if name.endswith(suffix)), some_bytes)
