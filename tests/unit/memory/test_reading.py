"""Ways of reading files: no effect on batches, and the choice between them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dasksc
from dasksc import memory as process_memory
from dasksc.errors import CorruptDataError
from dasksc.storage import buffers, files
from dasksc.storage.files import FileIdentity, LocalFile
from tests.support.data import LAYOUTS, make_adata, write_store

pytestmark = pytest.mark.core

N_OBS = 203
MIB = 2**20


@pytest.fixture(scope="module", params=LAYOUTS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(make_adata(n_obs=N_OBS), tmp_path_factory.mktemp("atlas"), "h5ad", request.param)


def of_memory(n_bytes: int) -> process_memory.Limit:
    return process_memory.Limit(n_bytes=process_memory.CODE_BYTES + n_bytes, held=0, source="a test")


def epoch(path: Path, strategy: Any, **options: Any) -> list[dict[str, Any]]:
    settings = {"batch_size": 8, "fetch_factor": 3, "seed": 0, "rank": 0, "world_size": 1, **options}
    dataset = dasksc.scDataset(path, strategy, obs=["int64"], layers=["counts"], **settings)
    return [entries(batch) for batch in dataset]


def entries(batch: dasksc.Batch) -> dict[str, Any]:
    found = {"X": batch.X, "counts": batch.layers["counts"]}
    found = {
        name: values.clone() if values.layout == torch.strided else values.to_dense() for name, values in found.items()
    }
    found |= {"index": batch.index, "int64": batch.obs["int64"]}
    if hasattr(batch, "control"):
        found |= {f"control {name}": values for name, values in entries(batch.control).items()}
    return found | ({"sets": batch.sets} if hasattr(batch, "sets") else {})


STRATEGIES = {
    "streaming": lambda block: dasksc.Streaming(),
    "shuffled": lambda block: dasksc.BlockShuffling(block),
    "weighted": lambda block: dasksc.BlockWeightedSampling(block, weights=np.arange(N_OBS), total_size=150),
    "balanced": lambda block: dasksc.ClassBalancedSampling(block_size=block, label_key="cell_type", total_size=150),
    "sets": lambda block: dasksc.CellSets("text", 4, control={"flag": True}, block_size=block),
}


@settings(max_examples=settings.default.max_examples * 2 // 5)  # each takes long
@given(
    mib=st.sampled_from([0, 20, 2**20]),
    mmap=st.sampled_from([True, False, "auto"]),
    strategy=st.sampled_from(sorted(STRATEGIES)),
    block=st.integers(1, 16),
    fetch_factor=st.integers(1, 9),
    scheduler=st.sampled_from(["threads", "synchronous"]),
    layout=st.sampled_from(["dense", "csr"]),
    past_cache=st.booleans(),
)
def test_the_way_of_reading_changes_no_batch(
    path, mib, mmap, strategy, block, fetch_factor, scheduler, layout, past_cache
) -> None:
    options = {"fetch_factor": fetch_factor, "scheduler": scheduler, "layout": layout}
    expected = epoch(path, STRATEGIES[strategy](block), **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_memory, "memory_limit", lambda: of_memory(mib * MIB))
        patch.setattr(process_memory, "own_bytes", lambda: 0)
        if past_cache:
            patch.setattr(files, "_SHORT_BYTES", 0)
            patch.setattr(files, "_seem_cached", lambda *_: False)
        found = epoch(path, STRATEGIES[strategy](block), mmap=mmap, **options)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(one[name].equal(other[name]) for name in one)


def test_the_largest_of_joined_files_are_the_first_to_be_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [
        dasksc.datasets.synthetic(tmp_path / f"{name}.h5ad", n_obs=n_obs, n_vars=300)
        for name, n_obs in {"small": 400, "large": 4_000, "middle": 1_200}.items()
    ]
    monkeypatch.setattr(process_memory, "own_bytes", lambda: 0)
    monkeypatch.setattr(buffers, "kept_bytes", lambda: 0)
    dataset = dasksc.scDataset(paths, dasksc.BlockShuffling(8), 64, fetch_factor=4, layout="csr", seed=0)

    def epoch_in(n_bytes: int) -> tuple[set[str], list[torch.Tensor]]:
        """Return the names of the files that an epoch maps, and its batches."""
        monkeypatch.setattr(process_memory, "memory_limit", lambda: of_memory(n_bytes))
        dataset.set_epoch(0)
        with mock.patch.object(LocalFile, "mapped", autospec=True, side_effect=LocalFile.mapped) as spy:
            batches = [batch.to_dense().clone() for batch in dataset]
        return {Path(call.args[0].path).stem for call in spy.call_args_list}, batches

    def unmapped_in(n_bytes: int) -> list[str]:
        monkeypatch.setattr(process_memory, "memory_limit", lambda: of_memory(n_bytes))
        labels = dataset.memory.reading_mode().unmapped
        return sorted(Path(label.partition(":/")[0]).stem for label in labels)

    modes: dict[tuple[str, ...], int] = {}
    for n_bytes in range(64 * MIB, 16 * MIB, -(2**17)):
        modes.setdefault(tuple(unmapped_in(n_bytes)), n_bytes)
    assert list(modes) == [(), ("large",), ("large", "middle"), ("large", "middle", "small")]
    mapped, expected = epoch_in(2**40)
    assert mapped == {"small", "middle", "large"}
    for unmapped, n_bytes in modes.items():
        mapped, found = epoch_in(n_bytes)
        assert mapped == {"small", "middle", "large"} - set(unmapped)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_direct_reads_reach_the_end_of_a_file_that_ends_in_a_page(tmp_path: Path) -> None:
    path = tmp_path / "odd"
    whole = np.random.default_rng(0).integers(0, 256, 3 * 2**20 + 777).astype(np.uint8)
    with path.open("wb") as written:
        written.write(whole.tobytes())
        os.fsync(written.fileno())
        os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    file = LocalFile(FileIdentity.of(str(path)))
    offsets, sizes = np.array([5, 2**20 + 3, 3 * 2**20 - 9]), np.array([2**19, 2**19 + 1, 786])
    found = file.read_direct(offsets, sizes)
    if found is None:
        pytest.skip("this file system has no direct reads, or keeps all files in memory")
    block, begins = found
    for begin, offset, size in zip(begins, offsets, sizes, strict=True):
        assert np.array_equal(block[begin : begin + size], whole[offset : offset + size])
    os.truncate(path, 2**21)
    with pytest.raises(CorruptDataError, match="ends at byte"):
        file.read_direct(offsets, sizes)
