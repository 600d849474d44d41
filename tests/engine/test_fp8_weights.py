"""FP8 weights that stay so in memory: their bits, products, experts, bytes, and classic faults."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch
from tests.engine.test_experts import PLAIN, by_definition, drawn, rows
from tests.support.quantiser import FORMATS, quantise
from tests.support.recalling_prompts import recalling
from tests.support.solo_engine import SoloEngine
from torch._subclasses.fake_tensor import FakeTensorMode

from medha.checkpoints.decoder_config import read_config
from medha.checkpoints.fit import check_packed, packed_bytes
from medha.checkpoints.quantization import Quantization
from medha.config import WorkerConfig
from medha.errors import SpecError
from medha.model import LatentShape, ModelShape
from medha.predictor import Products
from medha.profile import H100
from medha.topology import Topology
from medha_worker.model.checkpoint_writer import FAMILIES, TinyModel
from medha_worker.model.experts import Experts
from medha_worker.model.fp8_linear import Fp8Linear, Scratch, fp8_linear
from medha_worker.model.layers import GatedMlp, Linear, Projection
from medha_worker.model.packed_weights import Fp8Parts, Fp8Weight
from medha_worker.weights import Checkpoint, Weights, load

Folder = Callable[[TinyModel], pathlib.Path]
Quantised = Callable[[str, str], tuple[pathlib.Path, pathlib.Path]]

# TP 2 and 4 cut dense and expert widths inside blocks.
MODELS = {
    "dense": TinyModel(layers=2, intermediate=344),
    "biased": TinyModel(family="qwen2", layers=2, intermediate=384, tied=True),
    "experts": FAMILIES["qwen3_moe"],
    "latents": FAMILIES["deepseek_v3"],
}
INT4 = ("awq", "gptq", "pack-quantized")
NAMES = [name for name, packing in FORMATS.items() if packing.spelling not in INT4]
EVERY_BYTE = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn)

name_ = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def quantised(checkpoint: Folder, tmp_path_factory: pytest.TempPathFactory) -> Quantised:
    """The packed checkpoint and the plain one of the same weights, written when first asked for."""

    @functools.cache
    def folders(name: str, model: str) -> tuple[pathlib.Path, pathlib.Path]:
        target = tmp_path_factory.mktemp("quantised")
        return quantise(checkpoint(MODELS[model]), target, FORMATS[name])

    return folders


def loaded(
    folder: pathlib.Path,
    shard: int = 0,
    tp: int = 1,
    dtype: torch.dtype = torch.float32,
    *,
    packed: bool = False,
) -> Weights:
    config = read_config(folder)
    layers = range(config.layers)
    return load(Checkpoint(folder), config, layers, shard, tp, dtype, packed=packed)


def projections(held: Weights) -> Iterator[Projection]:
    """Every projection of a layer but routers, in order."""
    for layer in held.layers:
        yield from (layer.qkv, layer.out)
        if layer.latent is not None and layer.latent.query_up is not None:
            yield layer.latent.query_up
        mlps = [layer.mlp]
        if isinstance(layer.mlp, Experts):
            yield from (*layer.mlp.gate_up, *layer.mlp.down)
            mlps = [layer.mlp.shared] if layer.mlp.shared else []
        for mlp in mlps:
            assert isinstance(mlp, GatedMlp)
            yield from (mlp.gate_up, mlp.down)


def differences(packed: Weights, plain: Weights) -> int:
    """Number of projections whose weights are not the same, bit by bit."""
    pairs = zip(projections(packed), projections(plain), strict=True)
    return sum(not torch.equal(a.by_output(), b.by_output()) for a, b in pairs)


def in_tiles(projection: Projection, entries: int) -> Fp8Linear:
    """The same projection, dequantised in tiles of that many entries."""
    assert isinstance(projection, Fp8Linear)
    scratch = Scratch(projection.dtype, "cpu", entries)
    scratch.reserve(projection.numbers.shape[1])
    return dataclasses.replace(projection, scratch=scratch)


# --- bits -----------------------------------------------------------------------------------------


@name_
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("model", ["dense", "experts", "latents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_kept_weights_are_the_dequantised_ones_bit_by_bit(
    name: str, tp: int, model: str, dtype: torch.dtype, quantised: Quantised
) -> None:
    packed, plain = quantised(name, model)
    for shard in range(tp):
        actual = loaded(packed, shard, tp, dtype, packed=True)
        expected = loaded(plain, shard, tp, dtype)
        assert differences(actual, expected) == 0
        kinds = [isinstance(projection, Fp8Linear) for projection in projections(actual)]
        assert all(kinds) or FORMATS[name].left
        assert sum(kinds) > len(kinds) / 3
        for own, other in zip(actual.layers, expected.layers, strict=True):
            if own.latent is not None and other.latent is not None:
                assert torch.equal(own.latent.key_up, other.latent.key_up)
                assert torch.equal(own.latent.value_up, other.latent.value_up)


@pytest.mark.parametrize("by_bits", [True, False], ids=["a CPU's", "a GPU's"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_number_is_converted_exactly_and_rounded_once(
    dtype: torch.dtype, by_bits: bool
) -> None:
    numbers = EVERY_BYTE[~EVERY_BYTE.float().isnan()].view(2, 127)
    scratch = Scratch(dtype, "cpu", 16, by_bits=by_bits)
    scratch.reserve(numbers.numel())
    for scale in (1.0, 0.3, 1e-6, 2.0**-126, 100.7):
        scales = torch.tensor([[scale], [1.7 * scale]])
        expected = (numbers.float() * scales).to(dtype)
        assert torch.equal(scratch.dequantised(numbers, scales), expected)


@pytest.mark.parametrize(
    ("inputs", "parts"),
    [(slice(0, 72), 3), (slice(24, 96), 3), (slice(36, 72), 3), (slice(5, 9), 1)],
)
def test_a_cut_shares_scales_as_far_as_blocks_allow(
    inputs: slice, parts: int, quantised: Quantised
) -> None:
    folder, plain = quantised("fp8, narrow blocks", "dense")  # of 40 outputs and 24 inputs
    packing = read_config(folder).quantization
    assert packing is not None
    name = "model.layers.0.mlp.down_proj"
    weight = Fp8Weight(Checkpoint(folder), name, (128, 344), packing, lambda tensor: tensor)
    outputs = slice(39, 81)
    part = weight.parts((outputs, inputs))
    assert part.scales.shape == (3, parts)
    assert part.of_output.tolist() == [0] + [1] * 40 + [2]
    whole = Checkpoint(plain).slice(name + ".weight", (128, 344))[:]
    assert torch.equal(part.dequantised(), whole[outputs, inputs])


# --- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("entries", [1, 1000, 1 << 20])
@pytest.mark.parametrize("tp", [1, 2])
def test_products_in_tiles_are_those_of_the_whole_weight(
    entries: int, tp: int, quantised: Quantised
) -> None:
    packed, plain = quantised("fp8, narrow blocks", "biased")
    for shard in range(tp):
        pairs = zip(
            projections(loaded(packed, shard, tp, packed=True)),
            projections(loaded(plain, shard, tp)),
            strict=True,
        )
        for kept, expected in pairs:
            actual = in_tiles(kept, entries)
            for count in (1, 2, 33):
                x = torch.randn(count, expected.by_output().shape[1])
                torch.testing.assert_close(actual(x), expected(x), rtol=1e-5, atol=1e-5)
                sums = torch.randn(count, len(expected.by_output())).repeat(2, 1, 1)
                actual.onto(x, sums[0])
                expected.onto(x, sums[1])
                torch.testing.assert_close(sums[0], sums[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
def test_few_rows_give_in_the_compiled_kernel_what_they_give_in_tiles(biased: bool) -> None:
    parts = [
        Fp8Parts(
            torch.randn(outputs, 192).to(torch.float8_e4m3fn),
            torch.rand(-(-outputs // 32), 3),
            torch.arange(outputs, dtype=torch.int32) // 32,
        )
        for outputs in (40, 96)
    ]
    bias = torch.randn(136) if biased else None
    native = fp8_linear(parts, Scratch(torch.float32, "cpu"), bias)
    tiles = dataclasses.replace(native, scratch=Scratch(torch.float32, "cpu"))
    tiles.scratch.native = None
    for count in (1, 3, 8, 9):
        x, sums = torch.randn(count, 192), torch.randn(count, 136).repeat(2, 1, 1)
        torch.testing.assert_close(native(x), tiles(x), rtol=1e-5, atol=1e-4)
        native.onto(x, sums[0])
        tiles.onto(x, sums[1])
        torch.testing.assert_close(sums[0], sums[1], rtol=1e-5, atol=1e-4)


def test_in_blocks_a_row_has_the_same_bits_in_any_batch() -> None:
    """Products of fixed rows are a GPU's; in float64 torch multiplies here, too."""
    numbers = torch.randn(96, 64).to(torch.float8_e4m3fn)
    parts = Fp8Parts(
        numbers,
        torch.tensor([[0.5, 2.0], [4.0, 0.125], [1.0, 8.0]]),
        torch.arange(96, dtype=torch.int32) // 32,
    )
    scratch = Scratch(torch.float64, "cpu", 640, by_bits=False)
    linear = fp8_linear([parts], scratch, None).in_blocks(16)
    x = torch.randn(40, 64, dtype=torch.float64)
    whole = linear(x)
    torch.testing.assert_close(whole, x @ parts.dequantised().double().t())
    assert all(torch.equal(linear(x[[n]])[0], whole[n]) for n in range(40))


