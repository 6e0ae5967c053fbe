"""Optimised HLO read from text: real samples of both compilers, and the arithmetic of layouts and tiles."""

import gc
import re
import weakref
from pathlib import Path

import pytest

from tpu_lab import hlo

SAMPLES = Path(__file__).parent / "fixtures" / "hlo"
CPU = (SAMPLES / "small_cpu.txt").read_text(encoding="utf-8")
TPU = (SAMPLES / "small_tpu.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", [CPU, TPU], ids=["cpu", "tpu"])
def test_every_instruction_of_a_real_module_is_read(text):
    module = hlo.parse(text)
    assert module.name == "jit_f" and module.entry.name == "main.5"
    read = [i for c in module.computations.values() for i in c.instructions]
    written = re.findall(r"^  (?:ROOT )?%([\w.\-]+) = ", text, re.M)
    assert [i.name for i in read] == written and set(module.lines) == set(written)
    for computation in module.computations.values():
        assert [i for i in computation.instructions if i.root] == [computation.root]
        for i in computation.instructions:
            assert set(i.operands) <= computation.by_name.keys(), i
            assert set(i.calls) <= module.computations.keys(), i


@pytest.mark.parametrize("text", [CPU, TPU], ids=["cpu", "tpu"])
def test_the_ops_of_each_entry_instruction(text):
    module = hlo.parse(text)
    found = hlo.scopes(module)
    assert found.keys() == module.entry.by_name.keys()
    for i in module.entry.instructions:
        assert bool(found[i.name]) == (i.opcode != "parameter"), i.name
    assert frozenset().union(*found.values()) == {0, 1, 2, 3, 4, 5, 6}
    assert found["sort"] == {4}
    assert all(found[i.name] == {5} for i in module.entry.instructions if i.opcode == "while")


def test_what_xla_tpu_writes():
    module = hlo.parse(TPU)
    entry, found = module.entry.by_name, hlo.scopes(module)
    fusion = entry["fusion.13"]
    assert fusion.opcode == "fusion" and fusion.attribute("kind") == "kOutput" and found["fusion.13"] == {0, 1, 2, 3}
    assert "convolution" in {i.opcode for i in module.inside(fusion)}
    loop = entry["while"]
    assert loop.calls == ("wide.region_2.4", "wide.region_1.3.sunk") and loop.operands == ("tuple.14",)
    start = entry["copy-start"]  # carries no metadata: it belongs to the gather that reads w from VMEM
    assert start.op_name == "" and found["copy-start"] == {6}
    assert hlo.arrays(start.shape)[0] == "f32[512,1024]{1,0:T(8,128)S(1)}" and hlo.space(start.shape) == 1
    assert module.entry.users["w.1"] == (fusion, start)
    custom = next(i for c in module.computations.values() for i in c.instructions if i.opcode == "custom-call")
    assert custom.attribute("custom_call_target") == "AssumeGatherIndicesInBound"


@pytest.mark.parametrize(
    ("shape", "logical", "padded", "space"),
    [
        ("f32[]", 4, 4, 0),
        ("f32[]{:T(128)}", 4, 512, 0),
        ("f32[8,128]{1,0:T(8,128)}", 4096, 4096, 0),
        ("f32[9,129]{1,0:T(8,128)}", 9 * 129 * 4, 16 * 256 * 4, 0),
        ("f32[256,4]{1,0:T(8,128)S(1)}", 4096, 256 * 128 * 4, 1),
        ("f32[256,4]{0,1:T(4,128)}", 4096, 4096, 0),  # the first dimension is the minor one
        ("bf16[4096,2048]{1,0:T(8,128)(2,1)S(1)}", 2 * 4096 * 2048, 2 * 4096 * 2048, 1),
        ("bf16[3,64]{1,0:T(8,128)(2,1)}", 3 * 64 * 2, 8 * 128 * 2, 0),
        ("bf16[2,3,64]{2,1,0:T(8,128)(2,1)}", 2 * 3 * 64 * 2, 2 * 8 * 128 * 2, 0),
        ("pred[256,1024]{1,0:T(8,128)(4,1)}", 1 << 18, 1 << 18, 0),
        ("s4[16]{0:T(1024)E(4)}", 8, 512, 0),
        ("f8e4m3fn[5]", 5, 5, 0),
        ("(f32[2]{0}, (s32[3]{0}, token[]))", 20, 20, 0),
        ("s32[<=10]{0}", 40, 40, 0),
        ("c64[2,0]{1,0}", 0, 0, 0),
        ("()", 0, 0, 0),
    ],
)
def test_bytes_and_space_of_a_shape(shape, logical, padded, space):
    assert (hlo.nbytes(shape), hlo.padded_bytes(shape), hlo.space(shape)) == (logical, padded, space)


def test_odd_spellings():
    module = hlo.parse(
        """HloModule jit_g, is_scheduled=true

wrapped.1 {
  a = f32[2]{0} parameter(0)
  ROOT n = f32[2]{0} negate(f32[2]{0} a), metadata={op_type="neg" op_name="jit(run)/12:aten.neg.default/neg"}
}, execution_thread="parallel"

ENTRY %main (p: f32[2]) -> (f32[2], s32[]) {
  %p = f32[2]{0} parameter(0), metadata={op_name="a \\"quoted\\" name"}
  %s = ((f32[2]{0}, /*index=1*/f32[2]{0}), s32[]) async-start((f32[2]{0}, f32[]) %p), calls=%wrapped.1
  %c = s32[] conditional(%p, %p), branch_computations={%wrapped.1, %other}, metadata={op_name="jit(run)/3:aten.x/y"}
  %text = f32[1]{0} constant({"(},"})
  ROOT %t = (f32[2]{0}, s32[]) tuple(%s, /*index=1*/%c)
}
"""
    )
    entry = module.entry.by_name
    assert entry["p"].op_name == 'a \\"quoted\\" name'
    assert entry["s"].shape == "((f32[2]{0}, f32[2]{0}), s32[])" and entry["s"].operands == ("p",)
    assert entry["c"].calls == ("wrapped.1", "other") and entry["c"].attribute("kind") == ""
    assert entry["t"].operands == ("s", "c") and entry["t"].root
    assert hlo.scopes(module) == {"p": frozenset(), "s": {12}, "c": {3, 12}, "text": frozenset(), "t": {3, 12}}


def test_text_that_is_no_module():
    with pytest.raises(ValueError, match="has no ENTRY computation"):
        hlo.parse("module @jit_f attributes {} {\n}")


def test_a_text_is_read_once_while_its_module_is_held():
    text = "HloModule once\n\nENTRY %main (a: f32[2]) -> f32[2] {\n  %a = f32[2]{0} parameter(0)\n  ROOT %b = f32[2]{0} negate(%a)\n}\n"
    module = hlo.parse(text)
    assert hlo.parse("".join(text)) is module
    seen = weakref.ref(module)
    del module
    gc.collect()
    assert seen() is None
