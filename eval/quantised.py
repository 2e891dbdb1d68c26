"""What quantisation does to calibration: one model's GGUF file, requantised, evaluated on the same held-out text.

    python eval/quantised.py model.gguf data.jsonl --types F32 Q8_0 Q4_0 --sequences 160 --out runs/quantised

Every file holds the same weights, rounded by the reference quantisation of the package `gguf`. The temperature and the
ATS head of the first type are evaluated under the others too: a head is usually fitted to the model before it is
quantised. Prints a table in Markdown; the files stay in --out.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

import calibjax
from calibjax.commands.parser import in_one_line

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")  # that gguf quantises to, in blocks of 32


def requantised(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """Writes the file with its matrices in another type; vectors stay float32, as llama.cpp has them."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            writer.add_key_value(
                name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        dtype = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(values, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("data", help="as `calibjax train ats --data`")
    types = {"nargs": "+", "choices": TYPES, "default": ["F32", "Q8_0", "Q4_0"]}
    parser.add_argument("--types", **types, help="of the files; heads of the first are carried over to the others")
    parser.add_argument("--sequences", type=int, default=160, help="of 256 tokens; 60%% to fit on, the rest held out")
    parser.add_argument("--out", type=Path, default=Path("runs/quantised"), help="for the files")
    args = parser.parse_args()
    sys.excepthook = in_one_line
    if not args.model.is_file():
        parser.error(f"model: expected a GGUF file, {args.model} is none")
    args.out.mkdir(parents=True, exist_ok=True)
    reference_heads = None
    print("| file | uncalibrated: NLL, ECE | own temperature | first file's temperature | own ATS | first file's ATS |")
    print("|---|---|---|---|---|---|")
    for kind in args.types:
        target = args.out / f"{args.model.stem}.{kind}.gguf"
        lm = calibjax.load_model(requantised(args.model, target, gguf.GGMLQuantizationType[kind]))
        text = calibjax.load_text(args.data, lm, seq_len=256, max_sequences=args.sequences)
        fit, held_out = calibjax.split_sequences(text, 0.6)
        own_heads = calibjax.fit_ats(lm, fit).heads
        reference_heads = reference_heads or own_heads
        carried = {
            f"first {name}": dataclasses.replace(head, fingerprint=lm.fingerprint)
            for name, head in reference_heads.items()
        }
        figures = calibjax.evaluate(lm, held_out, own_heads | carried).results
        order = ("uncalibrated", "temperature", "first temperature", "ats", "first ats")
        cells = [", ".join(f"{figures[name][figure].value:.4f}" for figure in ("nll", "ece")) for name in order]
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