@name_
@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_those_of_the_dequantised_checkpoint(
    name: str, model: str, quantised: Quantised
) -> None:
    prompts = [recalling(length, 512, seed=length) for length in (30, 130, 300)]
    packed, plain = quantised(name, model)
    actual = SoloEngine(packed, pages=32, packed=True).generate(prompts, 20, chunk=64)
    assert actual == SoloEngine(plain, pages=32).generate(prompts, 20, chunk=64)


def shifted(own: Fp8Linear) -> Fp8Linear:
    numbers = own.numbers.view(torch.uint8).roll(1, 0).view(torch.float8_e4m3fn)
    return dataclasses.replace(own, numbers=numbers)


@pytest.mark.parametrize(
    "fault",
    [
        lambda own: dataclasses.replace(own, of_output=own.of_output.roll(40)),
        lambda own: dataclasses.replace(own, scales=own.scales.roll(1, 1)),
        lambda own: dataclasses.replace(own, scales=own.scales * 0 + own.scales.mean()),
        shifted,
    ],
    ids=["scales of other outputs", "of other inputs", "of the tensor", "other outputs"],
)
def test_a_classic_fault_is_seen_in_the_bits(
    fault: Callable[[Fp8Linear], Fp8Linear], quantised: Quantised
) -> None:
    packed, plain = quantised("fp8, narrow blocks", "dense")
    held = loaded(packed, packed=True)

    def broken(projection: Projection) -> Projection:
        assert isinstance(projection, Fp8Linear)
        return fault(projection)

    layers = [dataclasses.replace(layer, out=broken(layer.out)) for layer in held.layers]
    assert differences(dataclasses.replace(held, layers=tuple(layers)), loaded(plain)) == 2


