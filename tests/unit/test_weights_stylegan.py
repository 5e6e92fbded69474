"""Weights of stylegan2-ada-pytorch: outputs that the original computed, names, its pickles, and pickles that lie.

``tests/data/stylegan2`` holds state dictionaries of tiny networks of the original with random weights, inputs, and what
the original made of them (on a CPU, ``noise_mode`` const and none, ``truncation_psi`` 0.6 with cutoff 2, and
``num_fp16_res`` 2). ``snapshot.pkl`` is in the layout of its training loop, but where the original puts the source text
of its classes, this one has a statement that ends the program that runs it.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from bigsgan.config.families.stylegan2 import StyleGAN2Discriminator, StyleGAN2Generator
from bigsgan.errors import UserError
from bigsgan.models.network import LayerStack, initialize
from bigsgan.models.stylegan2 import discriminator_layers, generator_layers
from bigsgan.weights.stylegan import (
    data_section,
    discriminator_section,
    discriminator_state,
    generator_section,
    generator_state,
)
from bigsgan.weights.stylegan_pickle import read_networks

DATA = Path(__file__).resolve().parents[1] / "data" / "stylegan2"
# What shapes do not say of the recorded networks.
CLAMP = {"generator": 4.0, "generator_unconditional": None, "discriminator": 16.0, "discriminator_orig": None}


def recorded(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """State, and inputs and outputs."""
    tensors = load_file(DATA / f"{name}.safetensors")
    state = {key.removeprefix("state."): tensor for key, tensor in tensors.items() if key.startswith("state.")}
    return state, {key: tensor for key, tensor in tensors.items() if not key.startswith("state.")}


def imported_generator(state: dict[str, Tensor], **section: Any) -> LayerStack:
    config = StyleGAN2Generator(**{**generator_section(state), **section})
    network = LayerStack(generator_layers(config, **data_section(state)))
    network.load_state_dict(generator_state(state))
    return network.eval()


def imported_discriminator(state: dict[str, Tensor], **section: Any) -> LayerStack:
    config = StyleGAN2Discriminator(**{**discriminator_section(state), **section})
    network = LayerStack(discriminator_layers(config, **data_section(state)))
    network.load_state_dict(discriminator_state(state))
    return network


def images_of(network: LayerStack, given: dict[str, Tensor], noise_mode: str) -> Tensor:
    for module in network.modules():
        if hasattr(module, "noise_mode"):
            module.noise_mode = noise_mode
    with torch.no_grad():
        return network(given["latents"], given["labels"], torch.arange(len(given["labels"])))


# --- outputs of the original ---


@pytest.mark.parametrize("name", ["generator", "generator_unconditional"])
def test_the_generator_makes_the_originals_images(name):
    state, given = recorded(name)
    network: Any = imported_generator(state, conv_clamp=CLAMP[name])
    for mode in ("const", "none"):
        assert_close(images_of(network, given, mode), given[mode], rtol=0, atol=2e-5)
    mapping = network.layers["0"]
    ws, _ = mapping(given["latents"], given["labels"], given["labels"])
    assert_close(ws, given["ws"], rtol=0, atol=1e-5)
    mapping.truncation_psi, mapping.truncation_cutoff = 0.6, 2
    assert_close(images_of(network, given, "const"), given["truncated"], rtol=0, atol=2e-5)
    assert (given["truncated"] - given["const"]).abs().max() > 0.1
    assert (given["none"] - given["const"]).abs().max() > 0.1


@pytest.mark.parametrize("name", ["discriminator", "discriminator_orig"])
def test_the_discriminator_gives_the_originals_logits_and_gradients(name):
    state, given = recorded(name)
    network = imported_discriminator(state, conv_clamp=CLAMP[name])
    images = given["images"].requires_grad_()
    logits = network(images, given["labels"])
    assert_close(logits, given["logits"], rtol=0, atol=1e-5)
    (gradient,) = torch.autograd.grad(logits.sum(), images)
    assert given["gradient"].abs().max() > 0.01
    assert_close(gradient, given["gradient"], rtol=1e-4, atol=1e-6)


def test_half_precision_is_the_originals():
    """Rounding differs with the order of operations: both are as far from float32 as from each other."""
    state, given = recorded("generator")
    network = imported_generator(state, conv_clamp=4.0, half_resolutions=2, half_type="fp16")
    error = (images_of(network, given, "const") - given["half"]).norm() / given["half"].norm()
    assert 1e-5 < error < 0.003
    state, given = recorded("discriminator")
    judge = imported_discriminator(state, conv_clamp=16.0, half_resolutions=2, half_type="fp16")
    assert_close(judge(given["images"], given["labels"]), given["half"], rtol=0.001, atol=0)


# --- names and sections ---


def theirs(network: LayerStack, kind: str) -> dict[str, Tensor]:
    """Our state under the original's names, with the filters that only the original has."""
    last = len(network.layers) - 1
    state: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        _, index, rest = name.split(".", 2)
        i = int(index)
        if rest.startswith(("network.", "mapping.")):
            name = rest.replace("network.", "mapping.").replace(".fc.", ".fc")
        elif kind == "generator":
            name = f"synthesis.b{2 ** (i + 1)}.{rest}" if i else f"mapping.{rest}"
        else:
            name = f"b{4 * 2 ** (last - i)}.{rest}"
        state[name] = tensor[0] if name.endswith("noise_strength") else tensor
    prefix = "synthesis.b" if kind == "generator" else "b"
    for owner in (f"{prefix}4", f"{prefix}8", f"{prefix}8.conv1", f"{prefix}8.conv0"):
        state.setdefault(f"{owner}.resample_filter", torch.ones(4, 4, device=tensor.device))
    return state


