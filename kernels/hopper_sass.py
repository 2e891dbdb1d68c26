"""Instructions of Hopper kernels that multiply by wgmma, by kind: a step of the main loop, and the epilogue.

    python kernels/hopper_sass.py FILE.sass ...     # of `nvdisasm -c FILE.cubin`
    python kernels/hopper_static.py --sass          # of ours

The step is the innermost loop with products; the epilogue is what the smallest loop around it that has all products
does besides, for each tile: also where it branches, so code of a ragged last tile counts beside that of all others.
"""

import pathlib
import re
import shutil
import sys
from collections import Counter

_KINDS = {
    "wgmma": ("HGMMA",),
    "exp2": ("MUFU.EX2",),
    "float": ("FADD", "FFMA", "FMUL", "FMNMX"),
    "half": ("HADD2", "HFMA2", "HMUL2", "HMNMX2", "HSETP2"),
    "compare, select": ("FSEL", "FSETP", "ISETP", "UISETP", "PLOP3", "SEL", "USEL", "VIMNMX"),
    "convert": ("F2", "FRND", "I2"),
    "shuffle": ("SHFL",),
    "shared memory": ("LDS", "STS"),
    "memory": ("LD.", "LDG", "LDL", "ST.", "STG", "STL", "RED", "ATOM"),
    "TMA": ("UTMA", "UBLK"),
    "synchronise": ("BAR", "DEPBAR", "FENCE", "MEMBAR", "NANOSLEEP", "SYNCS", "UCGABAR", "WARP", "LDGDEPBAR"),
}
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*)")


def nvdisasm() -> pathlib.Path | None:
    """The disassembler of CUDA or of triton's wheel, if there is one."""
    on_path = shutil.which("nvdisasm")
    wheel = [pathlib.Path(path, "triton/backends/nvidia/bin/nvdisasm") for path in sys.path]
    return pathlib.Path(on_path) if on_path else next(filter(pathlib.Path.is_file, wheel), None)


def _kind(name: str) -> str:
    return next((kind for kind, starts in _KINDS.items() if name.startswith(starts)), "other")


def counts(text: str) -> dict[str, dict[str, int]]:
    """ "step" and "epilogue" of the one kernel in `text`: kind -> instructions, and their sum as "all"."""
    names, labels, jumps = [], {}, []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(names)
        elif found := _INSTRUCTION.search(line):
            if found[1].startswith("BRA") and (target := re.search(r"\((\.L_\w+)\)", found[2])):
                jumps.append((target[1], len(names)))
            names.append(found[1])
    products = [i for i, name in enumerate(names) if name.startswith("HGMMA")]
    loops = [range(labels[label], end + 1) for label, end in jumps if labels.get(label, end + 1) <= end]
    if not products or not any(products[-1] in loop for loop in loops):
        raise ValueError("no loop with wgmma instructions")
    step = min((loop for loop in loops if products[-1] in loop), key=len)
    tile = min((loop for loop in loops if products[0] in loop and products[-1] in loop and loop != step), key=len)

    def tally(places: list[int]) -> dict[str, int]:
        found = Counter(_kind(names[i]) for i in places)
        return {"all": sum(found.values())} | {kind: found[kind] for kind in (*_KINDS, "other") if found[kind]}

    return {"step": tally(list(step)), "epilogue": tally([i for i in tile if i not in step])}


def table(found: dict[str, dict[str, int]]) -> str:
    """A line for each part of `counts`."""
    return "\n".join(f"    {part}: {', '.join(f'{k} {n}' for k, n in kinds.items())}" for part, kinds in found.items())


if __name__ == "__main__":
    for file in sys.argv[1:]:
        print(f"{file}\n{table(counts(pathlib.Path(file).read_text()))}")