# --- experts in tiles, as on a GPU ----------------------------------------------------------------


def kept_experts(count: int, per_token: int, dtype: torch.dtype) -> tuple[Experts, Experts]:
    """Experts with FP8 weights, and plain ones of the same weights."""
    experts, scratch = drawn(count, per_token), Scratch(dtype, "cpu", 2 * 2 * 32 * 48)

    def kept(linear: Projection) -> Fp8Linear:
        weight = linear.by_output()
        of_output = torch.arange(len(weight), dtype=torch.int32) // 16
        scales = torch.rand(int(of_output[-1]) + 1, 2) / 100
        numbers = (weight * 300).to(torch.float8_e4m3fn)
        return fp8_linear([Fp8Parts(numbers, scales, of_output)], scratch, None)

    router = Linear(experts.router.by_output().to(dtype).t())
    packed = dataclasses.replace(
        experts,
        router=router,
        gate_up=tuple(map(kept, experts.gate_up)),
        down=tuple(map(kept, experts.down)),
    )
    plain = dataclasses.replace(
        packed,
        gate_up=tuple(Linear(own.by_output().t()) for own in packed.gate_up),
        down=tuple(Linear(own.by_output().t()) for own in packed.down),
    )
    return packed, plain


@pytest.mark.parametrize("length", [1, 7, 40])
def test_experts_in_tiles_compute_the_mixture(length: int) -> None:
    packed, plain = kept_experts(9, 3, torch.float32)
    tiled, x = packed.grouped(), rows(length)
    assert tiled.packed is not None and tiled.packed[0].at_once == 2
    expected = by_definition(plain, x)
    for experts in (packed, tiled, plain.grouped()):
        torch.testing.assert_close(experts(x, PLAIN), expected, rtol=1e-4, atol=1e-5)
    assert tiled.in_blocks(16).packed is None


