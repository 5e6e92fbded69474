"""Checkpoints: a directory, the tag, holds the complete state of a run, or does not exist.

    checkpoints/000000016384/            named after the images seen
        rank00000.safetensors            written by that rank: stretches of named flat values
        manifest.json                    recipe, layout, numbers; size and checksum of every file; written last
    checkpoints/latest                   text file: the newest tag's name

A tag is written under another name and renamed once every rank has finished, so a killed save leaves nothing that looks
like a checkpoint. The next save removes what it leaves.

Every tensor's name says what it holds: ``generator/master/layers.3.weight@4096`` is a stretch of that parameter's
flattened float32 values, from element 4096 on. Over all files, every element occurs exactly once. So a run can resume
in any layout: each rank reads the stretches that its own shards need, whatever ranks and shards wrote them.
"""

from bigsgan.checkpoint.entries import BUFFER, MASTER, STEP, ObjectCollectives, SingleProcess, StateShard, saved_buffers
from bigsgan.checkpoint.reader import Reader, SavedValues, SharedState, StateEntry, files_with, restore
from bigsgan.checkpoint.saver import Description, Saver
from bigsgan.checkpoint.tags import (
    IMPORTED,
    Checkpoint,
    damage,
    differences,
    find,
    find_intact,
    first_intact,
    newest,
    newest_or_none,
)

__all__ = [
    "BUFFER",
    "IMPORTED",
    "MASTER",
    "STEP",
    "Checkpoint",
    "Description",
    "ObjectCollectives",
    "Reader",
    "SavedValues",
    "Saver",
    "SharedState",
    "SingleProcess",
    "StateEntry",
    "StateShard",
    "damage",
    "differences",
    "files_with",
    "find",
    "find_intact",
    "first_intact",
    "newest",
    "newest_or_none",
    "restore",
    "saved_buffers",
]
