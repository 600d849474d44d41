"""The declarations of Python's stable ABI that the scheduler's C code has of its own."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
from hatch_build import compiler

HEADER = Path(__file__).parents[2] / "core/medha/scheduling/stable_abi.h"
PYTHON = Path(sysconfig.get_path("include"), "Python.h")
NUMBERS = (
    *re.findall(r"#define (\w+) (?:0x)?[\d(]", HEADER.read_text()),
    *(
        f"sizeof({name})"
        for name in ("PyObject", "PyMethodDef", "PyMemberDef", "PyType_Slot", "PyType_Spec")
    ),
    "sizeof(Py_buffer)",
    "sizeof(struct PyModuleDef)",
    *(
        f"offsetof({struct}, {field})"
        for struct, fields in {
            "PyObject": ("ob_refcnt", "ob_type"),
            "PyMethodDef": ("ml_name", "ml_meth", "ml_flags", "ml_doc"),
            "PyMemberDef": ("name", "type", "offset", "flags", "doc"),
            "PyType_Spec": ("name", "basicsize", "itemsize", "flags", "slots"),
            "Py_buffer": ("buf", "obj", "len", "itemsize", "readonly", "ndim", "internal"),
            "struct PyModuleDef": ("m_base", "m_name", "m_doc", "m_size", "m_methods", "m_free"),
        }.items()
        for field in fields
    ),
)


def numbers(folder: Path, include: str) -> str:
    """Print all of NUMBERS by a program that includes these declarations."""
    lines = "".join(f'    printf("{name} %ld\\n", (long)({name}));\n' for name in NUMBERS)
    source, program = folder / "numbers.c", folder / "numbers"
    source.write_text(
        f"{include}\n#include <stddef.h>\n#include <stdio.h>\nint main(void)\n{{\n{lines}}}\n"
    )
    folders = ["-I", str(PYTHON.parent), "-I", str(HEADER.parent)]
    subprocess.run([*compiler(), *folders, "-c", "-o", f"{program}.o", str(source)], check=True)
    subprocess.run([*compiler(), "-o", str(program), f"{program}.o"], check=True)
    return subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(not PYTHON.exists(), reason="Python's headers are not installed")
def test_layouts_and_numbers_are_those_of_pythons_headers(tmp_path: Path) -> None:
    ours = numbers(tmp_path, '#include "stable_abi.h"')
    limited = "#define Py_LIMITED_API 0x030b0000\n#include <Python.h>\n#include <structmember.h>"
    assert len(ours.splitlines()) == len(NUMBERS) > 40
    assert ours == numbers(tmp_path, limited)