def test_stacked_experts_keep_one_copy_of_the_weights_and_their_bits() -> None:
    packed, plain = kept_experts(5, 2, torch.bfloat16)
    tiled = packed.grouped()
    assert tiled.packed is not None
    for stack, before, own in zip(
        tiled.packed, (plain.gate_up, plain.down), (tiled.gate_up, tiled.down), strict=True
    ):
        for number, projection in enumerate(own):
            assert isinstance(projection, Fp8Linear)
            assert projection.numbers.data_ptr() == stack.numbers[number].data_ptr()
            assert torch.equal(projection.by_output(), before[number].by_output())
        chosen = stack.dequantised([3, 1])
        assert torch.equal(chosen[0].t(), before[3].by_output())
        assert torch.equal(chosen[1].t(), before[1].by_output())
    x = rows(20).bfloat16()
    torch.testing.assert_close(tiled(x, PLAIN), plain(x, PLAIN), rtol=0.05, atol=0.02)


def test_graphs_hold_fp8_projections_but_not_experts() -> None:
    """Tensors without values stand for a GPU's: what would read one raises."""
    packed, plain = kept_experts(8, 3, torch.bfloat16)
    assert plain.grouped().on_device and not packed.grouped().on_device
    with FakeTensorMode():
        there = torch.device("cuda")
        numbers = torch.zeros(300, 256, dtype=torch.float8_e4m3fn, device=there)
        of_output = torch.zeros(300, dtype=torch.int32, device=there)
        parts = Fp8Parts(numbers, torch.zeros(3, 2, device=there), of_output)
        scratch = Scratch(torch.bfloat16, there, 256 * 70)
        linear = fp8_linear([parts, parts], scratch, None)
        x = torch.zeros(5, 256, dtype=torch.bfloat16, device=there)
        out = linear(x)
        linear.onto(x, out)
        linear.in_blocks(4)(x)
    assert out.shape == (5, 600) and out.dtype == torch.bfloat16


# --- bytes ----------------------------------------------------------------------------------------


def held_bytes(held: Weights) -> int:
    total = 0
    for projection in projections(held):
        if isinstance(projection, Fp8Linear):
            parts = (projection.numbers, projection.scales, projection.of_output)
            total += sum(part.nbytes for part in parts)
        else:
            total += projection.by_output().nbytes
    return total