@pytest.mark.parametrize("num_classes, colours", [(0, 3), (5, 1)])
@pytest.mark.parametrize(
    "resolution, channel_base, channel_max, inferred",
    [
        (256, 16_384, 512, {}),
        (512, 32_768, 512, {}),
        (1024, 32_768, 512, {}),
        (32, 32_768, 512, {"channel_base": 512 * 32}),  # no map is narrower, and all larger bases are the same
        (16, 64, 100, {"channel_max": 16}),  # none is cut off
        (16, 100, 12, {"channel_base": 96}),  # 100 // 8 = 12 and 100 // 16 = 6
    ],
)
def test_sections_follow_from_shapes(resolution, channel_base, channel_max, inferred, num_classes, colours):
    keys: dict[str, Any] = {"channel_base": channel_base, "channel_max": channel_max, "mapping_layers": 3}
    data = {"resolution": resolution, "image_channels": colours, "num_classes": num_classes}
    with torch.device("meta"):
        g = LayerStack(generator_layers(StyleGAN2Generator(**keys, latent_size=7, w_size=9), **data))
        d = LayerStack(discriminator_layers(StyleGAN2Discriminator(**keys, mbstd_channels=2), **data))
    keys.update(inferred)
    keys["family"] = "stylegan2"
    state = theirs(g, "generator")
    assert generator_section(state) == {**keys, "latent_size": 7, "w_size": 9}
    assert data_section(state) == data
    assert {n: t.shape for n, t in generator_state(state).items()} == {n: t.shape for n, t in g.state_dict().items()}
    state = theirs(d, "discriminator")
    if not num_classes:
        del keys["mapping_layers"]
    assert discriminator_section(state) == {**keys, "architecture": "resnet", "mbstd_channels": 2}
    assert data_section(state) == data
    assert {n: t.shape for n, t in discriminator_state(state).items()} == {
        n: t.shape for n, t in d.state_dict().items()
    }


@pytest.mark.parametrize("kind", ["generator", "discriminator"])
def test_names_go_there_and_back_bit_for_bit(kind):
    state, _ = recorded(kind)
    network = imported_generator(state) if kind == "generator" else imported_discriminator(state)
    back = theirs(network, kind)
    kept = {name for name in state if not name.endswith("resample_filter")}
    assert kept == {name for name in back if not name.endswith("resample_filter")}
    assert all(torch.equal(back[name], state[name]) and back[name].shape == state[name].shape for name in kept)
    mine = LayerStack(list(network.layers.values()))
    initialize(mine, 0)
    filters = {name: tensor for name, tensor in mine.state_dict().items() if name.endswith("resample_filter")}
    assert filters
    names = generator_state(state) if kind == "generator" else discriminator_state(state)
    assert all(torch.equal(tensor, names[name]) for name, tensor in filters.items())


def test_a_discriminator_without_residual_connections_is_recognised():
    assert discriminator_section(recorded("discriminator_orig")[0]) == {
        "family": "stylegan2", "architecture": "orig", "mbstd_channels": 2, "channel_base": 64, "channel_max": 8,
    }  # fmt: skip


