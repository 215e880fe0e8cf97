"""A GGUF file again with its matrices in one other type, so that all engines run the same weights.

    python bench/peers/rewrite_gguf.py MODEL.Q4_1.gguf MODEL.F16.gguf F16

Needs the package gguf, as Tokenmill has it. Vectors (norms) become float32, metadata stay.
"""

import argparse
from pathlib import Path

import gguf
from gguf.quants import dequantize, quantize

FILE_TYPES = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}
# the writer tells these itself
OWN_KEYS = {"general.architecture", "general.file_type", "general.quantization_version"}


def main() -> None:
    options = argparse.ArgumentParser(description="A GGUF file again, its matrices in one type.")
    options.add_argument("source", type=Path)
    options.add_argument("target", type=Path)
    options.add_argument("type", choices=tuple(FILE_TYPES))
    chosen = options.parse_args()
    rewrite(chosen.source, chosen.target, chosen.type)


def rewrite(source: Path, target: Path, type_name: str) -> None:
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name in OWN_KEYS or name.startswith("GGUF."):
            continue
        element = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=element)
    writer.add_file_type(FILE_TYPES[type_name])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    matrices = gguf.GGMLQuantizationType[type_name]
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        kept = matrices if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(values, kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