@pytest.mark.parametrize("model", ["biased", "experts", "latents"])
def test_kept_weights_take_the_bytes_that_the_predictor_reads(
    model: str, quantised: Quantised
) -> None:
    packed, plain = quantised("fp8, tensor", model)
    config = read_config(packed)
    assert config.quantization is not None and config.quantization.held_bytes(2.0) == 1.0
    assert Quantization(method="fp8", block=(128, 128)).held_bytes(2.0) == 1 + 4 / 16384
    actual, expected = (
        held_bytes(loaded(packed, dtype=torch.bfloat16, packed=True)),
        held_bytes(loaded(plain, dtype=torch.bfloat16)),
    )
    small = MODELS[model].hidden  # an int32 per output, which has that many inputs
    assert 0.5 * expected <= actual <= 0.5 * expected * (1 + 2 * 4 / min(small, 32))


def test_all_products_of_a_rank_share_one_scratch_of_a_tile(quantised: Quantised) -> None:
    held = loaded(quantised("fp8, tensor", "latents")[0], packed=True)
    kept = [own for own in projections(held) if isinstance(own, Fp8Linear)]
    assert len({id(own.scratch) for own in kept}) == 1
    x = torch.randn(3, kept[0].numbers.shape[1])
    kept[0](x)
    assert kept[0].scratch.entries == kept[0].scratch.tile == 1 << 20


def deepseek_v3() -> ModelShape:
    """The shape of DeepSeek-V3, in bfloat16."""
    return ModelShape(
        layers=61,
        hidden=7168,
        heads=128,
        kv_heads=1,
        head_dim=576,
        intermediate=18432,
        vocab=129280,
        experts=256,
        experts_per_token=8,
        expert_intermediate=2048,
        expert_layers=58,
        shared_intermediate=2048,
        latent=LatentShape(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
    )


def test_the_law_reads_fp8_projections_and_plain_absorbed_ones_and_routers() -> None:
    plain = deepseek_v3()
    packed = msgspec.structs.replace(plain, packed_bytes=1.0)
    stay = plain.layers * plain.absorbed_params_of(1) + plain.expert_layers * plain.router_params
    tables = 2 * plain.vocab * plain.hidden + plain.hidden * (2 * plain.layers + 1)
    assert packed.weight_bytes == plain.params + stay + tables
    for profile in (H100, msgspec.structs.replace(H100, tiles=())):
        slow, fast = (Products(profile, shape, 1) for shape in (plain, packed))
        assert 0.4 * slow.layer(1) < fast.layer(1) < 0.75 * slow.layer(1)
        assert fast.head(1) == slow.head(1)
        dense = msgspec.structs.replace(plain, packed_bytes=2.0)
        assert Products(profile, dense, 1).layer(1) == slow.layer(1)


def test_deepseek_v3_takes_half_the_memory() -> None:
    plain = deepseek_v3()
    packed = msgspec.structs.replace(
        plain, packed_bytes=Quantization(method="fp8", block=(128, 128)).held_bytes(2.0)
    )
    assert plain.weight_bytes / 1e9 == pytest.approx(1342, abs=1)
    assert packed.weight_bytes / 1e9 == pytest.approx(674, abs=1)


# --- what is served -------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "more",
    [{"tp": 4}, {"device": "cuda", "dtype": "bfloat16"}, {"device": "cuda", "deterministic": True}],
)
def test_every_layout_keeps_fp8(model: str, more: dict[str, object], quantised: Quantised) -> None:
    folder = quantised("fp8, narrow blocks", model)[0]
    fitting = WorkerConfig(
        replica="r",
        model="m",
        checkpoint=str(folder),
        max_context_tokens=64,
        topology=Topology(tp=int(str(more.pop("tp", 1)))),
        kv_pages=2,
        rank_bind="ipc://x",
        packed_weights=True,
    )
    config = msgspec.structs.replace(fitting, **more)
    assert packed_bytes(read_config(folder), config) == 1 + 4 / (40 * 24)
    with pytest.raises(SpecError, match="packedWeights is Enabled: needs a checkpoint's weights"):
        check_packed(read_config(folder), msgspec.structs.replace(config, dummy_weights=True))