def change(state: dict[str, Tensor], **changes: Any) -> dict[str, Tensor]:
    changed = dict(state)
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del changed[name]
        else:
            changed[name] = value
    return changed


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("generator", {"mapping__w_avg": None}, "'mapping.w_avg' is missing"),
        ("generator", {"mapping__fc1__bias": None}, r"'layers\.0\.network\.fc\.1\.bias' has no counterpart"),
        ("generator", {"mapping__fc1__bias": torch.zeros(3)}, r"has the shape \(3,\) and not \(8,\)"),
        ("generator", {"extra": torch.zeros(3)}, "'extra' is no entry of StyleGAN2's"),
        ("generator", {"synthesis__b8__skip__weight": torch.zeros(3)}, "blocks are residual"),
        ("generator", {"synthesis__b4__torgb__weight": None}, "images must be sums"),
        ("generator", {"synthesis__b8__conv1__weight": torch.zeros(3, 3, 3, 3)}, "that no channel_base gives"),
        ("generator", {"synthesis__b32__const": torch.zeros(3)}, "is missing, or is no weight"),
        ("generator", {"synthesis__b64__const": torch.zeros(3)}, "are not all there"),
        ("discriminator", {"b4__fromrgb__weight": torch.zeros(3)}, "looks at the image in every block"),
        ("discriminator", {"b16__fromrgb__weight": None}, "'b16.fromrgb.weight' is missing"),
        ("discriminator", {"b4__out__bias": torch.zeros(1)}, r"has the shape \(1,\)"),
        ("discriminator", {"mapping__w_avg": torch.zeros(1)}, "'mapping.w_avg' is no entry"),
    ],
)
def test_other_states_are_refused(kind, changes, message):
    state = change(recorded(kind)[0], **changes)
    with pytest.raises(UserError, match=message):
        (generator_state if kind == "generator" else discriminator_state)(state)


def test_one_network_is_not_taken_for_the_other():
    g, d = recorded("generator")[0], recorded("discriminator")[0]
    for function, state in ((generator_state, d), (discriminator_state, g), (generator_state, {}), (data_section, {})):
        with pytest.raises(UserError, match="are not all there"):
            function(state)


# --- pickles ---


