"""Pickles of stylegan2-ada-pytorch and stylegan3: what they hold is read, and what they ask for is not done.

``tests/data/stylegan2/snapshot.pkl`` is in the layout of the original's training loop, with tiny networks of random
weights, but where the original puts the source text of its classes, this one has a statement that ends the program that
runs it. ``snapshot.safetensors`` has the same networks' state dictionaries.
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
from torch.testing import assert_close

from bigsgan.config.families.stylegan2 import StyleGAN2Discriminator, StyleGAN2Generator
from bigsgan.errors import UserError
from bigsgan.weights.stylegan import discriminator_section, discriminator_state, generator_section, generator_state
from bigsgan.weights.stylegan_pickle import read_snapshot

DATA = Path(__file__).resolve().parents[1] / "data" / "stylegan2"


def test_a_snapshot_is_read_without_running_its_source():
    networks = read_snapshot(DATA / "snapshot.pkl").networks
    assert networks.keys() == {"G", "D", "G_ema"}
    expected = load_file(DATA / "snapshot.safetensors")
    found = {f"{name}.{key}": t for name, network in networks.items() for key, t in network.state.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert b"raise SystemExit" in (DATA / "snapshot.pkl").read_bytes()


def test_a_snapshot_says_what_shapes_do_not():
    networks = read_snapshot(DATA / "snapshot.pkl").networks
    g, d = networks["G_ema"], networks["D"]
    precision = {"conv_clamp": 256.0, "half_resolutions": 1, "half_type": "fp16"}
    sizes = {"family": "stylegan2", "channel_base": 32, "channel_max": 4, "mapping_lr_multiplier": 0.01, **precision}
    section = generator_section(g.state, g.init_kwargs)
    shape = {"architecture": "skip", "latent_size": 4, "w_size": 4, "mapping_layers": 2}
    assert section == {**sizes, **shape, "w_avg_beta": 0.995}
    StyleGAN2Generator(**section)
    section = discriminator_section(d.state, d.init_kwargs)
    assert section == {**sizes, "architecture": "resnet", "mbstd_channels": 1, "mbstd_group": 2}
    StyleGAN2Discriminator(**section)
    # stylegan3 gives the generator these directly, and leaves out what is its default.
    assert generator_section(g.state, {"z_dim": 4, "num_fp16_res": 0, "conv_clamp": None})["conv_clamp"] is None
    newer = generator_section(g.state, {"z_dim": 4})
    assert (newer["half_resolutions"], newer["conv_clamp"], newer["w_avg_beta"]) == (1, 256.0, 0.998)
    generator_state(g.state)
    discriminator_state(d.state)


def network_of(kind: str, layer: dict[str, Any], *init_args: Any, **init_kwargs: Any) -> Code:
    """A network whose last part holds a layer with these attributes."""
    inner = module(_modules={"fc0" if kind == "G" else "fc": module(**layer)})
    children = {"synthesis": module(), "mapping": inner} if kind == "G" else {"b4": inner}
    return module(_modules=children, _init_args=init_args, _init_kwargs=init_kwargs)


def test_arguments_left_out_are_the_projects_own_defaults(tmp_path):
    """stylegan2-ada-pytorch has neither half precision nor limits unless told; stylegan3's layers keep their sizes."""
    content = {
        "G": network_of("G", {}, z_dim=4, synthesis_kwargs={"conv_clamp": 8}),
        "D": network_of("D", {}, c_dim=0),
        "G_ema": network_of("G", {"in_features": 4}, z_dim=4),
    }
    found = {name: network.init_kwargs for name, network in read_snapshot(written(tmp_path, content)).networks.items()}
    mapping, synthesis = {"w_avg_beta": 0.995}, {"num_fp16_res": 0, "conv_clamp": 8}
    assert found["G"] == {"z_dim": 4, "mapping_kwargs": mapping, "synthesis_kwargs": synthesis}
    assert found["D"] == {"c_dim": 0, "num_fp16_res": 0, "conv_clamp": None}
    assert found["G_ema"] == {"z_dim": 4}


def test_arguments_by_position_get_their_names(tmp_path):
    mapping, synthesis = {"num_layers": 2, "w_avg_beta": 1}, {"num_fp16_res": 1, "conv_clamp": 8}
    content = {
        "G": network_of("G", {}, 4, 0, 4, 8, 1, mapping, synthesis_kwargs=synthesis),
        "D": network_of("D", {"in_features": 4}, 0, 8, 1, "orig", 32, 4, 1, 16, None, {}, {}, {"mbstd_group_size": 2}),
    }
    found = {name: network.init_kwargs for name, network in read_snapshot(written(tmp_path, content)).networks.items()}
    assert found["G"].items() >= {"z_dim": 4, "mapping_kwargs": mapping, "synthesis_kwargs": synthesis}.items()
    assert found["D"].items() >= {"architecture": "orig", "conv_clamp": 16, "num_fp16_res": 1}.items()
    assert found["D"]["epilogue_kwargs"] == {"mbstd_group_size": 2}