def test_a_snapshot_is_read_without_running_its_source():
    networks = read_networks(DATA / "snapshot.pkl")
    assert {name: network.class_name for name, network in networks.items()} == {
        "G": "Generator", "D": "Discriminator", "G_ema": "Generator",
    }  # fmt: skip
    expected = load_file(DATA / "snapshot.safetensors")
    found = {f"{name}.{key}": t for name, network in networks.items() for key, t in network.state.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert b"raise SystemExit" in (DATA / "snapshot.pkl").read_bytes()


def test_a_snapshot_says_what_shapes_do_not():
    networks = read_networks(DATA / "snapshot.pkl")
    g, d = networks["G_ema"], networks["D"]
    precision = {"conv_clamp": 256.0, "half_resolutions": 1, "half_type": "fp16"}
    sizes = {"family": "stylegan2", "channel_base": 32, "channel_max": 4, **precision}
    section = generator_section(g.state, g.init_kwargs)
    assert section == {**sizes, "latent_size": 4, "w_size": 4, "mapping_layers": 2}
    StyleGAN2Generator(**section)
    section = discriminator_section(d.state, d.init_kwargs)
    assert section == {**sizes, "architecture": "resnet", "mbstd_channels": 1, "mbstd_group": 2}
    StyleGAN2Discriminator(**section)
    # stylegan3 gives the generator these directly, and leaves out what is its default.
    assert generator_section(g.state, {"z_dim": 4, "num_fp16_res": 0, "conv_clamp": None})["conv_clamp"] is None
    assert generator_section(g.state, {"z_dim": 4})["half_resolutions"] == 1
    imported_generator(g.state)
    imported_discriminator(d.state)


# Pickles by hand: each function returns the opcodes that leave one value on the stack.


class Code(bytes):
    """Opcodes."""


def code(value: Any) -> Code:
    """Opcodes of plain data, in which there may be other opcodes."""
    match value:
        case Code():
            return value
        case None:
            return Code(pickle.NONE)
        case bool():
            return Code(pickle.NEWTRUE if value else pickle.NEWFALSE)
        case int():
            return Code(pickle.BININT + struct.pack("<i", value))
        case str():
            return Code(pickle.BINUNICODE + struct.pack("<I", len(value.encode())) + value.encode())
        case bytes():
            return Code(pickle.BINBYTES + struct.pack("<I", len(value)) + value)
        case tuple():
            return Code(pickle.MARK + b"".join(map(code, value)) + pickle.TUPLE)
        case dict():
            items = b"".join(code(key) + code(entry) for key, entry in value.items())
            return Code(pickle.MARK + items + pickle.DICT)
    raise AssertionError(value)


def mention(module: str, name: str) -> Code:
    return Code(code(module) + code(name) + pickle.STACK_GLOBAL)


def call(function: Code, *arguments: Any) -> Code:
    return Code(function + code(arguments) + pickle.REDUCE)


def changed(value: Code, state: Any) -> Code:
    return Code(value + code(state) + pickle.BUILD)


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "network.pkl"
    path.write_bytes(pickle.PROTO + b"\x04" + code(content) + pickle.STOP)
    return path


PERSISTENT = mention("torch_utils.persistence", "_reconstruct_persistent_obj")
STORAGE = mention("torch.storage", "_load_from_bytes")
TENSOR = mention("torch._utils", "_rebuild_tensor_v2")
ORDERED = mention("collections", "OrderedDict")
EASY = mention("dnnlib.util", "EasyDict")
SYSTEM = mention("os", "system")


def module(**entries: Any) -> Code:
    state = {"_parameters": {}, "_buffers": {}, "_modules": {}, "_init_kwargs": {}, **entries}
    return call(PERSISTENT, {"class_name": "Generator", "module_src": "", "state": state})


def legacy(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def tensor(offset: Any = 0, size: Any = (2, 2), stride: Any = (2, 1), storage: Code | None = None) -> Code:
    four = call(STORAGE, legacy(torch.arange(4.0)._typed_storage()))
    return call(TENSOR, storage or four, offset, size, stride, False, call(ORDERED))


def test_the_pickles_made_here_have_the_layout_that_is_read(tmp_path):
    inner = module(_buffers={"w_avg": tensor(2, (2,), (1,))})
    g = module(_parameters={"weight": tensor(), "none": None}, _modules={"inner": inner, "none": None})
    networks = read_networks(written(tmp_path, {"G": g, "other": 3, "easy": Code(EASY + b")" + pickle.NEWOBJ)}))
    assert networks.keys() == {"G"}
    assert_close(
        networks["G"].state, {"weight": torch.tensor([[0.0, 1], [2, 3]]), "inner.w_avg": torch.tensor([2.0, 3])}
    )


def test_tensors_of_a_gpu_come_to_the_host(tmp_path):
    """What was saved on a GPU says so; and before protocol 4 an empty set was a call."""
    there = legacy(torch.arange(4.0)._typed_storage()).replace(b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:0")
    assert b"cuda:0" in there
    weight = tensor(storage=call(STORAGE, there))
    g = module(_parameters={"weight": weight}, _non_persistent_buffers_set=call(mention("builtins", "set"), ()))
    found = read_networks(written(tmp_path, {"G": g}))["G"].state["weight"]
    assert_close(found, torch.tensor([[0.0, 1], [2, 3]]))


class _Evil:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def a_module_in_itself() -> Code:
    children = pickle.EMPTY_DICT + pickle.BINPUT + b"\0"
    inner = module(_modules=Code(pickle.BINGET + b"\0"))
    return module(_modules=Code(children + code("child") + inner + pickle.SETITEM))


def a_module_twice() -> Code:
    return module(_modules={"one": Code(module() + pickle.BINPUT + b"\0"), "two": Code(pickle.BINGET + b"\0")})


# Values that a pickle asks for; ``command`` leaves a file.
EVIL: dict[str, Callable[[str], Code]] = {
    "os.system": lambda command: call(SYSTEM, command),
    "posix.system": lambda command: call(mention("posix", "system"), command),
    "eval": lambda command: call(mention("builtins", "eval"), f"__import__('os').system({command!r})"),
    "exec": lambda command: call(mention("builtins", "exec"), f"import os; os.system({command!r})"),
    "getattr": lambda command: call(call(mention("builtins", "getattr"), mention("os", "path"), "join"), command),
    "getattr of an allowed function": lambda _: call(mention("builtins", "getattr"), STORAGE, "__globals__"),
    "a method of an allowed class": lambda _: mention("collections", "OrderedDict.fromkeys"),
    "globals of an allowed function": lambda _: mention("torch.storage", "_load_from_bytes.__globals__"),
    "torch.load": lambda command: call(mention("torch", "load"), command),
    "torch.hub.load": lambda command: call(mention("torch.hub", "load"), command),
    "numpy.load": lambda command: call(mention("numpy", "load"), command),
    "copyreg": lambda _: mention("copyreg", "_reconstructor"),
    "an extension": lambda _: Code(pickle.EXT1 + b"\x01"),
    "a persistent id": lambda command: Code(code(command) + pickle.BINPERSID),
    "code in a storage": lambda command: call(STORAGE, legacy(_Evil(command))),
    "pickled code as a storage": lambda command: call(STORAGE, pickle.dumps(_Evil(command))),
    "another object as a storage": lambda _: call(STORAGE, legacy({"a": torch.zeros(1)})),
    "a path as a storage": lambda command: call(STORAGE, command),
    "a call of a placeholder": lambda command: call(module(), command),
    "a call of a tensor": lambda command: call(tensor(), command),
    "a call of a number": lambda command: call(call(mention("numpy", "dtype"), "f8"), command),
    "attributes for a placeholder": lambda _: changed(module(), (None, {"attributes": {}})),
    "attributes for a function": lambda _: changed(PERSISTENT, (None, {"_function": ORDERED})),
    "attributes for a tensor": lambda _: changed(tensor(), (None, {"content": 1})),
    "attributes for a dictionary": lambda _: changed(call(ORDERED), {"items": ORDERED}),
    "attributes for a class": lambda _: changed(EASY, (None, {"__init__": ORDERED})),
    "attributes for an instance": lambda _: changed(Code(EASY + b")" + pickle.NEWOBJ), {"items": ORDERED}),
    "an instance of a function": lambda _: Code(PERSISTENT + b")" + pickle.NEWOBJ),
    "a placeholder of nothing": lambda _: call(PERSISTENT),
    "a placeholder of another layout": lambda _: call(PERSISTENT, {"state": 3}),
    "a tensor beyond its storage": lambda _: tensor(1),
    "a tensor with a long stride": lambda _: tensor(stride=(3, 1)),
    "a tensor before its storage": lambda _: tensor(-1),
    "a tensor of negative size": lambda _: tensor(size=(-2, 2)),
    "a tensor of another shape than its strides": lambda _: tensor(stride=(1,)),
    "a tensor without a storage": lambda _: tensor(storage=call(ORDERED)),
    "a parameter that is none": lambda _: module(_parameters={"weight": "text"}),
    "a module that is none": lambda _: module(_modules={"child": call(ORDERED)}),
    "a module without entries": lambda _: module(_buffers=3),
    "a module in itself": lambda _: a_module_in_itself(),
    "a module twice": lambda _: a_module_twice(),
}


# These are refused where a network is read from them, and not as a value that nobody looks at.
HARMLESS = {name for name in EVIL if name.startswith(("a parameter", "a module"))}


@pytest.mark.parametrize("place", ["top", "argument"])
@pytest.mark.parametrize("name", EVIL)
def test_a_pickle_that_asks_for_more_is_refused_and_runs_nothing(tmp_path, name, place):
    mark = tmp_path / "ran"
    evil = EVIL[name](f"touch {mark}")
    path = written(tmp_path, {"G": evil if place == "top" else module(_init_kwargs={"z_dim": evil})})
    pickletools.dis(path.read_bytes(), out=io.StringIO())  # it is well-formed
    if place == "argument" and name in HARMLESS:
        assert read_networks(path)["G"].state == {}
    else:
        with pytest.raises(UserError, match="is no StyleGAN pickle that can be read safely"):
            read_networks(path)
    assert not mark.exists()


def test_pickles_of_this_kind_would_run_their_code_elsewhere(tmp_path):
    mark = tmp_path / "ran"
    pickle.loads(written(tmp_path, {"G": EVIL["os.system"](f"touch {mark}")}).read_bytes())
    assert mark.exists()


def test_files_that_are_no_pickles_are_refused(tmp_path):
    whole = (DATA / "snapshot.pkl").read_bytes()
    path = tmp_path / "network.pkl"
    for content in (b"", b"not a pickle", whole[:-1], whole[: len(whole) // 2], pickle.dumps([1, 2])):
        path.write_bytes(content)
        with pytest.raises(UserError, match="is no StyleGAN pickle"):
            read_networks(path)
    with pytest.raises(UserError, match=r"missing\.pkl: cannot be read"):
        read_networks(tmp_path / "missing.pkl")


def test_a_dotted_name_is_named_in_the_refusal(tmp_path):
    with pytest.raises(UserError, match=r"it asks for os\.system"):
        read_networks(written(tmp_path, {"G": call(SYSTEM, "true")}))