def test_a_legacy_pickle_is_refused_by_name(tmp_path):
    network = call(mention("dnnlib.tflib.network", "Network"))
    with pytest.raises(UserError, match=r"legacy pickle of TensorFlow.*convert it with legacy\.py") as caught:
        read_snapshot(written(tmp_path, (network, network, network)))
    assert "\n" not in str(caught.value)


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
    content = {"G": g, "other": 3, "easy": Code(EASY + b")" + pickle.NEWOBJ)}
    networks = read_snapshot(written(tmp_path, content)).networks
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
    found = read_snapshot(written(tmp_path, {"G": g})).networks["G"].state["weight"]
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
    "eval": lambda command: call(mention("builtins", "eval"), f"__import__('os').system({command!r})"),
    "getattr of an allowed function": lambda _: call(mention("builtins", "getattr"), STORAGE, "__globals__"),
    "globals of an allowed function": lambda _: mention("torch.storage", "_load_from_bytes.__globals__"),
    "torch.load": lambda command: call(mention("torch", "load"), command),
    "an extension": lambda _: Code(pickle.EXT1 + b"\x01"),
    "a persistent id": lambda command: Code(code(command) + pickle.BINPERSID),
    "code in a storage": lambda command: call(STORAGE, legacy(_Evil(command))),
    "pickled code as a storage": lambda command: call(STORAGE, pickle.dumps(_Evil(command), protocol=2)),
    "a path as a storage": lambda command: call(STORAGE, command),
    "a call of a placeholder": lambda command: call(module(), command),
    "a call of a tensor": lambda command: call(tensor(), command),
    "attributes for a placeholder": lambda _: changed(module(), (None, {"attributes": {}})),
    "attributes for a function": lambda _: changed(PERSISTENT, (None, {"_function": ORDERED})),
    "attributes for a dictionary": lambda _: changed(call(ORDERED), {"items": ORDERED}),
    "attributes for a class": lambda _: changed(EASY, (None, {"__init__": ORDERED})),
    "an instance of a function": lambda _: Code(PERSISTENT + b")" + pickle.NEWOBJ),
    "a placeholder of another layout": lambda _: call(PERSISTENT, {"state": 3}),
    "a tensor beyond its storage": lambda _: tensor(1),
    "a tensor with a long stride": lambda _: tensor(stride=(3, 1)),
    "a tensor of negative size": lambda _: tensor(size=(-2, 2)),
    "a tensor of another shape than its strides": lambda _: tensor(stride=(1,)),
    "a tensor without a storage": lambda _: tensor(storage=call(ORDERED)),
    "a parameter that is none": lambda _: module(_parameters={"weight": "text"}),
    "a module that is none": lambda _: module(_modules={"child": call(ORDERED)}),
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
        assert read_snapshot(path).networks["G"].state == {}
    else:
        with pytest.raises(UserError, match="must be a pickle of StyleGAN or R3GAN that can be read safely"):
            read_snapshot(path)
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
        with pytest.raises(UserError, match="must be a pickle of StyleGAN or R3GAN"):
            read_snapshot(path)
    with pytest.raises(UserError, match=r"missing\.pkl: cannot be read"):
        read_snapshot(tmp_path / "missing.pkl")


def large(elements: int) -> Code:
    """A transposed tensor, which stands in the pickle's memo."""
    storage = call(STORAGE, legacy(torch.zeros(elements)._typed_storage()))
    return Code(tensor(0, (elements // 2, 2), (1, elements // 2), storage) + pickle.BINPUT + b"\x07")


def test_a_tensor_under_many_names_is_not_copied_for_each(tmp_path):
    again = Code(pickle.BINGET + b"\x07")

    def network(number: int) -> Code:
        return module(_parameters={"w0": large(20_000), **{f"w{i}": again for i in range(1, number)}})

    assert len(read_snapshot(written(tmp_path, {"G": network(4)})).networks["G"].state) == 4
    with pytest.raises(UserError, match="its tensors are larger than the file"):
        read_snapshot(written(tmp_path, {"G": network(6)}))
    shared = Code(pickle.BINPUT + b"\x08")
    names = {f"n{i}": Code(pickle.BINGET + b"\x08") for i in range(5)}
    with pytest.raises(UserError, match="its tensors are larger than the file"):
        read_snapshot(written(tmp_path, {"G": Code(network(1) + shared), **names}))


def test_bytes_that_are_given_again_are_the_same_storage(tmp_path):
    data = legacy(torch.zeros(20_000)._typed_storage())
    first = call(STORAGE, Code(code(data) + pickle.BINPUT + b"\x07"))
    second = call(STORAGE, Code(pickle.BINGET + b"\x07"))
    parameters = {name: tensor(0, (20_000,), (1,), storage) for name, storage in (("a", first), ("b", second))}
    state = read_snapshot(written(tmp_path, {"G": module(_parameters=parameters)})).networks["G"].state
    assert state["a"].data_ptr() == state["b"].data_ptr()


def test_a_class_name_may_be_anything(tmp_path):
    """Also pairs of pairs, of which each is the same one twice: they would take days to write."""
    nested = Code(code(1) + (pickle.DUP + pickle.TUPLE2) * 60)
    state = {"_parameters": {}, "_buffers": {}, "_modules": {}, "_init_kwargs": {}}
    network = call(PERSISTENT, {"class_name": nested, "state": state})
    assert read_snapshot(written(tmp_path, {"G": network})).networks["G"].state == {}
